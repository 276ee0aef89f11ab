/* SPDX-License-Identifier: Apache-2.0
 * Memory that a QNN context knows: registering a span of an fd, and using the handle in a tensor.
 *
 * Threads: any, without the GIL. */
#pragma once
#include "qb_qnn.h"

/* How memory is described to the library. */
enum qb_memory_kind {
    QB_MEMORY_ION = 1,    /* an fd that holds one tensor, from its start */
    QB_MEMORY_CUSTOM = 2, /* a span of an fd that many tensors share */
};

typedef struct qb_memory_spec {
    enum qb_memory_kind kind;
    int fd;
    uint64_t total_bytes, offset; /* of the whole buffer; of the tensor in it */
    uint32_t dtype, rank;
    const uint32_t *dims;
} qb_memory_spec;

/* Returns a QNN code; `out` is written only when that is 0. */
QB_EXPORT uint64_t qb_qnn_memory_register(const qb_qnn *q, qb_handle context,
                                          const qb_memory_spec *spec, qb_handle *out);
QB_EXPORT uint64_t qb_qnn_memory_deregister(const qb_qnn *q, qb_handle memory);

/* Makes a tensor record that qb_tensor_build filled use registered memory instead of an address. A
 * handle that no registration gave crashes the library. */
QB_EXPORT void qb_tensor_use_handle(void *record, qb_handle memory);

/* Executes of this process so far whose tensors were all registered memory; and all others. */
QB_EXPORT uint64_t qb_qnn_executes_registered(void);
QB_EXPORT uint64_t qb_qnn_executes_raw(void);
