/* SPDX-License-Identifier: Apache-2.0
 * The performance infrastructure: a record of functions that the library owns. */
#include "qb_qnn_power.h"

#include <string.h>

#include "qb_log.h"
#include "qb_qnn_slots.h"
#include "qb_tensor.h"

/* Offsets in the infrastructure's record. */
enum { I_TYPE = 0, I_CREATE = 8, I_DESTROY = 16, I_SET = 24, TYPE_PERFORMANCE = 0 };

/* A power config is {u32 option, union of 32-bit numbers at 4}, 68 bytes; with room behind it. */
enum { OPTION_DCVS = 1, OPTION_RPC_LATENCY = 2, OPTION_RPC_POLLING = 3 };

typedef struct power_config {
    uint32_t words[32];
} power_config;

/* Words of the DCVS union, from 0. */
enum {
    D_ID,
    D_SET_DCVS,
    D_DCVS,
    D_POWER_MODE,
    D_SET_SLEEP_LATENCY,
    D_SLEEP_LATENCY,
    D_SET_SLEEP_DISABLE,
    D_SLEEP_DISABLE,
    D_SET_BUS,
    D_BUS_MIN,
    D_BUS_TARGET,
    D_BUS_MAX,
    D_SET_CORE,
    D_CORE_MIN,
    D_CORE_TARGET,
    D_CORE_MAX,
};

static uint64_t get_infrastructure(const qb_qnn *q, const void **out) {
    QB_CALL(qb_qnn_core_table(q), QB_SLOT_INFRASTRUCTURE, (const void **), (out));
}

/* NULL: there is none, or it is another kind. */
static const void *performance(const qb_qnn *q, size_t function) {
    const void *record = NULL;
    if (get_infrastructure(q, &record) != 0 || !record ||
        qb_u32(record, I_TYPE) != TYPE_PERFORMANCE)
        return NULL;
    return qb_ptr(record, function);
}

uint64_t qb_qnn_power_open(const qb_qnn *q, uint32_t device, uint32_t core, uint32_t *id) {
    uint64_t (*create)(uint32_t, uint32_t, uint32_t *) =
        (uint64_t(*)(uint32_t, uint32_t, uint32_t *))performance(q, I_CREATE);
    return create ? create(device, core, id) : QB_QNN_NOT_SUPPORTED;
}

uint64_t qb_qnn_power_close(const qb_qnn *q, uint32_t id) {
    uint64_t (*destroy)(uint32_t) = (uint64_t(*)(uint32_t))performance(q, I_DESTROY);
    return destroy ? destroy(id) : QB_QNN_NOT_SUPPORTED;
}

uint64_t qb_qnn_power_vote(const qb_qnn *q, uint32_t id, const qb_power_vote *vote) {
    uint64_t (*set)(uint32_t, const void *const *) =
        (uint64_t(*)(uint32_t, const void *const *))performance(q, I_SET);
    power_config configs[3];
    const void *list[4] = {NULL, NULL, NULL, NULL};
    int n = 0;
    uint32_t *dcvs = configs[0].words + 1;
    if (!set)
        return QB_QNN_NOT_SUPPORTED;
    memset(configs, 0, sizeof configs);
    configs[0].words[0] = OPTION_DCVS;
    dcvs[D_ID] = id;
    dcvs[D_SET_DCVS] = 1;
    dcvs[D_DCVS] = vote->dcvs;
    dcvs[D_POWER_MODE] = vote->power_mode;
    dcvs[D_SET_SLEEP_LATENCY] = 1;
    dcvs[D_SLEEP_LATENCY] = vote->sleep_latency_us;
    dcvs[D_SET_BUS] = dcvs[D_SET_CORE] = 1;
    dcvs[D_BUS_MIN] = dcvs[D_BUS_TARGET] = dcvs[D_BUS_MAX] = vote->corner;
    dcvs[D_CORE_MIN] = dcvs[D_CORE_TARGET] = dcvs[D_CORE_MAX] = vote->corner;
    list[n++] = &configs[0];
    if (vote->rpc_latency_us) {
        configs[n].words[0] = OPTION_RPC_LATENCY;
        configs[n].words[1] = vote->rpc_latency_us;
        list[n] = &configs[n];
        n++;
    }
    if (vote->rpc_polling_us) {
        configs[n].words[0] = OPTION_RPC_POLLING;
        configs[n].words[1] = vote->rpc_polling_us;
        list[n] = &configs[n];
        n++;
    }
    return set(id, list);
}
