/* SPDX-License-Identifier: Apache-2.0
 * A histogram of nanoseconds with 8 buckets an octave (12 % wide): a shift, an or and an add. */
#pragma once
#include <stdint.h>

enum { QB_HIST_SUB_BITS = 3, QB_HIST_SUB = 1 << QB_HIST_SUB_BITS, QB_HIST_BUCKETS = 42 * QB_HIST_SUB };

typedef struct qb_hist {
    uint64_t counts[QB_HIST_BUCKETS];
} qb_hist;

static inline uint32_t qb_hist_index(uint64_t ns) {
    if (ns < QB_HIST_SUB)
        return (uint32_t)ns;
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(ns);
    uint32_t index = (octave - QB_HIST_SUB_BITS + 1) * QB_HIST_SUB +
                     (uint32_t)((ns >> (octave - QB_HIST_SUB_BITS)) & (QB_HIST_SUB - 1));
    return index < QB_HIST_BUCKETS ? index : QB_HIST_BUCKETS - 1;
}

/* The smallest value of a bucket. */
static inline uint64_t qb_hist_floor(uint32_t index) {
    if (index < QB_HIST_SUB)
        return index;
    uint32_t octave = index / QB_HIST_SUB + QB_HIST_SUB_BITS - 1;
    return (uint64_t)(QB_HIST_SUB + index % QB_HIST_SUB) << (octave - QB_HIST_SUB_BITS);
}

static inline void qb_hist_add(qb_hist *h, uint64_t ns) { h->counts[qb_hist_index(ns)]++; }

/* The middle of the bucket that holds the quantile q (0..1); 0 when empty. */
static inline uint64_t qb_hist_quantile(const qb_hist *h, double q) {
    uint64_t total = 0, seen = 0;
    for (int i = 0; i < QB_HIST_BUCKETS; i++)
        total += h->counts[i];
    if (!total)
        return 0;
    uint64_t rank = (uint64_t)(q * (double)(total - 1));
    for (uint32_t i = 0; i < QB_HIST_BUCKETS; i++) {
        seen += h->counts[i];
        if (seen > rank)
            return (qb_hist_floor(i) + qb_hist_floor(i + 1)) / 2;
    }
    return qb_hist_floor(QB_HIST_BUCKETS - 1);
}
