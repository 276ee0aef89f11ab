/* SPDX-License-Identifier: Apache-2.0
 *
 * The performance infrastructure: power votes are recorded and change nothing. A restart of the
 * subsystem takes its clients away.
 */
#include "qnn_fake.h"

#include <stdio.h>
#include <string.h>

#define POWER_CONFIG_WORDS 17 /* option, then sixteen numbers */

static struct fake_table power_ids;
static char someone, voided; /* what the table holds: a client, or one from before a restart */

void fake_power_void(void) {
    for (uint32_t i = 1; i <= power_ids.size; i++)
        if (fake_table_get(&power_ids, i))
            power_ids.slots[i - 1] = &voided;
}

static uint64_t create_power_config(uint32_t device, uint32_t core, uint32_t *out) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "createPowerConfigId");
    fake_note(&call, "device=%u core=%u", device, core);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (device != 0 || core != 0 || out == NULL)
        return fake_end(&call, FAKE_PERF_ARGUMENT);
    pthread_mutex_lock(&fake_lock);
    *out = (uint32_t)fake_table_put(&power_ids, &someone);
    pthread_mutex_unlock(&fake_lock);
    fake_note(&call, "power=%u", *out);
    return fake_end(&call, *out ? FAKE_OK : FAKE_NO_MEMORY);
}

static uint64_t destroy_power_config(uint32_t id) {
    struct fake_call call;
    uint64_t code;
    bool known;

    fake_begin(&call, "destroyPowerConfigId");
    fake_note(&call, "power=%u", id);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    known = fake_table_get(&power_ids, id) == &someone;
    fake_table_drop(&power_ids, id);
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, known ? FAKE_OK : FAKE_PERF_ARGUMENT);
}

/* Notes what is asked for: "dcvs=ID:SET:ENABLE:MODE:..." or "option=N:VALUE". */
static void note_vote(struct fake_call *call, const void *config) {
    uint32_t words[POWER_CONFIG_WORDS] = {0};
    char text[256];
    size_t used = 0;

    memcpy(words, config, sizeof words[0] * 2);
    if (words[0] != 1) {
        fake_note(call, "option=%u:%u", words[0], words[1]);
        return;
    }
    memcpy(words, config, sizeof words);
    for (int i = 1; i < POWER_CONFIG_WORDS; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%u", i > 1 ? ":" : "",
                                 words[i]);
    fake_note(call, "dcvs=%s", text);
}

static uint64_t set_power_config(uint32_t id, const void *const *configs) {
    struct fake_call call;
    uint64_t code;
    bool known;

    fake_begin(&call, "setPowerConfig");
    fake_note(&call, "power=%u", id);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    known = fake_table_get(&power_ids, id) == &someone;
    pthread_mutex_unlock(&fake_lock);
    if (!known || configs == NULL)
        return fake_end(&call, FAKE_PERF_ARGUMENT);
    for (; *configs; configs++)
        note_vote(&call, *configs);
    return fake_end(&call, FAKE_OK);
}

static uint64_t set_memory_config(uint32_t device, uint32_t core, const void *const *configs) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "setMemoryConfig");
    fake_note(&call, "device=%u core=%u", device, core);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    for (; configs && *configs; configs++) {
        uint32_t words[2];

        memcpy(words, *configs, sizeof words);
        fake_note(&call, "option=%u:%u", words[0], words[1]);
    }
    return fake_end(&call, device == 0 && core == 0 ? FAKE_OK : FAKE_PERF_ARGUMENT);
}

uint64_t fake_device_get_infrastructure(const struct fake_infrastructure **out) {
    static const struct fake_infrastructure infrastructure = {
        .type = 0,
        .create_power_config = (fake_function)create_power_config,
        .destroy_power_config = (fake_function)destroy_power_config,
        .set_power_config = (fake_function)set_power_config,
        .set_memory_config = (fake_function)set_memory_config,
    };
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "deviceGetInfrastructure");
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (out)
        *out = &infrastructure;
    return fake_end(&call, out ? FAKE_OK : FAKE_INVALID_ARGUMENT);
}
