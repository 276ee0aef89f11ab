/* SPDX-License-Identifier: Apache-2.0
 *
 * The data types: their sizes, and elements in and out as int64 or double.
 *
 * A quantised element stands for (stored + offset) * scale; storing rounds to nearest and saturates.
 * Plain integers wrap when stored, as numpy does. No element need be aligned.
 */
#include "qnn_fake.h"

#include <math.h>
#include <string.h>

enum { SIGNED = 0, UNSIGNED = 1, FLOAT = 2, SIGNED_FIXED = 3, UNSIGNED_FIXED = 4, BOOL = 5 };

static const struct {
    const char *name;
    uint32_t dtype;
} names[] = {
    {"int8", 0x0008},     {"int16", 0x0016},    {"int32", 0x0032},   {"int64", 0x0064},
    {"uint8", 0x0108},    {"uint16", 0x0116},   {"uint32", 0x0132},  {"uint64", 0x0164},
    {"float16", 0x0216},  {"float32", 0x0232},  {"float64", 0x0264}, {"sfixed4", 0x0304},
    {"sfixed8", 0x0308},  {"sfixed16", 0x0316}, {"sfixed32", 0x0332}, {"ufixed4", 0x0404},
    {"ufixed8", 0x0408},  {"ufixed16", 0x0416}, {"ufixed32", 0x0432}, {"bool8", 0x0508},
};

uint32_t fake_dtype_from(const char *name) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].name, name) == 0)
            return names[i].dtype;
    return UINT32_MAX;
}

static bool known(uint32_t dtype) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].dtype == dtype)
            return true;
    return false;
}

static uint32_t bits_of(uint32_t dtype) {
    switch (dtype & 0xff) {
    case 0x04:
        return 4;
    case 0x08:
        return 8;
    case 0x16:
        return 16;
    case 0x32:
        return 32;
    default:
        return 64;
    }
}

uint64_t fake_dtype_bytes(uint32_t dtype, uint64_t elements) {
    if (!known(dtype))
        return 0;
    return (elements * bits_of(dtype) + 7) / 8;
}

bool fake_dtype_is_quantized(uint32_t dtype) {
    return dtype >> 8 == SIGNED_FIXED || dtype >> 8 == UNSIGNED_FIXED;
}

bool fake_dtype_is_integer(uint32_t dtype) {
    return dtype >> 8 == SIGNED || dtype >> 8 == UNSIGNED || dtype >> 8 == BOOL;
}

static bool has_sign(uint32_t dtype) {
    return dtype >> 8 == SIGNED || dtype >> 8 == SIGNED_FIXED;
}

static int64_t stored(uint32_t dtype, const void *data, uint64_t at) {
    uint32_t bits = bits_of(dtype);
    uint64_t value = 0;

    if (bits == 4) { /* two in a byte, the low half first */
        value = ((const uint8_t *)data)[at / 2];
        value = at % 2 ? value >> 4 : value & 15;
    } else {
        memcpy(&value, (const char *)data + at * (bits / 8), bits / 8);
    }
    if (has_sign(dtype) && bits < 64 && value >> (bits - 1))
        value |= UINT64_MAX << bits;
    return (int64_t)value;
}

static void put(uint32_t dtype, void *data, uint64_t at, int64_t value) {
    uint32_t bits = bits_of(dtype);
    uint64_t raw = (uint64_t)value;

    if (bits == 4) {
        uint8_t *byte = (uint8_t *)data + at / 2;

        *byte = at % 2 ? (uint8_t)((*byte & 0x0f) | (raw & 15) << 4)
                       : (uint8_t)((*byte & 0xf0) | (raw & 15));
        return;
    }
    memcpy((char *)data + at * (bits / 8), &raw, bits / 8);
}

void fake_load_integers(const struct fake_tensor *tensor, const void *data, int64_t *out) {
    for (uint64_t i = 0; i < tensor->elements; i++)
        out[i] = stored(tensor->dtype, data, i);
}

void fake_store_integers(const struct fake_tensor *tensor, const int64_t *values, void *data) {
    for (uint64_t i = 0; i < tensor->elements; i++)
        put(tensor->dtype, data, i, tensor->dtype >> 8 == BOOL ? values[i] != 0 : values[i]);
}

static float half_to_float(uint16_t half) {
    uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    float value;

    if (exponent == 31)
        value = fraction ? NAN : INFINITY;
    else if (exponent == 0)
        value = ldexpf((float)fraction, -24);
    else
        value = ldexpf((float)(fraction | 1024), (int)exponent - 25);
    return half & 0x8000 ? -value : value;
}

/* Rounds to the nearest, ties to even, like the hardware conversions. */
static uint16_t half_from_real(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double size = fabs(value);
    int exponent;
    double steps;

    if (isnan(value))
        return 0x7e00;
    if (size >= 65520.0)
        return sign | 0x7c00;
    frexp(size, &exponent);
    if (exponent < -13)
        exponent = -13; /* the smallest normal one; below it the steps stay equal */
    steps = nearbyint(ldexp(size, 11 - exponent));
    if (steps < 1024.0)
        return sign | (uint16_t)steps;
    if (steps == 2048.0) {
        steps = 1024.0;
        exponent++;
    }
    return sign | (uint16_t)((exponent + 14) << 10) | (uint16_t)((uint16_t)steps & 1023);
}

static struct fake_scale_offset scale_at(const struct fake_tensor *tensor, uint64_t at) {
    const struct fake_quantization *q = &tensor->quantization;
    int32_t axis = q->encoding == 1 ? q->as.axis.axis : q->as.width_axis.axis;
    uint64_t inner = 1, channel;

    if (q->encoding == 0)
        return q->as.tensor;
    if (q->encoding == 2)
        return (struct fake_scale_offset){q->as.width_tensor.scale, q->as.width_tensor.offset};
    for (uint32_t i = (uint32_t)axis + 1; i < tensor->rank; i++)
        inner *= tensor->dims[i];
    channel = at / inner % tensor->dims[axis];
    if (q->encoding == 1)
        return q->as.axis.pairs[channel];
    return (struct fake_scale_offset){
        q->as.width_axis.scales[channel],
        q->as.width_axis.offsets ? q->as.width_axis.offsets[channel] : 0};
}

static double load_real(const struct fake_tensor *tensor, const void *data, uint64_t at) {
    float single;
    double value;

    switch (tensor->dtype) {
    case 0x0216:
        return half_to_float((uint16_t)stored(tensor->dtype, data, at));
    case 0x0232:
        memcpy(&single, (const char *)data + at * 4, 4);
        return single;
    case 0x0264:
        memcpy(&value, (const char *)data + at * 8, 8);
        return value;
    default:
        value = (double)stored(tensor->dtype, data, at);
        if (tensor->dtype == 0x0164)
            value = (double)(uint64_t)stored(tensor->dtype, data, at);
        if (fake_dtype_is_quantized(tensor->dtype)) {
            struct fake_scale_offset q = scale_at(tensor, at);

            value = (value + q.offset) * q.scale;
        }
        return value;
    }
}

static void store_real(const struct fake_tensor *tensor, double value, void *data, uint64_t at) {
    uint32_t dtype = tensor->dtype, bits = bits_of(dtype);
    float single = (float)value;
    double low, high;

    if (dtype == 0x0216) {
        put(dtype, data, at, half_from_real(value));
        return;
    }
    if (dtype == 0x0232) {
        memcpy((char *)data + at * 4, &single, 4);
        return;
    }
    if (dtype == 0x0264) {
        memcpy((char *)data + at * 8, &value, 8);
        return;
    }
    if (fake_dtype_is_quantized(dtype)) {
        struct fake_scale_offset q = scale_at(tensor, at);

        value = value / q.scale - q.offset;
    }
    low = has_sign(dtype) ? -ldexp(1, (int)bits - 1) : 0;
    high = ldexp(1, (int)bits - (has_sign(dtype) ? 1 : 0));
    value = nearbyint(value);
    if (isnan(value))
        value = 0;
    if (value >= high)
        put(dtype, data, at, has_sign(dtype) ? (int64_t)((1ull << (bits - 1)) - 1) : -1);
    else if (value <= low)
        put(dtype, data, at, has_sign(dtype) ? INT64_MIN >> (64 - bits) : 0);
    else
        put(dtype, data, at, has_sign(dtype) ? (int64_t)value : (int64_t)(uint64_t)value);
}

void fake_load_reals(const struct fake_tensor *tensor, const void *data, double *out) {
    for (uint64_t i = 0; i < tensor->elements; i++)
        out[i] = load_real(tensor, data, i);
}

void fake_store_reals(const struct fake_tensor *tensor, const double *values, void *data) {
    for (uint64_t i = 0; i < tensor->elements; i++)
        store_real(tensor, values[i], data, i);
}
