/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include <sched.h>

#include "qb_executor_impl.h"

/* A thread does not change its core more often than this: kernels that see an idle core wake a thread
 * there, and it may be in vain. */
enum { MOVE_NS = 1000000 };
/* Waking up takes longer than we look as a rule. For a client that looks itself, and is being woken, we
 * look on until it is up, but no longer than so many times as long. */
enum { LOOKS_FOR_SLEEPER = 5 };
/* What that takes when nothing comes then is at most this part of the time, and so much at once. */
enum { IN_VAIN_PART = 20, IN_VAIN_NS_MAX = 1000000 };

static bool is_alone(const qb_executor *ex, const qb_session *s) {
    return ex->awake == s && !s->awake_next;
}

/* What was meant for the client of the last completion is over. */
static void forget(qb_place *p) {
    p->goal = QB_STAY;
    p->longer_since = 0;
    p->waits = false;
}

void qb_place_executed(qb_executor *ex, bool is_short, uint64_t now) {
    forget(&ex->place); /* a call of gRPC has no client at a ring to be completed for */
    ex->place.look_until = is_short ? now + ex->spin_ns : 0;
}

void qb_place_completed(qb_executor *ex, const qb_session *s, uint32_t core, bool woken) {
    qb_place *p = &ex->place;
    uint32_t hint = qb_load_relaxed(&s->ring.client->core), theirs = hint & ~QB_SLEEPS_THERE;
    forget(p);
    if (!hint || !p->look_until)
        return;
    if (theirs == core) {
        /* It cannot go on while we look, nor we while it does. */
        p->look_until = 0;
        if (!(hint & QB_SLEEPS_THERE) && is_alone(ex, s))
            p->goal = QB_APART;
    } else if (hint & QB_SLEEPS_THERE) {
        /* With more in flight it might submit while we execute. */
        if (woken && is_alone(ex, s) && !s->in_flight) {
            p->goal = QB_TOGETHER;
            p->client_core = theirs;
        }
    } else if (woken && is_alone(ex, s)) {
        uint64_t now = qb_now_ns();
        uint64_t earned = (now - p->credited_at) / IN_VAIN_PART;
        p->credited_at = now;
        if (earned > IN_VAIN_NS_MAX)
            earned = IN_VAIN_NS_MAX;
        p->credit_ns += (int64_t)earned;
        if (p->credit_ns > IN_VAIN_NS_MAX)
            p->credit_ns = IN_VAIN_NS_MAX;
        if (p->credit_ns <= 0)
            return;
        p->longer_since = now;
        p->waits = true;
        p->look_until = now + LOOKS_FOR_SLEEPER * ex->spin_ns;
    }
}

/* The calling thread goes to a core of `wanted`, if one of those is allowed. It may go on from there
 * to wherever it could before. */
static void move_to(const cpu_set_t *wanted, const cpu_set_t *allowed) {
    cpu_set_t both;
    CPU_AND(&both, wanted, allowed);
    if (CPU_COUNT(&both) && !sched_setaffinity(0, sizeof both, &both))
        sched_setaffinity(0, sizeof *allowed, allowed);
}

void qb_place_go(qb_executor *ex) {
    qb_place *p = &ex->place;
    enum qb_goal goal = p->goal;
    uint32_t core = p->client_core - 1;
    uint64_t now;
    cpu_set_t allowed, wanted;
    if (goal == QB_STAY)
        return;
    p->goal = QB_STAY;
    now = qb_now_ns();
    if (now - p->moved_at < MOVE_NS)
        return;
    p->moved_at = now;
    if (goal == QB_TOGETHER)
        p->look_until = 0; /* the client sleeps there */
    pthread_mutex_unlock(&ex->lock);
    if (!sched_getaffinity(0, sizeof allowed, &allowed)) {
        if (goal == QB_APART) {
            wanted = allowed;
            CPU_CLR((size_t)sched_getcpu(), &wanted);
        } else {
            CPU_ZERO(&wanted);
            if (core < CPU_SETSIZE) /* the client may lie about it */
                CPU_SET(core, &wanted);
        }
        move_to(&wanted, &allowed);
    }
    qb_lock(ex);
}

bool qb_place_looks(qb_executor *ex, uint64_t now) {
    qb_place *p = &ex->place;
    if (p->waits && ex->awake && !qb_load_relaxed(&ex->awake->ring.client->sleeping)) {
        p->waits = false; /* it is up */
        p->look_until = now + ex->spin_ns;
    }
    return now < p->look_until;
}

void qb_place_looked(qb_executor *ex, bool came) {
    qb_place *p = &ex->place;
    if (p->longer_since && !came)
        p->credit_ns -= (int64_t)(qb_now_ns() - p->longer_since);
    p->longer_since = 0;
    p->waits = false;
}
