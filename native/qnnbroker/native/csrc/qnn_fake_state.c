/* SPDX-License-Identifier: Apache-2.0
 *
 * The objects of the process: their handle tables, and what a subsystem restart does to them.
 */
#include "qnn_fake.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t fake_changed; /* of the monotonic clock */
struct fake_table fake_backends, fake_devices, fake_contexts, fake_graphs, fake_registrations;
uint64_t fake_generation = 1;

static bool fatal;           /* 1011 has been given */
static bool restart_pending; /* a restart that no call has told of yet */

__attribute__((constructor)) static void make_condition(void) {
    pthread_condattr_t attributes;

    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&fake_changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

uint64_t fake_table_put(struct fake_table *table, void *object) {
    uint32_t at = 0;

    while (at < table->size && table->slots[at])
        at++;
    if (at == table->size) {
        uint32_t size = table->size ? table->size * 2 : 16;
        void **slots = realloc(table->slots, size * sizeof *slots);

        if (slots == NULL)
            return 0;
        memset(slots + table->size, 0, (size - table->size) * sizeof *slots);
        table->slots = slots;
        table->size = size;
    }
    table->slots[at] = object;
    return at + 1;
}

void *fake_table_get(const struct fake_table *table, uint64_t handle) {
    return handle >= 1 && handle <= table->size ? table->slots[handle - 1] : NULL;
}

void fake_table_drop(struct fake_table *table, uint64_t handle) {
    if (handle >= 1 && handle <= table->size)
        table->slots[handle - 1] = NULL;
}

uint64_t fake_generation_now(void) {
    uint64_t generation;

    pthread_mutex_lock(&fake_lock);
    generation = fake_generation;
    pthread_mutex_unlock(&fake_lock);
    return generation;
}

/* The voided objects keep their handles until they are freed: a stale one is an error, not another
 * object. Threads that wait on the device or in a sleep notice the new generation. */
void fake_restart(bool told) {
    pthread_mutex_lock(&fake_lock);
    fake_generation++;
    restart_pending = !told;
    for (uint32_t i = 1; i <= fake_backends.size; i++)
        if (fake_table_get(&fake_backends, i))
            ((struct fake_owner *)fake_table_get(&fake_backends, i))->lost = true;
    for (uint32_t i = 1; i <= fake_devices.size; i++)
        if (fake_table_get(&fake_devices, i))
            ((struct fake_owner *)fake_table_get(&fake_devices, i))->lost = true;
    for (uint32_t i = 1; i <= fake_contexts.size; i++)
        if (fake_table_get(&fake_contexts, i))
            fake_context_void(fake_table_get(&fake_contexts, i));
    for (uint32_t i = 1; i <= fake_registrations.size; i++)
        if (fake_table_get(&fake_registrations, i))
            fake_registration_void(fake_table_get(&fake_registrations, i));
    fake_power_void();
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    fake_record_line("fault", " kind=restart", 0);
}

uint64_t fake_lost_code(uint64_t code) {
    if (restart_pending || code == FAKE_RESTARTED) {
        restart_pending = false;
        return FAKE_RESTARTED;
    }
    return code;
}

void fake_fatal(void) {
    pthread_mutex_lock(&fake_lock);
    fatal = true;
    pthread_mutex_unlock(&fake_lock);
}

bool fake_is_fatal_locked(void) {
    return fatal;
}

bool fake_is_fatal(void) {
    bool answer;

    pthread_mutex_lock(&fake_lock);
    answer = fatal;
    pthread_mutex_unlock(&fake_lock);
    return answer;
}
