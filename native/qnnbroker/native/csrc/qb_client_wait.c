/* SPDX-License-Identifier: Apache-2.0
 * Waiting at the client's end of the rings: looking, sleeping, and reading for those that wait too. */
#define _GNU_SOURCE
#include <errno.h>
#include <time.h>

#include "qb_client_impl.h"
#include "qb_doorbell.h"

/* How long a reader sleeps on the tail of the completions; for waits of half that at most. What ends a
 * wait otherwise, the end of the broker above all, is heard of so much later. */
#ifndef NAP_NS
#define NAP_NS 10000000u
#endif

static uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Sleeps until the bell rings; the lock is held on entry and on return, not in between. `head` is
 * where completions stood when the caller found nothing for it. */
static int sleep_on_bell(qb_client *c, uint32_t head, int64_t timeout_ns) {
    int rung;
    c->reader_sleeps = QB_SLEEPS_ON_BELL;
    qb_client_say_sleeps(c);
    qb_full_fence();
    qb_client_take(c);
    if (c->cq_head != head || c->closed || c->lost) {
        /* Taken now, or by another thread while we spun: no ring would come for those. */
        c->reader_sleeps = 0;
        qb_client_say_sleeps(c);
        return 0;
    }
    pthread_mutex_unlock(&c->lock);
    rung = qb_bell_wait(c->bell, c->wake, timeout_ns);
    pthread_mutex_lock(&c->lock);
    c->reader_sleeps = 0;
    qb_client_say_sleeps(c);
    if (rung == QB_BELL_CLOSED)
        c->lost = true;
    qb_client_take(c);
    if (rung == QB_BELL_RUNG && c->watched_done)
        return QB_CLIENT_INTERRUPTED; /* the ring was for an event loop too: let it know */
    return rung == QB_BELL_INTERRUPTED ? QB_CLIENT_INTERRUPTED : 0;
}

/* Sleeps for a moment until a completion comes; as `sleep_on_bell`, which takes over when none does. What
 * else there is to hear of, the end of the broker above all, is heard of there. */
static int nap(qb_client *c, uint32_t head, int64_t timeout_ns) {
    bool undisturbed = true;
    c->reader_sleeps = QB_SLEEPS_ON_TAIL;
    qb_client_say_sleeps(c);
    qb_full_fence();
    qb_client_take(c);
    if (c->cq_head == head && !c->closed && !c->lost) {
        pthread_mutex_unlock(&c->lock);
        undisturbed = qb_nap(&c->theirs->cq_tail, head,
                             timeout_ns >= 0 && (uint64_t)timeout_ns < NAP_NS ? (uint64_t)timeout_ns
                                                                              : NAP_NS);
        pthread_mutex_lock(&c->lock);
        qb_client_take(c);
    }
    c->reader_sleeps = 0;
    qb_client_say_sleeps(c);
    return undisturbed ? 0 : QB_CLIENT_INTERRUPTED;
}

/* Looks at the ring for a little while. True when there is news. */
static bool spin(qb_client *c, uint32_t head, uint64_t until) {
    while (now_ns() < until) {
        pthread_mutex_unlock(&c->lock);
        for (int i = 0; i < 8; i++)
            qb_cpu_relax();
        pthread_mutex_lock(&c->lock);
        qb_client_take(c);
        if (c->cq_head != head || c->closed)
            return true;
    }
    return false;
}

/* One step of waiting: reads for everybody, or waits for whoever does. 0: look again; else why to
 * stop. The caller has just found nothing for it, under the same hold of the lock. */
static int step(qb_client *c, uint64_t deadline, uint64_t spin_until, bool for_room) {
    int result = 0;
    uint64_t now;
    if (c->closed)
        return QB_CLIENT_CLOSED;
    if (qb_client_take(c)) {
        pthread_cond_broadcast(&c->progress);
        return 0;
    }
    if (c->lost) /* found out just now */
        return 0;
    now = deadline || c->reading ? now_ns() : 0;
    if (deadline && now >= deadline)
        return QB_CLIENT_TIMED_OUT;
    if (c->reading) {
        /* Woken now and then whatever happens, so that a signal is handled soon. */
        uint64_t until = now + 100000000u;
        if (deadline && deadline < until)
            until = deadline;
        struct timespec ts = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
        if (pthread_cond_timedwait(&c->progress, &c->lock, &ts) == ETIMEDOUT)
            return deadline && until == deadline ? QB_CLIENT_TIMED_OUT : QB_CLIENT_INTERRUPTED;
        return 0;
    }
    uint32_t head = c->cq_head;
    c->reading = true;
    c->reader_wants_room = for_room;
    int64_t left = deadline ? (int64_t)(deadline - now) : -1;
    if (!spin_until)
        result = sleep_on_bell(c, head, left);
    else if (!spin(c, head, spin_until))
        result = nap(c, head, left);
    c->reading = c->reader_wants_room = false;
    pthread_cond_broadcast(&c->progress);
    return result;
}

static uint64_t deadline_of(int64_t timeout_ns) {
    return timeout_ns < 0 ? 0 : now_ns() + (uint64_t)timeout_ns;
}

/* How to wait for a ticket: until when to look, then to nap; 0: neither. */
static uint64_t spin_end(qb_client *c, const qb_ticket *t) {
    if (!t || !*t->median_ns || c->wait_ns[t->median_ns - c->median_ns] > NAP_NS / 2)
        return 0; /* a nap would end too early, and cost a wake-up more */
    /* On the same core the broker can do nothing while we look. */
    bool looks = qb_client_looks(c, t->median_ns) &&
                 qb_load_relaxed(&c->theirs->core) != qb_core();
    return looks ? now_ns() + c->spin_ns : 1;
}

int qb_client_wait(qb_client *c, uint64_t ticket, int64_t timeout_ns, qb_cq_slot *out) {
    uint64_t deadline = deadline_of(timeout_ns);
    int result = 0;
    pthread_mutex_lock(&c->lock);
    uint64_t spin_until = spin_end(c, qb_client_find(c, ticket));
    for (;;) {
        qb_ticket *t = qb_client_find(c, ticket);
        if (!t || t->state == QB_TICKET_ABANDONED) {
            result = QB_CLIENT_UNKNOWN;
            break;
        }
        if (t->state == QB_TICKET_DONE) {
            *out = t->completion;
            if (t->watched)
                c->watched_done--;
            qb_client_give_back(c, t);
            break;
        }
        if (c->lost) {
            qb_client_take(c); /* what was written before the end still counts */
            if (t->state == QB_TICKET_DONE)
                continue;
            result = QB_CLIENT_LOST;
            break;
        }
        result = step(c, deadline, spin_until, false);
        if (result) {
            t = qb_client_find(c, ticket);
            if (!t || t->state != QB_TICKET_DONE)
                break;
            result = 0;
        }
        spin_until = 0;
    }
    pthread_mutex_unlock(&c->lock);
    return result;
}

int qb_client_wait_room(qb_client *c, int64_t timeout_ns) {
    uint64_t deadline = deadline_of(timeout_ns);
    int result = 0;
    pthread_mutex_lock(&c->lock);
    c->room_waiters++;
    while (!result && c->free_ticket >= c->limit)
        result = c->lost ? QB_CLIENT_LOST : step(c, deadline, 0, true);
    c->room_waiters--;
    pthread_mutex_unlock(&c->lock);
    return result;
}

