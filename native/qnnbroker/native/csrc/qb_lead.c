/* SPDX-License-Identifier: Apache-2.0
 * The leader: one thread that watches the rings of all sessions, polled or rung. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "qb_counters.h"
#include "qb_doorbell.h"
#include "qb_executor_impl.h"

/* Slots taken from a ring at a time: those of the others come in between, and what holds the lock
 * meanwhile holds it shortly. */
enum { DRAIN_BATCH = 16 };
/* Doorbells looked at in one go. */
enum { MAX_KEYS = 64 };

/* ---- which sessions are polled ---------------------------------------------------------------- */

static void stay_awake(qb_executor *ex, qb_session *s) {
    if (s->awake)
        return;
    s->awake = true;
    s->awake_next = ex->awake;
    s->awake_link = &ex->awake;
    if (ex->awake)
        ex->awake->awake_link = &s->awake_next;
    ex->awake = s;
    qb_store_relaxed(&s->ring.broker->sleeping, 0);
}

void qb_attend(qb_session *s) {
    if (s->has_ring && !s->broken && s->ex->rings[s->key].session == s)
        stay_awake(s->ex, s);
}

static void let_sleep(qb_session *s) {
    if (!s->awake)
        return;
    s->awake = false;
    *s->awake_link = s->awake_next;
    if (s->awake_next)
        s->awake_next->awake_link = s->awake_link;
}

/* ---- taking submissions ----------------------------------------------------------------------- */

void qb_ring_break(qb_session *s) {
    if (s->broken)
        return;
    s->broken = true;
    let_sleep(s);
    qb_waiter_remove(s->ex->waiter, s->doorbell);
    qb_post(s->ex, &s->broken_node, QB_EVENT_SESSION_BROKEN);
}

void qb_ring_complete(qb_session *s, const qb_cq_slot *slot) {
    if (s->broken)
        return;
    uint32_t core = (uint32_t)sched_getcpu() + 1;
    qb_store_relaxed(&s->ring.broker->core, core);
    if (!qb_ring_push(&s->ring, slot)) {
        qb_ring_break(s); /* more in flight than it may, or an index that makes no sense */
        return;
    }
    uint32_t asleep = qb_ring_client_sleeps(&s->ring);
    if (asleep)
        qb_client_wake(asleep, s->bell, &s->ring.broker->cq_tail);
    qb_place_completed(s->ex, s, core, asleep);
}

static void refuse(qb_session *s, uint64_t ticket, uint32_t status) {
    qb_cq_slot slot = {.ticket = ticket, .status = status};
    s->error_count++;
    qb_ring_complete(s, &slot);
}

/* Who an id means: QB_OK and a binding, or why not. */
static uint32_t find(qb_session *s, uint64_t id, qb_binding **out) {
    uint32_t index = (uint32_t)id - 1, generation = (uint32_t)(id >> 32);
    if (index >= s->entry_count || generation == 0 || generation > s->entries[index].generation)
        return QB_BINDING_UNKNOWN;
    if (generation < s->entries[index].generation || !s->entries[index].binding)
        return QB_STALE_GENERATION;
    *out = s->entries[index].binding;
    return QB_OK;
}

static void take(qb_session *s, const qb_sq_slot *slot) {
    qb_executor *ex = s->ex;
    if ((slot->flags & ~QB_SUBMIT_CANCEL) || slot->reserved) {
        qb_ring_break(s);
        return;
    }
    if (slot->flags & QB_SUBMIT_CANCEL) {
        qb_submission *sub = qb_sched_remove_ticket(s, slot->ticket, true);
        if (sub)
            qb_complete(ex, sub, QB_CANCELLED, 0);
        return;
    }
    qb_binding *b = NULL;
    qb_submission *sub = s->free_submissions;
    uint32_t status = find(s, slot->binding, &b);
    if (status == QB_OK && s->closing)
        status = QB_SESSION_CLOSED;
    if (status == QB_OK && ex->stopping)
        status = QB_STOPPING;
    if (status == QB_OK && (!sub || s->in_flight >= s->max_in_flight))
        status = QB_CREDITS;
    if (status != QB_OK) {
        refuse(s, slot->ticket, status);
        return;
    }
    s->free_submissions = sub->next;
    *sub = (qb_submission){.from_ring = true,
                           .ticket = slot->ticket,
                           .deadline_ns = slot->deadline_ns,
                           .session = s,
                           .session_id = s->id};
    qb_enqueue(sub, b);
}

/* Takes some of what waits in a session's ring; how many. With something left it stays awake, and is
 * looked at again. */
static uint32_t drain(qb_session *s) {
    int64_t waiting = qb_ring_waiting(&s->ring);
    if (waiting > DRAIN_BATCH)
        waiting = DRAIN_BATCH;
    if (waiting <= 0) {
        if (waiting < 0)
            qb_ring_break(s);
        return 0;
    }
    for (int64_t i = 0; i < waiting && !s->broken; i++) {
        qb_sq_slot slot;
        qb_ring_pop(&s->ring, &slot);
        take(s, &slot);
    }
    qb_ring_release(&s->ring);
    return (uint32_t)waiting;
}

static uint32_t drain_awake(qb_executor *ex) {
    uint32_t taken = 0;
    for (qb_session *s = ex->awake, *next; s; s = next) {
        next = s->awake_next;
        taken += drain(s);
    }
    return taken;
}

/* ---- watching --------------------------------------------------------------------------------- */

/* Those rang: they are polled from now on. */
static void attend_rung(qb_executor *ex, const uint64_t *keys, int n) {
    for (int i = 0; i < n; i++) {
        uint32_t index = (uint32_t)keys[i], generation = (uint32_t)(keys[i] >> 32);
        if (keys[i] == UINT64_MAX || index >= ex->ring_count)
            continue; /* the wake doorbell */
        qb_ring_slot *slot = &ex->rings[index];
        if (!slot->session || slot->generation != generation || slot->session->broken)
            continue; /* rang, and was gone before we looked */
        stay_awake(ex, slot->session);
    }
    /* Flags are down now: a submission after this needs no doorbell, one before is seen next. */
    qb_full_fence();
}

/* Looks again and again for a little while; something was taken. */
static bool spin(qb_executor *ex) {
    uint64_t keys[MAX_KEYS], now = qb_now_ns(), look_at = now + ex->spin_ns;
    bool came = false;
    for (; !came && ex->awake && !ex->stopping && qb_place_looks(ex, now); now = qb_now_ns()) {
        if (now >= look_at && !ex->sleepers) { /* the others must not wait for us to sleep */
            attend_rung(ex, keys, qb_waiter_wait(ex->waiter, keys, MAX_KEYS, 0));
            look_at = now + ex->spin_ns;
        }
        pthread_mutex_unlock(&ex->lock);
        for (int i = 0; i < 8; i++)
            qb_cpu_relax();
        qb_lock(ex);
        came = drain_awake(ex) || qb_sched_can_pick(ex);
    }
    qb_place_looked(ex, came);
    return came;
}

/* Says "ring me" in every ring that was polled, then looks once more: something was taken. */
static bool prepare_to_sleep(qb_executor *ex) {
    qb_session *first = ex->awake;
    if (!first)
        return false;
    for (qb_session *s = first; s; s = s->awake_next)
        qb_store_relaxed(&s->ring.broker->sleeping, 1);
    qb_full_fence();
    if (drain_awake(ex)) {
        for (qb_session *s = ex->awake; s; s = s->awake_next)
            qb_store_relaxed(&s->ring.broker->sleeping, 0);
        return true;
    }
    while (ex->awake)
        let_sleep(ex->awake);
    return false;
}

bool qb_lead(qb_executor *ex) {
    qb_place_go(ex);
    bool found = drain_awake(ex) || spin(ex) || prepare_to_sleep(ex);
    ex->leading = false;
    if (found || ex->stopping)
        return false;
    if (qb_sched_can_pick(ex)) /* came by a call while we looked at the rings */
        return false;
    uint64_t keys[MAX_KEYS], now = qb_now_ns();
    int64_t timeout = -1;
    if (ex->hold_until > now) /* bands are held back: nobody else would wake us */
        timeout = (int64_t)(ex->hold_until - now);
    ex->sleepers++;
    pthread_mutex_unlock(&ex->lock);
    int n = qb_waiter_wait(ex->waiter, keys, MAX_KEYS, timeout);
    qb_lock(ex);
    ex->sleepers--;
    attend_rung(ex, keys, n);
    drain_awake(ex);
    return true;
}

void qb_leave_watch(qb_executor *ex) {
    if (ex->leading)
        return;
    if (!ex->sleepers) {
        qb_wake_follower(ex);
        return;
    }
    for (int i = 0; i < 2 && prepare_to_sleep(ex); i++)
        continue;
    /* There is always more: somebody else must look. Or bands are held back, and those that sleep may
     * do so since before that, with nothing to wake them at its end. */
    if (ex->awake || qb_sched_can_pick(ex) || (ex->hold_until && qb_sched_has_queued(ex)))
        qb_wake_worker(ex);
}

void qb_wake_worker(qb_executor *ex) {
    if (ex->sleepers)
        qb_doorbell_ring(ex->wake);
    else
        qb_wake_follower(ex);
}

/* ---- opening and closing ---------------------------------------------------------------------- */

int qb_session_open_ring(qb_session *s, const void *client_file, void *broker_file,
                         uint32_t sq_slots, uint32_t cq_slots, int doorbell, int bell) {
    qb_executor *ex = s->ex;
    int error = 0;
    if (!s->max_in_flight || s->has_ring || !sq_slots || (sq_slots & (sq_slots - 1)) || !cq_slots ||
        (cq_slots & (cq_slots - 1)))
        return EINVAL;
    s->slab = calloc(s->max_in_flight, sizeof *s->slab);
    if (!s->slab)
        return ENOMEM;
    for (uint32_t i = 0; i < s->max_in_flight; i++) {
        s->slab[i].next = s->free_submissions;
        s->free_submissions = &s->slab[i];
    }
    qb_ring_init(&s->ring, client_file, broker_file, sq_slots, cq_slots);
    s->doorbell = doorbell;
    s->bell = bell;
    qb_lock(ex);
    uint32_t index = 0;
    while (index < ex->ring_count && ex->rings[index].session)
        index++;
    if (index == ex->ring_count) {
        uint32_t more = ex->ring_count ? ex->ring_count * 2 : 16;
        qb_ring_slot *rings = realloc(ex->rings, more * sizeof *rings);
        if (rings) {
            for (uint32_t i = ex->ring_count; i < more; i++)
                rings[i] = (qb_ring_slot){NULL, 0};
            ex->rings = rings;
            ex->ring_count = more;
        } else {
            error = ENOMEM;
        }
    }
    if (!error) {
        qb_ring_slot *slot = &ex->rings[index];
        slot->generation = (slot->generation + 1) & 0x7fffffff;
        uint64_t key = (uint64_t)slot->generation << 32 | index;
        if (qb_waiter_add(ex->waiter, doorbell, key) < 0) {
            error = errno;
        } else {
            slot->session = s;
            s->key = index;
            s->has_ring = true;
            qb_count(QB_COUNT_RING, 1);
        }
    }
    pthread_mutex_unlock(&ex->lock);
    if (error) {
        free(s->slab);
        s->slab = s->free_submissions = NULL;
    }
    return error;
}

/* No more submissions from it; completions may still be written until the session is freed. */
void qb_ring_detach(qb_session *s) {
    if (!s->has_ring || s->ex->rings[s->key].session != s)
        return;
    let_sleep(s);
    if (!s->broken)
        qb_waiter_remove(s->ex->waiter, s->doorbell);
    s->ex->rings[s->key].session = NULL;
    qb_count(QB_COUNT_RING, -1);
}
