/* SPDX-License-Identifier: Apache-2.0
 * Where the functions that we use lie in the tables of the two interface records. */
#pragma once
#include "qb_qnn.h"
#include "qb_tensor.h"

/* The table follows the fixed part of its record. */
enum { QB_CORE_TABLE = 40, QB_SYSTEM_TABLE = 32 };

/* Slots of the core table. Nothing above 74 may ever be read: the record may end there. */
enum {
    QB_SLOT_HAS_CAPABILITY = 0,
    QB_SLOT_BACKEND_CREATE = 1,
    QB_SLOT_BACKEND_BUILD_ID = 4,
    QB_SLOT_BACKEND_FREE = 8,
    QB_SLOT_CONTEXT_FROM_BINARY = 13,
    QB_SLOT_CONTEXT_FREE = 14,
    QB_SLOT_GRAPH_SET_CONFIG = 17,
    QB_SLOT_GRAPH_RETRIEVE = 20,
    QB_SLOT_GRAPH_EXECUTE = 21,
    QB_SLOT_GRAPH_EXECUTE_ASYNC = 22,
    QB_SLOT_LOG_CREATE = 25,
    QB_SLOT_LOG_FREE = 27,
    QB_SLOT_PROFILE_CREATE = 28,
    QB_SLOT_PROFILE_FREE = 34,
    QB_SLOT_MEM_REGISTER = 35,
    QB_SLOT_MEM_DEREGISTER = 36,
    QB_SLOT_PLATFORM_INFO = 37,
    QB_SLOT_FREE_PLATFORM_INFO = 38,
    QB_SLOT_INFRASTRUCTURE = 39,
    QB_SLOT_DEVICE_CREATE = 40,
    QB_SLOT_DEVICE_FREE = 43,
    QB_SLOT_SIGNAL_CREATE = 44,
    QB_SLOT_SIGNAL_FREE = 47,
    QB_SLOT_CONTEXT_WITH_CALLBACK = 68,
};

enum {
    QB_SYSTEM_SLOT_CREATE = 0,
    QB_SYSTEM_SLOT_BINARY_INFO = 1,
    QB_SYSTEM_SLOT_FREE = 3,
};

static inline const void *qb_qnn_core_table(const qb_qnn *q) {
    return (const uint8_t *)q->core + QB_CORE_TABLE;
}

static inline const void *qb_qnn_system_table(const qb_qnn *q) {
    return (const uint8_t *)q->system + QB_SYSTEM_TABLE;
}

static inline const void *qb_qnn_slot(const void *table, unsigned slot) {
    return qb_ptr(table, 8 * (size_t)slot);
}

/* Returns what the function in the slot says, or "not supported" when the slot is empty. For a
 * function whose whole rest is this call; include qb_log.h. */
#define QB_CALL(table, slot, types, values)                                                        \
    do {                                                                                           \
        uint64_t(*function) types = (uint64_t(*) types)qb_qnn_slot(table, slot);                   \
        qb_log_clear_error();                                                                      \
        return function ? function values : QB_QNN_NOT_SUPPORTED;                                  \
    } while (0)
