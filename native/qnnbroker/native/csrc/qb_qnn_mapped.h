/* SPDX-License-Identifier: Apache-2.0
 * A context binary that a QNN library reads through callbacks, from a mapping that stays.
 *
 * The layout of the records is inferred from the names of their fields in public sources: use them
 * only with a library that says that it can (capability 220). */
#pragma once
#include <pthread.h>

#include "qb_qnn.h"

/* What a library may hold of one binary at a time. */
enum { QB_FILE_LOANS = 64 };

/* A mapped file that is lent out span by span, each with an fd of its own. It has to live until the
 * context is freed: the library gives spans back as late as then, or not at all. */
typedef struct qb_file_source {
    const uint8_t *data;
    uint64_t size;
    int fd;
    pthread_mutex_t lock;
    int loans[QB_FILE_LOANS]; /* -1: free */
} qb_file_source;

QB_EXPORT void qb_file_source_init(qb_file_source *source, const void *data, uint64_t size, int fd);
/* Closes the fds that are still out. */
QB_EXPORT void qb_file_source_end(qb_file_source *source);
QB_EXPORT uint32_t qb_file_source_lent(qb_file_source *source);

/* As qb_qnn_context_create, with the binary read through callbacks from `source`. */
QB_EXPORT uint64_t qb_qnn_context_create_mapped(const qb_qnn *q, qb_handle backend,
                                                qb_handle device, qb_file_source *source,
                                                uint32_t priority,
                                                const char *const *enable_graphs, qb_handle *out);
