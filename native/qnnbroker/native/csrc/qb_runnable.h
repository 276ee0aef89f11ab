/* SPDX-License-Identifier: Apache-2.0
 * What the executor runs: a graph together with its tensor arrays, and nothing it must know about
 * where they come from. A backend fills in the two function pointers.
 *
 * Threads: `execute` may be called by several executor threads at once on different runnables, one
 * at a time on the same runnable. No function here ever takes the GIL. */
#pragma once
#include <stdint.h>

#include "qb_hist.h"

#define QB_EXPORT __attribute__((visibility("default")))

typedef struct qb_graph {
    /* Sets the priority for following executes; a QNN code. Blocks while this graph executes, so the
     * executor calls it only when the graph has nothing running. NULL: no priorities here. */
    uint64_t (*set_priority)(struct qb_graph *self, uint32_t priority);
    /* The executor's bookkeeping, guarded by the executor's lock. */
    uint32_t priority; /* the one set last */
    uint32_t running;  /* executes under way */
    uint64_t run_count, error_count;
    uint64_t execute_ns_total, execute_ns_min, execute_ns_max, queue_ns_total;
    uint64_t median_ns;   /* a running estimate: what decides about spinning */
    uint64_t last_end_ns; /* CLOCK_MONOTONIC; 0: never ran */
    qb_hist queue, execute, total;
} qb_graph;

typedef struct qb_runnable {
    qb_graph *graph;
    /* Runs once, in place, and returns a QNN code (0: success). */
    uint64_t (*execute)(struct qb_runnable *self);
} qb_runnable;
