/* SPDX-License-Identifier: Apache-2.0
 *
 * Registered memory: a mapping of its own for every handle, made from the caller's fd.
 *
 * Off by default, like in the emulation (every type gives 1000); mem_register=on makes it work as on
 * a device. Registrations belong to a context and end with it.
 */
#include "qnn_fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_REGISTERED 65536

/* Where the bytes of a descriptor are. */
struct place {
    int fd;
    uint64_t total, offset;
};

static uint64_t read_place(struct fake_call *call, const struct fake_memory_descriptor *d,
                           uint64_t bytes, struct place *place) {
    const struct fake_htp_descriptor *custom = d->as.custom;
    const struct fake_switches switches = fake_switches_now();

    if ((d->memory_type == 1 && !switches.mem_ion) ||
        (d->memory_type == 2 && !switches.mem_custom)) {
        fake_why(call, "a switch refuses memory type %u", d->memory_type);
        return FAKE_MEMORY_TYPE;
    }
    switch (d->memory_type) {
    case 1:
        *place = (struct place){.fd = d->as.fd, .total = bytes};
        return FAKE_OK;
    case 2:
        if (custom == NULL || custom->total_bytes == 0)
            return FAKE_MEMORY_ARGUMENT;
        if (custom->type != 1) {
            fake_why(call, "shared buffers only, not HTP memory type %u", custom->type);
            return FAKE_MEMORY_TYPE;
        }
        *place = (struct place){custom->fd, custom->total_bytes, custom->offset};
        return FAKE_OK;
    default:
        fake_why(call, "memory type %u", d->memory_type);
        return FAKE_MEMORY_TYPE;
    }
}

static uint64_t read_shape(const struct fake_memory_descriptor *d,
                           struct fake_registration *registration) {
    uint64_t elements = 1;

    if (d->dims == NULL || d->rank == 0 || d->rank > FAKE_MAX_RANK)
        return FAKE_MEMORY_SHAPE;
    for (uint32_t i = 0; i < d->rank; i++) {
        if (d->dims[i] == 0 || elements > UINT32_MAX / d->dims[i])
            return FAKE_MEMORY_SHAPE;
        elements *= d->dims[i];
        registration->dims[i] = d->dims[i];
    }
    registration->rank = d->rank;
    registration->dtype = d->dtype;
    registration->bytes = fake_dtype_bytes(d->dtype, elements);
    return registration->bytes ? FAKE_OK : FAKE_MEMORY_ARGUMENT;
}

static uint64_t map_place(struct fake_call *call, const struct place *place,
                          struct fake_registration *registration) {
    struct stat status;

    if (place->offset > place->total || registration->bytes > place->total - place->offset) {
        fake_why(call, "%llu bytes at %llu do not fit into a buffer of %llu",
                 (unsigned long long)registration->bytes, (unsigned long long)place->offset,
                 (unsigned long long)place->total);
        return FAKE_MEMORY_SHAPE;
    }
    registration->fd = fcntl(place->fd, F_DUPFD_CLOEXEC, 0);
    if (registration->fd < 0) {
        fake_why(call, "fd %d is not open", place->fd);
        return FAKE_MEMORY_ARGUMENT;
    }
    if (fstat(registration->fd, &status) != 0 || status.st_size < 0 ||
        (uint64_t)status.st_size < place->total) {
        fake_why(call, "the fd is smaller than %llu bytes", (unsigned long long)place->total);
        return FAKE_MEMORY_MAPPING;
    }
    registration->map =
        mmap(NULL, place->total, PROT_READ | PROT_WRITE, MAP_SHARED, registration->fd, 0);
    close(registration->fd); /* the mapping is all it takes */
    registration->fd = -1;
    if (registration->map == MAP_FAILED) {
        registration->map = NULL;
        fake_why(call, "the fd cannot be mapped for reading and writing");
        return FAKE_MEMORY_MAPPING;
    }
    registration->map_bytes = place->total;
    registration->offset = place->offset;
    return FAKE_OK;
}

static void give_back(struct fake_registration *registration) {
    if (registration->map)
        munmap(registration->map, registration->map_bytes);
    if (registration->fd >= 0)
        close(registration->fd);
    registration->map = NULL;
    registration->fd = -1;
}

static void drop(struct fake_registration *registration) {
    fake_table_drop(&fake_registrations, registration->handle);
    give_back(registration);
    free(registration);
}

/* With fake_lock held. */
static uint64_t add(struct fake_call *call, struct fake_context *context,
                    const struct fake_memory_descriptor *d, void **out) {
    struct fake_registration *registration = calloc(1, sizeof *registration);
    struct place place;
    uint64_t code;

    if (registration == NULL)
        return FAKE_NO_MEMORY;
    registration->fd = -1;
    registration->context = context;
    code = read_shape(d, registration);
    if (code == FAKE_OK)
        code = read_place(call, d, registration->bytes, &place);
    if (code == FAKE_OK)
        code = map_place(call, &place, registration);
    if (code == FAKE_OK &&
        (registration->handle = fake_table_put(&fake_registrations, registration)) == 0)
        code = FAKE_NO_MEMORY;
    if (code != FAKE_OK) {
        give_back(registration);
        free(registration);
        return code;
    }
    fake_note(call, "h%llu=%llu+%llu", (unsigned long long)registration->handle,
              (unsigned long long)place.offset, (unsigned long long)registration->bytes);
    *out = fake_to_handle(registration->handle);
    return FAKE_OK;
}

uint64_t fake_mem_register(void *handle, const struct fake_memory_descriptor *descriptors,
                           uint32_t count, void **out) {
    struct fake_context *context;
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "memRegister");
    fake_note(&call, "context=%llu count=%u", (unsigned long long)fake_handle(handle), count);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (!fake_switches_now().mem_register)
        return fake_end(&call, FAKE_NOT_SUPPORTED);
    if (descriptors == NULL || out == NULL || count == 0 || count > MAX_REGISTERED)
        return fake_end(&call, FAKE_MEMORY_ARGUMENT);
    pthread_mutex_lock(&fake_lock);
    context = fake_table_get(&fake_contexts, fake_handle(handle));
    if (fake_is_fatal_locked())
        code = FAKE_LOST_FOR_GOOD;
    else if (context == NULL || context->dying)
        code = FAKE_CONTEXT_HANDLE;
    else if (context->lost)
        code = fake_lost_code(FAKE_CONTEXT_HANDLE);
    for (uint32_t i = 0; i < count && code == FAKE_OK; i++) {
        code = add(&call, context, &descriptors[i], &out[i]);
        while (code != FAKE_OK && i > 0) /* all or none */
            drop(fake_table_get(&fake_registrations, fake_handle(out[--i])));
    }
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, code);
}

/* With fake_lock held, which it gives up while an execute uses the memory. */
static uint64_t remove_one(uint64_t handle) {
    struct fake_registration *registration = fake_table_get(&fake_registrations, handle);
    bool lost;

    if (registration == NULL)
        return FAKE_MEMORY_HANDLE;
    if (registration->users)
        fake_record_error("deregistered_in_use", "handle=%llu", (unsigned long long)handle);
    while (registration && registration->users) {
        pthread_cond_wait(&fake_changed, &fake_lock);
        registration = fake_table_get(&fake_registrations, handle);
    }
    if (registration == NULL)
        return FAKE_MEMORY_HANDLE;
    lost = registration->lost;
    drop(registration);
    return lost ? FAKE_MEMORY_HANDLE : FAKE_OK;
}

uint64_t fake_mem_deregister(void *const *handles, uint32_t count) {
    struct fake_call call;
    uint64_t code;

    fake_begin(&call, "memDeRegister");
    fake_note(&call, "count=%u", count);
    for (uint32_t i = 0; handles && i < count && i < 8; i++)
        fake_note(&call, "h%u=%llu", i, (unsigned long long)fake_handle(handles[i]));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (!fake_switches_now().mem_register)
        return fake_end(&call, FAKE_NOT_SUPPORTED);
    if (handles == NULL || count == 0)
        return fake_end(&call, FAKE_MEMORY_ARGUMENT);
    pthread_mutex_lock(&fake_lock);
    for (uint32_t i = 0; i < count && code == FAKE_OK; i++)
        code = remove_one(fake_handle(handles[i]));
    pthread_mutex_unlock(&fake_lock);
    return fake_end(&call, code);
}

/* Memory has at least one dimension: that of a tensor of rank 0 is registered as one element. */
static bool same_shape(const struct fake_registration *r, const struct fake_tensor *tensor) {
    if (tensor->rank == 0)
        return r->rank == 1 && r->dims[0] == 1;
    return r->rank == tensor->rank &&
           memcmp(r->dims, tensor->dims, r->rank * sizeof *r->dims) == 0;
}

struct fake_registration *fake_registration_use(struct fake_context *context,
                                                const struct fake_tensor *tensor,
                                                uint64_t handle, char *why, size_t room) {
    struct fake_registration *r = fake_table_get(&fake_registrations, handle);

    if (r == NULL || r->lost || r->context != context) {
        snprintf(why, room, "memory handle %llu is not of this context",
                 (unsigned long long)handle);
        return NULL;
    }
    if (r->dtype != tensor->dtype || !same_shape(r, tensor)) {
        snprintf(why, room, "memory handle %llu was registered for another type or shape",
                 (unsigned long long)handle);
        return NULL;
    }
    r->users++;
    return r;
}

void fake_registration_unuse(struct fake_registration *registration) {
    registration->users--;
    if (registration->lost && registration->users == 0)
        give_back(registration);
}

void fake_registration_void(struct fake_registration *registration) {
    registration->lost = true;
    if (registration->users == 0)
        give_back(registration);
}

uint32_t fake_registrations_drop(struct fake_context *context) {
    uint32_t dropped = 0;

    for (uint32_t i = 1; i <= fake_registrations.size; i++) {
        struct fake_registration *registration = fake_table_get(&fake_registrations, i);

        if (registration && registration->context == context) {
            drop(registration);
            dropped++;
        }
    }
    return dropped;
}
