/* SPDX-License-Identifier: Apache-2.0
 * Layout of the records that QNN passes in memory: where each field of a context binary's
 * description and of a tensor lies. Plain offsets instead of structs, because these records belong
 * to the library and their versions differ.
 *
 * Everything here is LP64 little endian. Pointers handed out point into the library's records and
 * are good as long as those are. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define QB_EXPORT __attribute__((visibility("default")))

#define QB_TENSOR_BYTES 144     /* stride of a tensor array */
#define QB_GRAPH_INFO_BYTES 88  /* stride of the array of graph descriptions */
#define QB_UNDEFINED 0x7FFFFFFFu

enum qb_tensor_type { QB_TENSOR_INPUT = 0, QB_TENSOR_OUTPUT = 1 };

enum qb_encoding {
    QB_ENCODING_TENSOR = 0,      /* one scale and offset */
    QB_ENCODING_AXIS = 1,        /* one pair per index of an axis */
    QB_ENCODING_BITS_TENSOR = 2, /* as 0, with a bit width */
    QB_ENCODING_BITS_AXIS = 3,   /* as 1, with a bit width; scales and offsets in two arrays */
};

static inline uint32_t qb_u32(const void *base, size_t offset) {
    uint32_t v;
    memcpy(&v, (const uint8_t *)base + offset, sizeof v);
    return v;
}

static inline uint64_t qb_u64(const void *base, size_t offset) {
    uint64_t v;
    memcpy(&v, (const uint8_t *)base + offset, sizeof v);
    return v;
}

static inline const void *qb_ptr(const void *base, size_t offset) {
    return (const void *)(uintptr_t)qb_u64(base, offset);
}

/* What a context binary says about itself. */
typedef struct qb_binary_view {
    uint32_t version, backend_id;
    const char *build_id, *soc_name;
    uint32_t core_api[3], backend_api[3], blob_version[3];
    uint64_t blob_bytes;
    uint32_t graph_count;
    const void *graphs;
    uint32_t soc_model, dsp_arch; /* 0: not stated */
} qb_binary_view;

/* One graph of it. The byte counts are those of an HTP graph, 0 where they are not stated. */
typedef struct qb_graph_view {
    uint32_t version;
    const char *name;
    uint32_t input_count, output_count;
    const void *inputs, *outputs; /* tensor arrays */
    uint64_t spill_fill_bytes, vtcm_bytes, io_bytes, weight_bytes, shared_weight_bytes;
} qb_graph_view;

typedef struct qb_tensor_view {
    uint32_t version, id, type, dtype, rank;
    const char *name;
    const void *dims; /* u32 each */
    /* Quantisation: real = (stored + offset) * scale. `pair_count` of them can be read. */
    bool quantized;
    uint32_t encoding, bits, pair_count;
    int32_t axis; /* -1: none */
    const void *union_base;
} qb_tensor_view;

/* These return false for a version of the record that is not known here. */
QB_EXPORT bool qb_binary_read(const void *record, qb_binary_view *out);
QB_EXPORT bool qb_graph_read(const void *array, uint32_t index, qb_graph_view *out);
QB_EXPORT bool qb_tensor_read(const void *array, uint32_t index, qb_tensor_view *out);

/* The scale and offset at `index` < pair_count; false when the library left the array out. */
QB_EXPORT bool qb_tensor_pair(const qb_tensor_view *t, uint32_t index, float *scale, int32_t *offset);

/* A tensor of our own to build a record from. The arrays stay the caller's and must outlive the
 * record: it points at them. */
typedef struct qb_tensor_spec {
    uint32_t id, type, dtype, rank;
    const char *name;
    const uint32_t *dims;
    bool quantized;
    uint32_t encoding, bits, pair_count;
    int32_t axis;
    const float *scales;
    const int32_t *offsets;
    const void *pairs; /* the same values interleaved {f32, i32}; for QB_ENCODING_AXIS */
} qb_tensor_spec;

/* Fills one record (version 1, dense, client memory of `size` bytes at `data`). An encoding other
 * than the four above is left undefined. */
QB_EXPORT void qb_tensor_build(void *record, const qb_tensor_spec *spec, void *data, uint32_t size);
