/* SPDX-License-Identifier: Apache-2.0
 * One call each, through the table. */
#include "qb_qnn_probe.h"

#include "qb_log.h"
#include "qb_qnn_slots.h"

#define CORE (qb_qnn_core_table(q))
#define PROFILE_BASIC 1u

static uint64_t signal_create(const qb_qnn *q, qb_handle backend, qb_handle *out) {
    QB_CALL(CORE, QB_SLOT_SIGNAL_CREATE, (qb_handle, const void *const *, qb_handle *),
            (backend, NULL, out));
}

static uint64_t signal_free(const qb_qnn *q, qb_handle made) {
    QB_CALL(CORE, QB_SLOT_SIGNAL_FREE, (qb_handle), (made));
}

uint64_t qb_qnn_probe_signal(const qb_qnn *q, qb_handle backend) {
    qb_handle made = 0;
    uint64_t code = signal_create(q, backend, &made);
    if (code == 0)
        signal_free(q, made);
    return code;
}

static uint64_t profile_create(const qb_qnn *q, qb_handle backend, qb_handle *out) {
    QB_CALL(CORE, QB_SLOT_PROFILE_CREATE, (qb_handle, uint32_t, qb_handle *),
            (backend, PROFILE_BASIC, out));
}

static uint64_t profile_free(const qb_qnn *q, qb_handle made) {
    QB_CALL(CORE, QB_SLOT_PROFILE_FREE, (qb_handle), (made));
}

uint64_t qb_qnn_probe_profile(const qb_qnn *q, qb_handle backend) {
    qb_handle made = 0;
    uint64_t code = profile_create(q, backend, &made);
    if (code == 0)
        profile_free(q, made);
    return code;
}

/* No tensors: a library that has the call refuses that. */
uint64_t qb_qnn_probe_async(const qb_qnn *q, qb_handle graph) {
    QB_CALL(CORE, QB_SLOT_GRAPH_EXECUTE_ASYNC,
            (qb_handle, void *, uint32_t, void *, uint32_t, qb_handle, qb_handle, void *, void *),
            (graph, NULL, 0, NULL, 0, 0, 0, NULL, NULL));
}

static uint64_t create_with_callback(const qb_qnn *q, qb_handle backend, qb_handle device,
                                     qb_handle *out) {
    /* Nothing that anybody could take for a binary, and callbacks that are none. */
    static const uint64_t binary[8];
    static const uint64_t callback[16];
    QB_CALL(CORE, QB_SLOT_CONTEXT_WITH_CALLBACK,
            (qb_handle, qb_handle, const void *const *, const void *, const void *, uint64_t,
             qb_handle *, qb_handle, qb_handle),
            (backend, device, NULL, callback, binary, sizeof binary, out, 0, 0));
}

uint64_t qb_qnn_probe_callback(const qb_qnn *q, qb_handle backend, qb_handle device) {
    qb_handle made = 0;
    uint64_t code = create_with_callback(q, backend, device, &made);
    if (code == 0)
        qb_qnn_context_free(q, made);
    return code;
}
