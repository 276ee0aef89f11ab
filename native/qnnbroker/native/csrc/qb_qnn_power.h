/* SPDX-License-Identifier: Apache-2.0
 * Votes for the clocks of the NPU, through the performance infrastructure of a QNN device.
 *
 * Threads: any, without the GIL. A vote is a message to the DSP and may block for milliseconds. */
#pragma once
#include "qb_qnn.h"

/* The numbers of a clock vote that a mode sets; the rest is fixed. */
typedef struct qb_power_vote {
    bool dcvs;              /* clocks may follow the load */
    uint32_t power_mode;    /* how they do */
    uint32_t sleep_latency_us;
    uint32_t corner;        /* voltage corner of bus and core: least, wanted and most */
    uint32_t rpc_latency_us; /* 0: not voted for */
    uint32_t rpc_polling_us; /* likewise */
} qb_power_vote;

/* Each returns a QNN code; "not supported" when the device has no such infrastructure. */
QB_EXPORT uint64_t qb_qnn_power_open(const qb_qnn *q, uint32_t device, uint32_t core,
                                     uint32_t *id);
QB_EXPORT uint64_t qb_qnn_power_vote(const qb_qnn *q, uint32_t id, const qb_power_vote *vote);
QB_EXPORT uint64_t qb_qnn_power_close(const qb_qnn *q, uint32_t id);
