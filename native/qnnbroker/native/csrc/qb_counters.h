/* SPDX-License-Identifier: Apache-2.0
 * How many native objects of each kind are alive: what leak tests and status compare. */
#pragma once
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

enum qb_counter {
    QB_COUNT_REGION,  /* live mappings made by Region */
    QB_COUNT_LIBRARY, /* QNN libraries opened (never unloaded) */
    QB_COUNT_BACKEND,
    QB_COUNT_DEVICE,
    QB_COUNT_CONTEXT,
    QB_COUNT_GRAPH,
    QB_COUNT_RUNNABLE,
    QB_COUNT_SESSION,    /* executor sessions */
    QB_COUNT_BINDING,    /* executor bindings */
    QB_COUNT_SUBMISSION, /* queued or running */
    QB_COUNT_RING,
    QB_COUNT_REGISTRATION, /* memory that a QNN context knows */
    QB_COUNT_RPCMEM,       /* live allocations of libcdsprpc */
    QB_COUNTERS
};

QB_EXPORT void qb_count(enum qb_counter which, int delta);
QB_EXPORT int64_t qb_counter_value(enum qb_counter which);
