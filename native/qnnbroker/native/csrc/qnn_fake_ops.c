/* SPDX-License-Identifier: Apache-2.0
 *
 * What the ops compute. Tensors of plain integers are summed and multiplied as int64 and wrap;
 * everything else goes through double, which is exact for an addition of two float32.
 */
#include "qnn_fake.h"

#include <stdlib.h>
#include <string.h>

/* Elements of one op in one of the two number kinds. */
struct numbers {
    int64_t *integers;
    double *reals;
};

static bool load(const struct fake_tensor *tensor, const void *data, bool integers,
                 struct numbers *out) {
    if (integers)
        out->integers = malloc(tensor->elements * sizeof *out->integers);
    else
        out->reals = malloc(tensor->elements * sizeof *out->reals);
    if (out->integers)
        fake_load_integers(tensor, data, out->integers);
    if (out->reals)
        fake_load_reals(tensor, data, out->reals);
    return out->integers || out->reals;
}

static bool blank(uint64_t elements, bool integers, struct numbers *out) {
    if (integers)
        out->integers = calloc(elements, sizeof *out->integers);
    else
        out->reals = calloc(elements, sizeof *out->reals);
    return out->integers || out->reals;
}

static void store(const struct fake_tensor *tensor, const struct numbers *values, void *data) {
    if (values->integers)
        fake_store_integers(tensor, values->integers, data);
    else
        fake_store_reals(tensor, values->reals, data);
}

static void drop(struct numbers *numbers) {
    free(numbers->integers);
    free(numbers->reals);
}

static void add(const struct fake_op *op, const struct numbers *a, const struct numbers *b,
                struct numbers *out) {
    uint64_t step = op->b->elements == op->out->elements;

    for (uint64_t i = 0; i < op->out->elements; i++)
        if (out->integers)
            out->integers[i] = (int64_t)((uint64_t)a->integers[i] + (uint64_t)b->integers[i * step]);
        else
            out->reals[i] = a->reals[i] + b->reals[i * step];
}

static void matmul(const struct fake_op *op, const struct numbers *a, const struct numbers *b,
                   struct numbers *out) {
    uint32_t r = op->a->rank;
    uint64_t m = op->a->dims[r - 2], k = op->a->dims[r - 1], n = op->out->dims[r - 1];
    uint64_t batches = op->a->elements / (m * k);
    uint64_t b_step = op->b->rank == r ? k * n : 0;

    for (uint64_t batch = 0; batch < batches; batch++)
        for (uint64_t i = 0; i < m; i++)
            for (uint64_t x = 0; x < k; x++)
                for (uint64_t j = 0; j < n; j++) {
                    uint64_t to = (batch * m + i) * n + j, from = (batch * m + i) * k + x;
                    uint64_t with = batch * b_step + x * n + j;

                    if (out->integers)
                        out->integers[to] = (int64_t)((uint64_t)out->integers[to] +
                                                      (uint64_t)a->integers[from] *
                                                          (uint64_t)b->integers[with]);
                    else
                        out->reals[to] += a->reals[from] * b->reals[with];
                }
}

static void sum(const struct fake_op *op, const struct numbers *a, struct numbers *out) {
    for (uint64_t i = 0; i < op->a->elements; i++)
        if (out->integers)
            out->integers[0] = (int64_t)((uint64_t)out->integers[0] + (uint64_t)a->integers[i]);
        else
            out->reals[0] += a->reals[i];
}

static void copy(const struct fake_op *op, const struct numbers *a, struct numbers *out) {
    if (out->integers)
        memcpy(out->integers, a->integers, op->out->elements * sizeof *out->integers);
    else
        memcpy(out->reals, a->reals, op->out->elements * sizeof *out->reals);
}

static uint64_t compute(const struct fake_op *op, void *const *data) {
    bool integers = fake_dtype_is_integer(op->a->dtype) && fake_dtype_is_integer(op->out->dtype) &&
                    (op->b == NULL || fake_dtype_is_integer(op->b->dtype));
    struct numbers a = {0}, b = {0}, out = {0};
    bool ready = load(op->a, data[op->a->index], integers, &a) &&
                 (op->b == NULL || load(op->b, data[op->b->index], integers, &b)) &&
                 blank(op->out->elements, integers, &out);

    if (ready) {
        if (op->kind == FAKE_OP_ADD)
            add(op, &a, &b, &out);
        else if (op->kind == FAKE_OP_MATMUL)
            matmul(op, &a, &b, &out);
        else if (op->kind == FAKE_OP_SUM)
            sum(op, &a, &out);
        else
            copy(op, &a, &out);
        store(op->out, &out, data[op->out->index]);
    }
    drop(&a);
    drop(&b);
    drop(&out);
    return ready ? FAKE_OK : FAKE_NO_MEMORY;
}

static bool same_bytes(const struct fake_tensor *a, const struct fake_tensor *b) {
    return a->dtype == b->dtype && a->bytes == b->bytes &&
           (!fake_dtype_is_quantized(a->dtype) ||
            (a->quantization.encoding == 0 && b->quantization.encoding == 0 &&
             a->quantization.as.tensor.scale == b->quantization.as.tensor.scale &&
             a->quantization.as.tensor.offset == b->quantization.as.tensor.offset));
}

static void sum_bytes(const struct fake_op *op, void *const *data) {
    const uint8_t *bytes = data[op->a->index];
    int64_t total = 0;
    double real;

    for (uint64_t i = 0; i < op->a->bytes; i++)
        total += bytes[i];
    real = (double)total;
    if (fake_dtype_is_integer(op->out->dtype))
        fake_store_integers(op->out, &total, data[op->out->index]);
    else
        fake_store_reals(op->out, &real, data[op->out->index]);
}

static uint64_t spin(uint64_t us, uint64_t generation) {
    uint64_t until = fake_now_us() + us;

    for (uint64_t turn = 1; fake_now_us() < until; turn++)
        if (turn % 4096 == 0 && fake_generation_now() != generation)
            return FAKE_RESTARTED;
    return FAKE_OK;
}

uint64_t fake_op_run(const struct fake_op *op, void *const *data, uint64_t generation) {
    switch (op->kind) {
    case FAKE_OP_NULL:
        return FAKE_OK;
    case FAKE_OP_SLEEP:
        return fake_sleep_us(op->us, generation) ? FAKE_OK : FAKE_RESTARTED;
    case FAKE_OP_SPIN:
        return spin(op->us, generation);
    case FAKE_OP_SUM_BYTES:
        sum_bytes(op, data);
        return FAKE_OK;
    case FAKE_OP_COPY:
        if (same_bytes(op->a, op->out)) {
            memcpy(data[op->out->index], data[op->a->index], op->out->bytes);
            return FAKE_OK;
        }
        return compute(op, data);
    default:
        return compute(op, data);
    }
}
