/* SPDX-License-Identifier: Apache-2.0
 * Reads and builds the records whose layout qb_tensor.h describes. */
#include "qb_tensor.h"

#include "qb_qnn_memory.h"

/* Every described record is {u32 version, padding, body at 8}. */
enum { BODY = 8 };

/* Offsets in the body of a tensor. */
enum {
    T_ID = 0,
    T_NAME = 8,
    T_TYPE = 16,
    T_DTYPE = 24,
    T_QUANT_DEFINITION = 32,
    T_QUANT_ENCODING = 36,
    T_QUANT_UNION = 40,
    T_RANK = 72,
    T_DIMS = 80,
    T_MEMORY_TYPE = 88,
    T_DATA = 96,
    T_SIZE = 104,
};

static void triplet(uint32_t out[3], const void *base, size_t offset) {
    for (int i = 0; i < 3; i++)
        out[i] = qb_u32(base, offset + 4 * i);
}

bool qb_binary_read(const void *record, qb_binary_view *out) {
    memset(out, 0, sizeof *out);
    out->version = qb_u32(record, 0);
    if (out->version < 1 || out->version > 3)
        return false;
    const uint8_t *body = (const uint8_t *)record + BODY;
    bool v3 = out->version == 3;
    out->backend_id = qb_u32(body, 0);
    out->build_id = qb_ptr(body, 8);
    triplet(out->core_api, body, 16);
    triplet(out->backend_api, body, 28);
    out->soc_name = qb_ptr(body, 40);
    triplet(out->blob_version, body, v3 ? 48 : 60);
    out->blob_bytes = qb_u64(body, v3 ? 64 : 88);
    out->graph_count = qb_u32(body, v3 ? 88 : 112);
    out->graphs = qb_ptr(body, v3 ? 96 : 120);
    if (!out->graphs)
        out->graph_count = 0;
    if (v3) {
        const void *metadata = qb_ptr(body, 120);
        if (metadata && qb_u32(body, 112) >= 8 && qb_u32(metadata, 0) == 1)
            out->dsp_arch = qb_u32(metadata, 4);
        out->soc_model = qb_u32(body, 128);
    }
    return true;
}

/* The HTP part of a version 3 graph description: two records, one behind the other. */
static void read_graph_blob(const void *blob, uint32_t size, qb_graph_view *out) {
    if (!blob || size < 40 || qb_u32(blob, 0) != 1)
        return;
    out->spill_fill_bytes = qb_u64(blob, 8);
    out->vtcm_bytes = qb_u32(blob, 16);
    if (size < 112 || qb_u32(blob, 40) != 2)
        return;
    out->io_bytes = qb_u64(blob, 72);
    out->weight_bytes = qb_u64(blob, 88);
    out->shared_weight_bytes = qb_u64(blob, 104);
}

bool qb_graph_read(const void *array, uint32_t index, qb_graph_view *out) {
    const uint8_t *record = (const uint8_t *)array + (size_t)index * QB_GRAPH_INFO_BYTES;
    const uint8_t *body = record + BODY;
    memset(out, 0, sizeof *out);
    out->version = qb_u32(record, 0);
    if (out->version < 1 || out->version > 3)
        return false;
    out->name = qb_ptr(body, 0);
    out->input_count = qb_u32(body, 8);
    out->inputs = qb_ptr(body, 16);
    out->output_count = qb_u32(body, 24);
    out->outputs = qb_ptr(body, 32);
    if (!out->inputs)
        out->input_count = 0;
    if (!out->outputs)
        out->output_count = 0;
    if (out->version == 3)
        read_graph_blob(qb_ptr(body, 64), qb_u32(body, 56), out);
    return true;
}

bool qb_tensor_read(const void *array, uint32_t index, qb_tensor_view *out) {
    const uint8_t *record = (const uint8_t *)array + (size_t)index * QB_TENSOR_BYTES;
    const uint8_t *body = record + BODY;
    memset(out, 0, sizeof *out);
    out->version = qb_u32(record, 0);
    if (out->version < 1 || out->version > 2) /* the fields used here lie alike in both */
        return false;
    out->id = qb_u32(body, T_ID);
    out->name = qb_ptr(body, T_NAME);
    out->type = qb_u32(body, T_TYPE);
    out->dtype = qb_u32(body, T_DTYPE);
    out->rank = qb_u32(body, T_RANK);
    out->dims = qb_ptr(body, T_DIMS);
    out->axis = -1;
    out->encoding = qb_u32(body, T_QUANT_ENCODING);
    out->quantized = qb_u32(body, T_QUANT_DEFINITION) == 1 && out->encoding != QB_UNDEFINED;
    if (!out->quantized)
        return true;
    const uint8_t *u = body + T_QUANT_UNION;
    out->union_base = u;
    switch (out->encoding) {
    case QB_ENCODING_TENSOR:
        out->pair_count = 1;
        break;
    case QB_ENCODING_AXIS:
        out->axis = (int32_t)qb_u32(u, 0);
        out->pair_count = qb_u32(u, 4);
        break;
    case QB_ENCODING_BITS_TENSOR:
        out->bits = qb_u32(u, 0);
        out->pair_count = 1;
        break;
    case QB_ENCODING_BITS_AXIS:
        out->bits = qb_u32(u, 0);
        out->axis = (int32_t)qb_u32(u, 4);
        out->pair_count = qb_u32(u, 8);
        break;
    }
    return true;
}

static bool read_pair(const void *base, size_t scale_at, size_t offset_at, float *scale,
                      int32_t *offset) {
    memcpy(scale, (const uint8_t *)base + scale_at, sizeof *scale);
    memcpy(offset, (const uint8_t *)base + offset_at, sizeof *offset);
    return true;
}

bool qb_tensor_pair(const qb_tensor_view *t, uint32_t index, float *scale, int32_t *offset) {
    const void *u = t->union_base, *scales, *offsets;
    if (!t->quantized || index >= t->pair_count)
        return false;
    switch (t->encoding) {
    case QB_ENCODING_TENSOR:
        return read_pair(u, 0, 4, scale, offset);
    case QB_ENCODING_BITS_TENSOR:
        return read_pair(u, 4, 8, scale, offset);
    case QB_ENCODING_AXIS:
        scales = qb_ptr(u, 8);
        return scales && read_pair(scales, 8 * (size_t)index, 8 * (size_t)index + 4, scale, offset);
    case QB_ENCODING_BITS_AXIS:
        scales = qb_ptr(u, 16);
        offsets = qb_ptr(u, 24);
        if (!scales)
            return false;
        memcpy(scale, (const uint8_t *)scales + 4 * (size_t)index, sizeof *scale);
        *offset = offsets ? (int32_t)qb_u32(offsets, 4 * (size_t)index) : 0; /* NULL: symmetric */
        return true;
    }
    return false;
}

static void put_u32(uint8_t *base, size_t offset, uint32_t v) { memcpy(base + offset, &v, sizeof v); }

static void put_f32(uint8_t *base, size_t offset, float v) { memcpy(base + offset, &v, sizeof v); }

static void put_ptr(uint8_t *base, size_t offset, const void *v) {
    uint64_t bits = (uintptr_t)v;
    memcpy(base + offset, &bits, sizeof bits);
}

/* True when the encoding could be written. */
static bool build_union(uint8_t *u, const qb_tensor_spec *s) {
    if (s->pair_count == 0 || !s->scales || !s->offsets)
        return false;
    switch (s->encoding) {
    case QB_ENCODING_TENSOR:
        put_f32(u, 0, s->scales[0]);
        put_u32(u, 4, (uint32_t)s->offsets[0]);
        return true;
    case QB_ENCODING_AXIS:
        put_u32(u, 0, (uint32_t)s->axis);
        put_u32(u, 4, s->pair_count);
        put_ptr(u, 8, s->pairs);
        return s->pairs != NULL;
    case QB_ENCODING_BITS_TENSOR:
        put_u32(u, 0, s->bits);
        put_f32(u, 4, s->scales[0]);
        put_u32(u, 8, (uint32_t)s->offsets[0]);
        return true;
    case QB_ENCODING_BITS_AXIS:
        put_u32(u, 0, s->bits);
        put_u32(u, 4, (uint32_t)s->axis);
        put_u32(u, 8, s->pair_count);
        put_ptr(u, 16, s->scales);
        put_ptr(u, 24, s->offsets);
        return true;
    }
    return false;
}

void qb_tensor_build(void *record, const qb_tensor_spec *spec, void *data, uint32_t size) {
    uint8_t *body = (uint8_t *)record + BODY;
    memset(record, 0, QB_TENSOR_BYTES);
    put_u32(record, 0, 1);
    put_u32(body, T_ID, spec->id);
    put_ptr(body, T_NAME, spec->name);
    put_u32(body, T_TYPE, spec->type);
    put_u32(body, T_DTYPE, spec->dtype);
    put_u32(body, T_RANK, spec->rank);
    put_ptr(body, T_DIMS, spec->dims);
    if (spec->quantized && build_union(body + T_QUANT_UNION, spec)) {
        put_u32(body, T_QUANT_DEFINITION, 1);
        put_u32(body, T_QUANT_ENCODING, spec->encoding);
    } else {
        memset(body + T_QUANT_UNION, 0, 32);
        put_u32(body, T_QUANT_DEFINITION, QB_UNDEFINED);
        put_u32(body, T_QUANT_ENCODING, QB_UNDEFINED);
    }
    put_u32(body, T_MEMORY_TYPE, 0); /* the client's own memory */
    put_ptr(body, T_DATA, data);
    put_u32(body, T_SIZE, size);
}

void qb_tensor_use_handle(void *record, qb_handle memory) {
    uint8_t *body = (uint8_t *)record + BODY;
    put_u32(body, T_MEMORY_TYPE, 1); /* registered memory: the handle lies where the address did */
    memcpy(body + T_DATA, &memory, sizeof memory);
    put_u32(body, T_SIZE, 0);
}
