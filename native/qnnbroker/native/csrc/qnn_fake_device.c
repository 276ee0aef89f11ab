/* SPDX-License-Identifier: Apache-2.0
 *
 * Backends and devices, what the device says of itself, and the performance infrastructure.
 */
#include "qnn_fake.h"

#include <stdlib.h>

/* A platform info and everything it points at, in one piece. */
struct platform {
    struct fake_platform info;
    struct fake_device_record device;
    struct fake_core_record core;
    struct fake_htp_device extension;
};

struct device {
    struct fake_owner owner; /* first: the table holds owners */
    struct platform platform;
};

static void describe(struct platform *platform) {
    struct fake_switches switches = fake_switches_now();

    *platform = (struct platform){
        .info = {.version = 1, .device_count = 1, .devices = &platform->device},
        .device = {.version = 1,
                   .core_count = 1,
                   .cores = &platform->core,
                   .extension = &platform->extension},
        .core = {.version = 1},
        .extension = {.vtcm_mb = switches.vtcm_mb,
                      .soc_model = switches.soc,
                      .arch = switches.device_arch},
    };
}

uint64_t fake_backend_create(void *logger, const struct fake_config **config, void **out) {
    struct fake_call call;
    struct fake_owner *backend;
    uint64_t code;

    fake_begin(&call, "backendCreate");
    fake_note(&call, "logger=%llu", (unsigned long long)fake_handle(logger));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (out == NULL)
        return fake_end(&call, FAKE_BACKEND_ARGUMENT);
    if (fake_is_fatal())
        return fake_end(&call, FAKE_LOST_FOR_GOOD);
    backend = calloc(1, sizeof *backend);
    if (backend == NULL)
        return fake_end(&call, FAKE_NO_MEMORY);
    pthread_mutex_lock(&fake_lock);
    backend->handle = fake_table_put(&fake_backends, backend);
    *out = fake_to_handle(backend->handle);
    pthread_mutex_unlock(&fake_lock);
    fake_note(&call, "backend=%llu", (unsigned long long)fake_handle(*out));
    return fake_end(&call, FAKE_OK);
}

uint64_t fake_backend_set_config(void *backend, const struct fake_config **config) {
    struct fake_call call;
    uint64_t code;
    bool known;

    fake_begin(&call, "backendSetConfig");
    fake_note(&call, "backend=%llu", (unsigned long long)fake_handle(backend));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    known = fake_table_get(&fake_backends, fake_handle(backend)) != NULL;
    pthread_mutex_unlock(&fake_lock);
    if (!known)
        return fake_end(&call, FAKE_BACKEND_HANDLE);
    return fake_end(&call, config && *config ? FAKE_NOT_SUPPORTED : FAKE_OK);
}

uint64_t fake_backend_get_api_version(struct fake_api_version *out) {
    struct fake_switches switches = fake_switches_now();

    if (out == NULL)
        return FAKE_BACKEND_ARGUMENT;
    *out = (struct fake_api_version){
        {switches.core_api[0], switches.core_api[1], switches.core_api[2]}, {5, 51, 0}};
    return FAKE_OK;
}

uint64_t fake_backend_get_build_id(const char **out) {
    static char build[64]; /* as it was at the first call: the caller keeps the pointer */

    if (out == NULL)
        return FAKE_BACKEND_ARGUMENT;
    pthread_mutex_lock(&fake_lock);
    if (build[0] == 0) {
        struct fake_switches switches = fake_switches_now();

        for (size_t i = 0; i < sizeof build; i++)
            build[i] = switches.build[i];
    }
    pthread_mutex_unlock(&fake_lock);
    *out = build;
    return FAKE_OK;
}

/* Frees a backend or a device and, as the real library does, the contexts that still use it. */
static uint64_t free_owner(struct fake_call *call, struct fake_table *table, uint64_t handle,
                           bool is_backend, uint64_t bad_handle) {
    struct fake_owner *owner;
    uint32_t destroyed = 0;

    pthread_mutex_lock(&fake_lock);
    owner = fake_table_get(table, handle);
    if (owner) {
        destroyed = fake_contexts_destroy_of(is_backend ? handle : 0, is_backend ? 0 : handle);
        owner = fake_table_get(table, handle); /* another thread may have been quicker */
        fake_table_drop(table, handle);
    }
    pthread_mutex_unlock(&fake_lock);
    if (destroyed)
        fake_record_error("freed_with_live_contexts", "call=%s contexts=%u", call->name,
                          destroyed);
    free(owner);
    return fake_end(call, owner ? FAKE_OK : bad_handle);
}

uint64_t fake_backend_free(void *backend) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "backendFree");
    fake_note(&call, "backend=%llu", (unsigned long long)fake_handle(backend));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    return free_owner(&call, &fake_backends, fake_handle(backend), true, FAKE_BACKEND_HANDLE);
}

uint64_t fake_device_get_platform_info(void *logger, const struct fake_platform **out) {
    struct fake_call call;
    struct platform *platform;
    uint64_t code;

    fake_begin(&call, "deviceGetPlatformInfo");
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    platform = out ? calloc(1, sizeof *platform) : NULL;
    if (platform == NULL)
        return fake_end(&call, out ? FAKE_NO_MEMORY : FAKE_INVALID_ARGUMENT);
    describe(platform);
    *out = &platform->info;
    return fake_end(&call, FAKE_OK);
}

uint64_t fake_device_free_platform_info(void *logger, const struct fake_platform *info) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "deviceFreePlatformInfo");
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    free((void *)info); /* the first member of what describe() filled */
    return fake_end(&call, info ? FAKE_OK : FAKE_INVALID_ARGUMENT);
}

/* Options of the custom config: 0 SoC, 1 minimum arch, 2 signed process domain. */
static uint64_t check_device_config(struct fake_call *call, const struct fake_config **config) {
    for (; config && *config; config++) {
        const struct fake_custom_config *custom = (*config)->as.pointer;

        if ((*config)->option != 0 || custom == NULL)
            return FAKE_DEVICE_CONFIG;
        fake_note(call, "option=%u:%u:%u", custom->option, custom->first, custom->second);
        if (custom->option > 2 || (custom->option == 0 && custom->first == 0))
            return FAKE_DEVICE_CONFIG;
    }
    return FAKE_OK;
}

uint64_t fake_device_create(void *logger, const struct fake_config **config, void **out) {
    struct fake_call call;
    struct device *device;
    uint64_t code;

    fake_begin(&call, "deviceCreate");
    fake_note(&call, "logger=%llu", (unsigned long long)fake_handle(logger));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (out == NULL)
        return fake_end(&call, FAKE_INVALID_ARGUMENT);
    if (fake_is_fatal())
        return fake_end(&call, FAKE_LOST_FOR_GOOD);
    if ((code = check_device_config(&call, config)) != FAKE_OK)
        return fake_end(&call, code);
    device = calloc(1, sizeof *device);
    if (device == NULL)
        return fake_end(&call, FAKE_NO_MEMORY);
    describe(&device->platform);
    pthread_mutex_lock(&fake_lock);
    device->owner.handle = fake_table_put(&fake_devices, device);
    *out = fake_to_handle(device->owner.handle);
    pthread_mutex_unlock(&fake_lock);
    fake_note(&call, "device=%llu", (unsigned long long)fake_handle(*out));
    return fake_end(&call, FAKE_OK);
}

uint64_t fake_device_get_info(void *handle, const struct fake_platform **out) {
    struct fake_call call;
    struct device *device;
    uint64_t code;

    fake_begin(&call, "deviceGetInfo");
    fake_note(&call, "device=%llu", (unsigned long long)fake_handle(handle));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    device = fake_table_get(&fake_devices, fake_handle(handle));
    if (device && out)
        *out = &device->platform.info;
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, !device ? FAKE_DEVICE_HANDLE : out ? FAKE_OK : FAKE_INVALID_ARGUMENT);
}

uint64_t fake_device_free(void *device) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "deviceFree");
    fake_note(&call, "device=%llu", (unsigned long long)fake_handle(device));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    return free_owner(&call, &fake_devices, fake_handle(device), false, FAKE_DEVICE_HANDLE);
}
