/* SPDX-License-Identifier: Apache-2.0
 *
 * Contexts: made from a binary with its weights really in memory, and gone without a trace.
 */
#include "qnn_fake.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DEFAULT_PRIORITY 100
#define MAX_PRIORITY 500
#define MAX_ENABLED 65536

static uint64_t memory_used; /* by the contexts that live; under fake_lock */

struct options {
    uint32_t priority;
    const char *const *enabled; /* NULL: all graphs */
    bool prepare_only, deferred;
};

static uint64_t custom_option(const struct fake_custom_config *custom, struct options *options) {
    if (custom == NULL)
        return FAKE_CONTEXT_CONFIG;
    switch (custom->option) {
    case 1:
    case 3:
    case 11:
        return FAKE_OK;
    case 4:
    case 12:
        return FAKE_NOT_SUPPORTED;
    case 7:
        options->prepare_only = (custom->first & 0xff) != 0;
        return FAKE_OK;
    default:
        return FAKE_CONTEXT_CONFIG;
    }
}

static uint64_t read_options(struct fake_call *call, const struct fake_config **config,
                             struct options *options) {
    for (; config && *config; config++) {
        const struct fake_config *entry = *config;
        uint64_t code;

        switch (entry->option) {
        case 0:
            code = custom_option(entry->as.pointer, options);
            if (code != FAKE_OK)
                return code;
            break;
        case 1:
            if (entry->as.number > MAX_PRIORITY)
                return FAKE_CONTEXT_CREATE;
            options->priority = entry->as.number;
            break;
        case 2:
        case 4:
            break;
        case 5:
            options->enabled = entry->as.pointer;
            break;
        case 9:
            options->deferred = (entry->as.number & 0xff) != 0;
            break;
        default:
            fake_why(call, "context config option %u", entry->option);
            return FAKE_NOT_SUPPORTED;
        }
    }
    return FAKE_OK;
}

/* With fake_lock held, as are all the static functions below. */
static bool take_memory(struct fake_context *context, const struct fake_binary *binary) {
    uint64_t limit = fake_switches_now().memory_limit, shared = 0, spill = 0;

    for (uint32_t i = 0; i < binary->graph_count; i++) {
        const struct fake_graph_spec *spec = &binary->graphs[i];

        context->weight_bytes += spec->weights;
        shared = spec->shared_weights > shared ? spec->shared_weights : shared;
        spill = spec->spill_fill > spill ? spec->spill_fill : spill;
    }
    context->weight_bytes += shared + spill;
    if (limit && (context->weight_bytes > limit || memory_used > limit - context->weight_bytes))
        return false;
    if (context->weight_bytes) {
        void *map = mmap(NULL, context->weight_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (map == MAP_FAILED)
            return false;
        context->weights = map;
    }
    memory_used += context->weight_bytes;
    return true;
}

static void give_memory(struct fake_context *context) {
    if (context->weights)
        munmap(context->weights, context->weight_bytes);
    memory_used -= context->weight_bytes;
    context->weights = NULL;
    context->weight_bytes = 0;
}

/* Which binaries can live in one process is a matter of how they were compiled: a context of another
 * class spoils the ones that are there, and kills the process when one of them executes. */
static bool class_conflict(const struct fake_binary *binary) {
    bool executing = false;

    for (uint32_t i = 1; binary->class_name[0] && i <= fake_contexts.size; i++) {
        struct fake_context *other = fake_table_get(&fake_contexts, i);

        if (!other || other->lost || !other->binary->class_name[0] ||
            strcmp(other->binary->class_name, binary->class_name) == 0)
            continue;
        other->poisoned = true;
        for (uint32_t g = 0; g < other->binary->graph_count; g++)
            executing |= other->graphs[g].on_device > 0;
    }
    return executing;
}

static bool is_enabled(const struct options *options, const char *name) {
    for (const char *const *at = options->enabled; at && *at; at++)
        if (strcmp(*at, name) == 0)
            return true;
    return options->enabled == NULL;
}

static void destroy(struct fake_context *context) {
    uint32_t leaked = fake_registrations_drop(context);

    if (leaked && !context->lost)
        fake_record_error("registration_leak", "context=%llu registrations=%u",
                          (unsigned long long)context->handle, leaked);
    for (uint32_t i = 0; context->binary && i < context->binary->graph_count; i++)
        fake_table_drop(&fake_graphs, context->graphs[i].handle);
    fake_table_drop(&fake_contexts, context->handle);
    give_memory(context);
    fake_mapped_release(&context->mapped);
    fake_binary_free(context->binary);
    free(context->graphs);
    free(context);
}

void fake_context_void(struct fake_context *context) {
    context->lost = true;
    if (context->calls == 0)
        give_memory(context);
}

static void wait_and_destroy(struct fake_context *context) {
    context->dying = true;
    pthread_cond_broadcast(&fake_changed);
    while (context->calls)
        pthread_cond_wait(&fake_changed, &fake_lock);
    destroy(context);
}

uint32_t fake_contexts_destroy_of(uint64_t backend, uint64_t device) {
    uint32_t destroyed = 0;

    for (uint32_t i = 1; i <= fake_contexts.size; i++) {
        struct fake_context *context = fake_table_get(&fake_contexts, i);

        if (!context || context->dying || (backend && context->backend != backend) ||
            (device && context->device != device))
            continue;
        destroyed += !context->lost;
        wait_and_destroy(context);
    }
    return destroyed;
}

static uint64_t owners_are_good(struct fake_call *call, uint64_t backend, uint64_t device) {
    const struct fake_owner *b = fake_table_get(&fake_backends, backend);
    const struct fake_owner *d = fake_table_get(&fake_devices, device);

    if (b == NULL || (device && d == NULL)) {
        fake_why(call, "no such backend or device");
        return FAKE_CONTEXT_HANDLE;
    }
    if (b->lost || (d && d->lost)) {
        fake_why(call, "the backend or device is from before the restart");
        return fake_lost_code(FAKE_RESTARTED);
    }
    return FAKE_OK;
}

static uint64_t chip_is_right(struct fake_call *call, const struct fake_binary *binary) {
    struct fake_switches switches = fake_switches_now();

    if (switches.hardware && binary->arch && binary->arch != switches.device_arch) {
        fake_why(call, "compiled for arch %u, the device has %u", binary->arch,
                 switches.device_arch);
        return FAKE_CONTEXT_WRONG_CHIP;
    }
    for (uint32_t i = 0; switches.shared_weights_crash && i < binary->graph_count; i++)
        if (binary->graphs[i].shared_weights) {
            fake_log(1, " <E> shared weights are not supported\n");
            fake_crash(SIGSEGV);
        }
    return FAKE_OK;
}

static struct fake_fault faults_of_create(const struct fake_binary *binary) {
    const char **names = calloc(binary->graph_count, sizeof *names);
    struct fake_fault fault;

    for (uint32_t i = 0; names && i < binary->graph_count; i++)
        names[i] = binary->graphs[i].name;
    fault = fake_faults_of("contextCreateFromBinary", names, names ? binary->graph_count : 0);
    free(names);
    return fault;
}

static uint64_t make(struct fake_call *call, struct fake_context *context,
                     const struct options *options) {
    const struct fake_binary *binary = context->binary;
    uint32_t listed = 0;
    uint64_t code;

    while (options->enabled && listed < MAX_ENABLED && options->enabled[listed])
        listed++;
    if (listed > binary->graph_count)
        return FAKE_CONTEXT_CREATE;
    code = owners_are_good(call, context->backend, context->device);
    if (code != FAKE_OK)
        return code;
    context->graphs = calloc(binary->graph_count, sizeof *context->graphs);
    if (context->graphs == NULL || !take_memory(context, binary)) {
        fake_why(call, "no memory for %llu bytes", (unsigned long long)context->weight_bytes);
        context->weight_bytes = 0;
        return FAKE_NO_MEMORY;
    }
    for (uint32_t i = 0; i < binary->graph_count; i++)
        context->graphs[i] = (struct fake_graph){
            .context = context,
            .spec = &binary->graphs[i],
            .priority = options->priority,
            .enabled = is_enabled(options, binary->graphs[i].name),
        };
    context->prepare_only = options->prepare_only;
    context->deferred = options->deferred;
    context->handle = fake_table_put(&fake_contexts, context);
    if (context->handle == 0) {
        give_memory(context);
        return FAKE_NO_MEMORY;
    }
    context->calls = 1; /* until it is whole */
    return FAKE_OK;
}

/* On success the context belongs to its table, where another thread may free it at once. */
static uint64_t create(struct fake_call *call, struct fake_context *context,
                       const struct options *options, void **out) {
    struct fake_fault fault = faults_of_create(context->binary);
    uint64_t generation = fake_generation_now();
    uint64_t wait_us = context->binary->create_us + fake_switches_now().create_us;
    uint64_t code = fake_fault_apply(call, &fault, generation);
    bool crash;

    if (code == FAKE_OK)
        code = chip_is_right(call, context->binary);
    if (code == FAKE_OK && fake_is_fatal())
        code = FAKE_LOST_FOR_GOOD;
    if (code == FAKE_OK && !fake_sleep_us(wait_us, generation))
        code = FAKE_RESTARTED;
    if (code != FAKE_OK)
        return code;
    pthread_mutex_lock(&fake_lock);
    crash = class_conflict(context->binary);
    code = make(call, context, options);
    pthread_mutex_unlock(&fake_lock);
    if (crash)
        fake_crash(SIGSEGV);
    if (code != FAKE_OK)
        return code;
    if (context->weights)
        memset(context->weights, 0x5a, context->weight_bytes);
    *out = fake_to_handle(context->handle);
    fake_note(call, "context=%llu bytes=%llu", (unsigned long long)context->handle,
              (unsigned long long)context->weight_bytes);
    pthread_mutex_lock(&fake_lock);
    context->calls = 0;
    if (context->lost)
        give_memory(context);
    pthread_cond_broadcast(&fake_changed);
    pthread_mutex_unlock(&fake_lock);
    return FAKE_OK;
}

uint64_t fake_context_create_from_binary(void *backend, void *device,
                                         const struct fake_config **config, const void *binary,
                                         uint64_t size, void **out, void *profile) {
    return fake_context_make(backend, device, config, binary, size, out, profile, NULL);
}

uint64_t fake_context_make(void *backend, void *device, const struct fake_config **config,
                           const void *binary, uint64_t size, void **out, void *profile,
                           const struct fake_mapped *mapped) {
    struct options options = {.priority = DEFAULT_PRIORITY};
    struct fake_context *context;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "contextCreateFromBinary");
    fake_note(&call, "backend=%llu device=%llu size=%llu", (unsigned long long)fake_handle(backend),
              (unsigned long long)fake_handle(device), (unsigned long long)size);
    if (binary == NULL || size == 0 || out == NULL || profile)
        return fake_end(&call, FAKE_CONTEXT_ARGUMENT);
    if ((code = read_options(&call, config, &options)) != FAKE_OK)
        return fake_end(&call, code);
    context = calloc(1, sizeof *context);
    if (context == NULL)
        return fake_end(&call, FAKE_NO_MEMORY);
    context->backend = fake_handle(backend);
    context->device = fake_handle(device);
    if (mapped)
        context->mapped = *mapped;
    code = fake_binary_parse(binary, size, &context->binary, call.why, sizeof call.why);
    if (code == FAKE_OK) {
        fake_note_text(&call, "graph", context->binary->graphs[0].name);
        fake_note(&call, "graphs=%u priority=%u", context->binary->graph_count, options.priority);
        code = create(&call, context, &options, out);
    }
    if (code != FAKE_OK) {
        fake_binary_free(context->binary);
        free(context->graphs);
        free(context);
        return fake_end(&call, code);
    }
    fake_log(3, " <I> context %llu made\n", (unsigned long long)fake_handle(*out));
    return fake_end(&call, FAKE_OK);
}

uint64_t fake_context_free(void *handle, void *profile) {
    struct fake_context *context;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "contextFree");
    fake_note(&call, "context=%llu", (unsigned long long)fake_handle(handle));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    context = fake_table_get(&fake_contexts, fake_handle(handle));
    code = context == NULL || context->dying || context->lost ? FAKE_CONTEXT_HANDLE : FAKE_OK;
    if (context && !context->dying)
        wait_and_destroy(context); /* a lost one, too: its handle can be used again */
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, code);
}

/* Accepted and without effect on the graphs that exist, like the real one. */
uint64_t fake_context_set_config(void *handle, const struct fake_config **config) {
    struct options ignored = {0};
    struct fake_context *context;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "contextSetConfig");
    fake_note(&call, "context=%llu", (unsigned long long)fake_handle(handle));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&fake_lock);
    context = fake_table_get(&fake_contexts, fake_handle(handle));
    code = context && !context->dying && !context->lost ? FAKE_OK : FAKE_CONTEXT_HANDLE;
    pthread_mutex_unlock(&fake_lock);
    if (code == FAKE_OK && config == NULL)
        code = FAKE_CONTEXT_ARGUMENT;
    if (code == FAKE_OK)
        code = read_options(&call, config, &ignored);
    return fake_end(&call, code);
}

uint64_t fake_context_get_binary_size(void *handle, uint64_t *out) {
    struct fake_call call;

    fake_begin(&call, "contextGetBinarySize");
    fake_note(&call, "context=%llu", (unsigned long long)fake_handle(handle));
    fake_why(&call, "the context was made from a binary");
    return fake_end(&call, FAKE_NOT_PERMITTED);
}
