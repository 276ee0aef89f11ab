/* SPDX-License-Identifier: Apache-2.0
 * The two records that describe memory to a QNN library, and the calls that take them. */
#include "qb_qnn_memory.h"

#include <string.h>

#include "qb_log.h"
#include "qb_qnn_slots.h"
#include "qb_tensor.h"

/* Records get room behind them: the library may be newer than this and read further. */
enum { ROOM = 128 };

/* Offsets in the descriptor of one registration. */
enum {
    M_RANK = 0,
    M_DIMS = 8,
    M_DTYPE = 24,
    M_TYPE = 28,
    M_UNION = 32, /* ION: the fd; custom: a pointer to the HTP part */
};

/* Offsets in the HTP part of a custom descriptor. */
enum {
    H_TYPE = 0,
    H_TOTAL = 8,
    H_FD = 16,
    H_OFFSET = 24,
    HTP_SHARED_BUFFER = 1,
};

static void put(uint8_t *record, size_t offset, const void *value, size_t bytes) {
    memcpy(record + offset, value, bytes);
}

static void put_u32(uint8_t *record, size_t offset, uint32_t value) {
    put(record, offset, &value, sizeof value);
}

static void put_u64(uint8_t *record, size_t offset, uint64_t value) {
    put(record, offset, &value, sizeof value);
}

uint64_t qb_qnn_memory_register(const qb_qnn *q, qb_handle context, const qb_memory_spec *spec,
                                qb_handle *out) {
    _Alignas(8) uint8_t descriptor[ROOM] = {0};
    _Alignas(8) uint8_t htp[ROOM] = {0};
    put_u32(descriptor, M_RANK, spec->rank);
    put_u64(descriptor, M_DIMS, (uintptr_t)spec->dims);
    put_u32(descriptor, M_DTYPE, spec->dtype);
    put_u32(descriptor, M_TYPE, spec->kind);
    if (spec->kind == QB_MEMORY_CUSTOM) {
        put_u32(htp, H_TYPE, HTP_SHARED_BUFFER);
        put_u64(htp, H_TOTAL, spec->total_bytes);
        put_u32(htp, H_FD, (uint32_t)spec->fd);
        put_u64(htp, H_OFFSET, spec->offset);
        put_u64(descriptor, M_UNION, (uintptr_t)htp);
    } else {
        put_u32(descriptor, M_UNION, (uint32_t)spec->fd);
    }
    QB_CALL(qb_qnn_core_table(q), QB_SLOT_MEM_REGISTER,
            (qb_handle, const void *, uint32_t, qb_handle *), (context, descriptor, 1, out));
}

uint64_t qb_qnn_memory_deregister(const qb_qnn *q, qb_handle memory) {
    QB_CALL(qb_qnn_core_table(q), QB_SLOT_MEM_DEREGISTER, (const qb_handle *, uint32_t),
            (&memory, 1));
}
