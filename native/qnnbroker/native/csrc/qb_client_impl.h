/* SPDX-License-Identifier: Apache-2.0
 * What the files of the client's end share. The lock is held in all of it. */
#pragma once
#include <sched.h>

#include "qb_client.h"

/* The ticket of that number, unless it is over. */
qb_ticket *qb_client_find(qb_client *c, uint64_t number);
/* The ticket is free. */
void qb_client_give_back(qb_client *c, qb_ticket *t);
/* Takes what has completed; how many. */
uint32_t qb_client_take(qb_client *c);

/* Tells the broker how to wake us: the reader, an event loop, or nobody. */
static inline void qb_client_say_sleeps(qb_client *c) {
    qb_store_relaxed(&c->mine->sleeping, c->reader_sleeps | (c->armed ? QB_SLEEPS_ON_BELL : 0));
}

static inline bool qb_client_is_short(const qb_client *c, const uint64_t *median_ns) {
    return *median_ns && *median_ns <= c->spin_limit_ns;
}

/* Whether the reader looks for a completion of this binding before it sleeps. Beside a longer graph it
 * would only take the core that computes. */
static inline bool qb_client_looks(const qb_client *c, const uint64_t *median_ns) {
    return c->spin_ns && qb_client_is_short(c, median_ns);
}

/* This thread's core, as the rings' hints have it. */
static inline uint32_t qb_core(void) { return (uint32_t)sched_getcpu() + 1; }

/* What to tell the broker of it, with a submission. */
static inline uint32_t qb_client_core(const qb_client *c, const uint64_t *median_ns) {
    if (!qb_client_is_short(c, median_ns))
        return 0;
    return c->spin_ns ? qb_core() : qb_core() | QB_SLEEPS_THERE;
}
