/* SPDX-License-Identifier: Apache-2.0
 * Where the thread that leads runs, beside the client that it works for, and how long it looks for the
 * client's next submission. Two threads that look for one another help on two cores only, and only when
 * both are awake; two that sleep for one another wake up soonest on one core. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct qb_executor;
struct qb_session;

/* Where to go before looking at the rings: another core than the client's, or the client's. */
enum qb_goal { QB_STAY, QB_APART, QB_TOGETHER };

typedef struct qb_place {
    enum qb_goal goal;
    uint32_t client_core; /* 1 + its number, for QB_TOGETHER */
    uint64_t moved_at;

    uint64_t look_until;
    uint64_t longer_since; /* it looks longer than usual, for a client that was woken; 0: no */
    bool waits;            /* that client is not up yet */
    int64_t credit_ns;     /* for looking longer in vain, as it was then */
    uint64_t credited_at;
} qb_place;

/* In all of these the executor's lock is held; only `qb_place_go` lets it go meanwhile. */

/* An execute has ended at `now`. */
void qb_place_executed(struct qb_executor *ex, bool is_short, uint64_t now);
/* This thread, on `core` (1 + its number), has written a completion; the client had to be woken for it,
 * or not. */
void qb_place_completed(struct qb_executor *ex, const struct qb_session *s, uint32_t core,
                        bool woken);
/* Goes where it is better. */
void qb_place_go(struct qb_executor *ex);
/* Whether to look once more. */
bool qb_place_looks(struct qb_executor *ex, uint64_t now);
/* The looking is over: something came, or nothing. */
void qb_place_looked(struct qb_executor *ex, bool came);
