/* SPDX-License-Identifier: Apache-2.0
 * The callbacks through which a QNN library reads a context binary. */
#define _GNU_SOURCE
#include "qb_qnn_mapped.h"

#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "qb_log.h"
#include "qb_qnn_slots.h"

enum { PAGE = 4096, NO_MEMORY = 1002, INVALID = 1004, VERSION = 1 };

/* By value in the first argument of both callbacks, so these are real structs. */
typedef struct request {
    uint64_t offset, size;
    bool needs_mapping;
} request;

typedef struct loan {
    int32_t fd;
    void *data;
} loan;

typedef struct response {
    loan memory;
    uint64_t data_offset, aligned_size;
} response;

typedef struct returned {
    loan memory;
    uint64_t size;
} returned;

typedef struct callback {
    uint32_t type; /* 0: memory with an fd */
    uint32_t unused;
    uint32_t version;
    uint64_t (*provide)(request, response *, void *);
    uint64_t (*release)(returned, void *);
    void *param;
    uint64_t room[16]; /* a newer library may read further */
} callback;

_Static_assert(offsetof(callback, version) == 8, "version");
_Static_assert(offsetof(callback, provide) == 16, "provide");
_Static_assert(offsetof(callback, param) == 32, "param");
_Static_assert(sizeof(request) == 24 && sizeof(response) == 32 && sizeof(returned) == 24, "records");

void qb_file_source_init(qb_file_source *source, const void *data, uint64_t size, int fd) {
    source->data = data;
    source->size = size;
    source->fd = fd;
    pthread_mutex_init(&source->lock, NULL);
    for (int i = 0; i < QB_FILE_LOANS; i++)
        source->loans[i] = -1;
}

void qb_file_source_end(qb_file_source *source) {
    for (int i = 0; i < QB_FILE_LOANS; i++)
        if (source->loans[i] >= 0)
            close(source->loans[i]);
    pthread_mutex_destroy(&source->lock);
}

uint32_t qb_file_source_lent(qb_file_source *source) {
    uint32_t count = 0;
    pthread_mutex_lock(&source->lock);
    for (int i = 0; i < QB_FILE_LOANS; i++)
        count += source->loans[i] >= 0;
    pthread_mutex_unlock(&source->lock);
    return count;
}

static uint64_t provide(request wanted, response *out, void *param) {
    qb_file_source *source = param;
    uint64_t code = NO_MEMORY;
    if (!out || wanted.size == 0 || wanted.offset > source->size ||
        wanted.size > source->size - wanted.offset)
        return INVALID;
    pthread_mutex_lock(&source->lock);
    for (int i = 0; i < QB_FILE_LOANS && code; i++) {
        if (source->loans[i] >= 0)
            continue;
        int fd = fcntl(source->fd, F_DUPFD_CLOEXEC, 3); /* every loan has a number of its own */
        if (fd < 0)
            break;
        source->loans[i] = fd;
        memset(out, 0, sizeof *out);
        out->memory.fd = fd;
        out->memory.data = (void *)(uintptr_t)(source->data + wanted.offset);
        out->aligned_size = (wanted.size + PAGE - 1) / PAGE * PAGE;
        code = 0;
    }
    pthread_mutex_unlock(&source->lock);
    return code;
}

static uint64_t take_back(returned back, void *param) {
    qb_file_source *source = param;
    uint64_t code = INVALID;
    pthread_mutex_lock(&source->lock);
    for (int i = 0; i < QB_FILE_LOANS && code; i++)
        if (source->loans[i] >= 0 && source->loans[i] == back.memory.fd) {
            close(source->loans[i]);
            source->loans[i] = -1;
            code = 0;
        }
    pthread_mutex_unlock(&source->lock);
    return code;
}

uint64_t qb_qnn_context_create_mapped(const qb_qnn *q, qb_handle backend, qb_handle device,
                                      qb_file_source *source, uint32_t priority,
                                      const char *const *enable_graphs, qb_handle *out) {
    qb_context_options options;
    callback record = {
        .version = VERSION, .provide = provide, .release = take_back, .param = source};
    uint64_t (*create)(qb_handle, qb_handle, const void *const *, const void *, const void *, uint64_t,
                       qb_handle *, qb_handle, qb_handle) =
        (uint64_t(*)(qb_handle, qb_handle, const void *const *, const void *, const void *, uint64_t,
                     qb_handle *, qb_handle, qb_handle))
            qb_qnn_slot(qb_qnn_core_table(q), QB_SLOT_CONTEXT_WITH_CALLBACK);
    qb_log_clear_error();
    if (!create)
        return QB_QNN_NOT_SUPPORTED;
    return create(backend, device, qb_context_options_fill(&options, priority, enable_graphs),
                  &record, source->data, source->size, out, 0, 0);
}
