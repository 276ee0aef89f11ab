/* SPDX-License-Identifier: Apache-2.0
 *
 * The two lines of the format that say most: a tensor and an op, checked to the last word.
 */
#include "qnn_fake.h"

#include <stdlib.h>
#include <string.h>

#define MAX_NAME 256
#define MAX_CHANNELS 65536

struct quantization_words {
    const char *scale, *offset, *axis, *scales, *offsets, *bits;
};

static bool count_bytes(struct fake_tensor *tensor) {
    tensor->elements = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        tensor->elements *= tensor->dims[i];
        if (tensor->elements > UINT32_MAX)
            return false;
    }
    tensor->bytes = fake_dtype_bytes(tensor->dtype, tensor->elements);
    return tensor->bytes > 0 && tensor->bytes <= UINT32_MAX;
}

/* The next item of a list that commas part, cut out in place; NULL at the end. */
static char *next_item(char **rest) {
    char *item = *rest;
    char *comma = item ? strchr(item, ',') : NULL;

    if (comma)
        *comma = 0;
    *rest = comma ? comma + 1 : NULL;
    return item;
}

static bool scale_word(const char *word, float *out) {
    return fake_word_float(word, out) && *out > 0;
}

static bool per_axis(struct fake_arena *arena, const struct quantization_words *words,
                     struct fake_tensor *tensor, uint32_t bits) {
    struct fake_quantization *q = &tensor->quantization;
    char *scales = fake_arena_text(arena, words->scales);
    char *offsets = words->offsets ? fake_arena_text(arena, words->offsets) : NULL;
    struct fake_scale_offset *pairs;
    float *scale_list;
    int32_t *offset_list;
    uint32_t axis, count;

    if (tensor->rank == 0 || !scales || (words->offsets && !offsets) ||
        !fake_word_u32(words->axis, tensor->rank - 1, &axis))
        return false;
    count = tensor->dims[axis];
    if (count > MAX_CHANNELS)
        return false;
    pairs = fake_arena_get(arena, count * sizeof *pairs);
    scale_list = fake_arena_get(arena, count * sizeof *scale_list);
    offset_list = fake_arena_get(arena, count * sizeof *offset_list);
    if (!pairs || !scale_list || !offset_list)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        char *scale = next_item(&scales);
        char *offset = words->offsets ? next_item(&offsets) : "0";

        if (!scale || !offset || !scale_word(scale, &pairs[i].scale) ||
            !fake_word_i32(offset, &pairs[i].offset))
            return false;
        scale_list[i] = pairs[i].scale;
        offset_list[i] = pairs[i].offset;
    }
    if (scales || (words->offsets && offsets))
        return false; /* more than the axis has */
    q->encoding = bits ? 3 : 1;
    if (bits) {
        q->as.width_axis.bits = bits;
        q->as.width_axis.axis = (int32_t)axis;
        q->as.width_axis.count = count;
        q->as.width_axis.scales = scale_list;
        q->as.width_axis.offsets = words->offsets ? offset_list : NULL;
    } else {
        q->as.axis.axis = (int32_t)axis;
        q->as.axis.count = count;
        q->as.axis.pairs = pairs;
    }
    return true;
}

static bool quantize(struct fake_arena *arena, const struct quantization_words *words,
                     struct fake_tensor *tensor) {
    struct fake_quantization *q = &tensor->quantization;
    struct fake_scale_offset one = {0};
    uint32_t bits = 0;

    q->definition = q->encoding = FAKE_NONE;
    if (!fake_dtype_is_quantized(tensor->dtype))
        return !words->scale && !words->offset && !words->axis && !words->scales &&
               !words->offsets && !words->bits;
    q->definition = 1;
    if (words->bits && (!fake_word_u32(words->bits, 16, &bits) || bits == 0))
        return false;
    if (words->axis)
        return words->scales && !words->scale && !words->offset &&
               per_axis(arena, words, tensor, bits);
    if (words->scales || words->offsets || !words->scale ||
        !scale_word(words->scale, &one.scale) ||
        (words->offset && !fake_word_i32(words->offset, &one.offset)))
        return false;
    q->encoding = bits ? 2 : 0;
    if (bits) {
        q->as.width_tensor.bits = bits;
        q->as.width_tensor.scale = one.scale;
        q->as.width_tensor.offset = one.offset;
    } else {
        q->as.tensor = one;
    }
    return true;
}

static bool option(char *word, struct quantization_words *words, const char **id) {
    const struct {
        const char *key;
        const char **value;
    } known[] = {
        {"id=", id},
        {"scale=", &words->scale},
        {"offset=", &words->offset},
        {"axis=", &words->axis},
        {"scales=", &words->scales},
        {"offsets=", &words->offsets},
        {"bits=", &words->bits},
    };

    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t length = strlen(known[i].key);

        if (strncmp(word, known[i].key, length) == 0 && *known[i].value == NULL) {
            *known[i].value = word + length;
            return true;
        }
    }
    return false;
}

/* input|output NAME DTYPE DIMS [id=N] [scale=F [offset=I] | axis=I scales=F,F [offsets=I,I]] [bits=N]
 */
bool fake_tensor_line(struct fake_arena *arena, const struct fake_line *line,
                      struct fake_tensor *tensor) {
    struct quantization_words words = {0};
    const char *id = NULL;
    char name[MAX_NAME];
    uint32_t dims[FAKE_MAX_RANK];

    if (line->count < 4 || !fake_word_name(line->words[1], name, sizeof name) ||
        !fake_word_dims(line->words[3], dims, &tensor->rank))
        return false;
    tensor->dtype = fake_dtype_from(line->words[2]);
    tensor->name = fake_arena_text(arena, name);
    tensor->dims = fake_arena_get(arena, sizeof dims);
    if (tensor->name == NULL || tensor->dims == NULL)
        return false;
    memcpy(tensor->dims, dims, tensor->rank * sizeof *dims);
    if (!count_bytes(tensor))
        return false;
    for (uint32_t i = 4; i < line->count; i++)
        if (!option(line->words[i], &words, &id))
            return false;
    if (id && (!fake_word_u32(id, UINT32_MAX, &tensor->id) || tensor->id == 0))
        return false;
    return quantize(arena, &words, tensor);
}

static const struct fake_tensor *find(const struct fake_graph_spec *graph, const char *word,
                                      bool output) {
    char name[MAX_NAME];

    if (!fake_word_name(word, name, sizeof name))
        return NULL;
    for (uint32_t i = 0; i < graph->output_count; i++)
        if (strcmp(graph->outputs[i].name, name) == 0)
            return &graph->outputs[i];
    for (uint32_t i = 0; !output && i < graph->input_count; i++)
        if (strcmp(graph->inputs[i].name, name) == 0)
            return &graph->inputs[i];
    return NULL;
}

/* [..., M, K] by [K, N] or by [..., K, N] with the same leading dims. */
static bool matmul_fits(const struct fake_tensor *a, const struct fake_tensor *b,
                        const struct fake_tensor *out) {
    uint32_t r = a->rank;

    if (r < 2 || b->rank < 2 || out->rank != r || (b->rank != 2 && b->rank != r))
        return false;
    for (uint32_t i = 0; i + 2 < r; i++)
        if (out->dims[i] != a->dims[i] || (b->rank == r && b->dims[i] != a->dims[i]))
            return false;
    return out->dims[r - 2] == a->dims[r - 2] && a->dims[r - 1] == b->dims[b->rank - 2] &&
           out->dims[r - 1] == b->dims[b->rank - 1];
}

static bool op_fits(const struct fake_op *op) {
    switch (op->kind) {
    case FAKE_OP_COPY:
        return op->a->elements == op->out->elements;
    case FAKE_OP_ADD:
        return op->a->elements == op->out->elements &&
               (op->b->elements == op->out->elements || op->b->elements == 1);
    case FAKE_OP_MATMUL:
        return matmul_fits(op->a, op->b, op->out);
    case FAKE_OP_SUM:
    case FAKE_OP_SUM_BYTES:
        return op->out->elements == 1;
    default:
        return true;
    }
}

/* op KIND [the tensors by name | microseconds]; without names: the first inputs, the first output */
bool fake_op_line(const struct fake_line *line, const struct fake_graph_spec *graph,
                  struct fake_op *op) {
    static const struct {
        const char *name;
        enum fake_op_kind kind;
        uint32_t inputs; /* and one output, when there are any */
    } kinds[] = {
        {"null", FAKE_OP_NULL, 0},     {"copy", FAKE_OP_COPY, 1},
        {"add", FAKE_OP_ADD, 2},       {"matmul", FAKE_OP_MATMUL, 2},
        {"sum", FAKE_OP_SUM, 1},       {"sum_bytes", FAKE_OP_SUM_BYTES, 1},
        {"sleep", FAKE_OP_SLEEP, 0},   {"spin", FAKE_OP_SPIN, 0},
    };
    uint32_t given = line->count - 2, inputs = 0, which = 0;

    while (which < 8 && (line->count < 2 || strcmp(line->words[1], kinds[which].name) != 0))
        which++;
    if (which == 8)
        return false;
    op->kind = kinds[which].kind;
    inputs = kinds[which].inputs;
    if (op->kind == FAKE_OP_SLEEP || op->kind == FAKE_OP_SPIN)
        return given == 1 && fake_word_u64(line->words[2], 3600000000u, &op->us);
    if (inputs == 0)
        return given == 0;
    if (given != 0 && given != inputs + 1)
        return false;
    if (given == 0 && graph->input_count < inputs)
        return false;
    op->a = given ? find(graph, line->words[2], false) : &graph->inputs[0];
    if (inputs == 2)
        op->b = given ? find(graph, line->words[3], false) : &graph->inputs[1];
    op->out = given ? find(graph, line->words[2 + inputs], true) : &graph->outputs[0];
    return op->a && op->out && (inputs < 2 || op->b) && op->a != op->out && op->b != op->out &&
           op_fits(op);
}
