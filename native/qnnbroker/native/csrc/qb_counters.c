/* SPDX-License-Identifier: Apache-2.0 */
#include "qb_counters.h"

#include <stdatomic.h>

static _Atomic int64_t counters[QB_COUNTERS];

void qb_count(enum qb_counter which, int delta) {
    atomic_fetch_add_explicit(&counters[which], delta, memory_order_relaxed);
}

int64_t qb_counter_value(enum qb_counter which) {
    return atomic_load_explicit(&counters[which], memory_order_relaxed);
}
