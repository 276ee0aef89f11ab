/* SPDX-License-Identifier: Apache-2.0
 * Which submission next: strict bands, and inside a band fair between sessions by device time.
 *
 * Start-time fair queueing: a session carries the device time it has used (over its weight) as its
 * virtual time; the smallest goes next; one that comes back from idle starts at the band's clock, so
 * that it neither has credit for the past nor waits behind those who kept the queue full. */
#include "qb_executor_impl.h"

static void enlist(qb_band *band, qb_session *s, uint32_t b) {
    if (band->sessions) {
        qb_session *head = band->sessions;
        s->band_next[b] = head;
        s->band_prev[b] = head->band_prev[b];
        head->band_prev[b]->band_next[b] = s;
        head->band_prev[b] = s;
    } else {
        band->sessions = s->band_next[b] = s->band_prev[b] = s;
    }
    if (s->vtime[b] < band->vclock)
        s->vtime[b] = band->vclock;
}

static void delist(qb_band *band, qb_session *s, uint32_t b) {
    if (s->band_next[b] == s) {
        band->sessions = NULL;
    } else {
        s->band_prev[b]->band_next[b] = s->band_next[b];
        s->band_next[b]->band_prev[b] = s->band_prev[b];
        if (band->sessions == s)
            band->sessions = s->band_next[b];
    }
    s->band_next[b] = s->band_prev[b] = NULL;
}

void qb_sched_push(qb_session *s, uint32_t b, qb_submission *sub, bool front) {
    qb_fifo *q = &s->queue[b];
    if (!q->head) {
        sub->next = NULL;
        q->head = q->tail = sub;
        enlist(&s->ex->band[b], s, b);
    } else if (front) {
        sub->next = q->head;
        q->head = sub;
    } else {
        sub->next = NULL;
        q->tail->next = sub;
        q->tail = sub;
    }
}

static qb_submission *unlink_after(qb_session *s, uint32_t b, qb_submission *prev) {
    qb_fifo *q = &s->queue[b];
    qb_submission *sub = prev ? prev->next : q->head;
    if (prev)
        prev->next = sub->next;
    else
        q->head = sub->next;
    if (q->tail == sub)
        q->tail = prev;
    sub->next = NULL;
    if (!q->head)
        delist(&s->ex->band[b], s, b);
    return sub;
}

/* May the head of this session's queue start now? */
static bool startable(qb_executor *ex, uint32_t b, qb_submission *sub) {
    qb_binding *binding = sub->binding;
    if (binding->state != QB_LIVE)
        return true; /* it will not execute, only be put aside or failed */
    if (binding->running)
        return false; /* its buffers are in use */
    qb_graph *graph = binding->runnable->graph;
    /* A priority is set only while the graph is idle: the call would block for the whole execute. */
    return !graph || !graph->running || !graph->set_priority ||
           graph->priority == ex->band[b].priority;
}

/* The session whose turn it is in the highest band that can start something. */
static qb_session *turn(qb_executor *ex, uint32_t *in_band) {
    uint32_t top = QB_BANDS;
    if (ex->hold_until) {
        const qb_band *held_for = &ex->band[ex->hold_band];
        if ((held_for->sessions || held_for->running) && qb_now_ns() < ex->hold_until)
            top = ex->hold_band + 1;
        else
            ex->hold_until = 0;
    }
    for (uint32_t b = top; b-- > 0;) {
        qb_band *band = &ex->band[b];
        if (!band->sessions || band->running >= band->workers)
            continue;
        qb_session *best = NULL, *s = band->sessions;
        do {
            if ((!best || s->vtime[b] < best->vtime[b]) && startable(ex, b, s->queue[b].head))
                best = s;
            s = s->band_next[b];
        } while (s != band->sessions);
        if (best) {
            *in_band = b;
            return best;
        }
    }
    return NULL;
}

bool qb_sched_can_pick(qb_executor *ex) {
    uint32_t b;
    return turn(ex, &b) != NULL;
}

qb_submission *qb_sched_pick(qb_executor *ex) {
    uint32_t b;
    qb_session *s = turn(ex, &b);
    if (!s)
        return NULL;
    /* The clock never goes back, and one that is behind it, because it could not start, has no credit
     * for that time. */
    if (s->vtime[b] > ex->band[b].vclock)
        ex->band[b].vclock = s->vtime[b];
    else
        s->vtime[b] = ex->band[b].vclock;
    /* Equal virtual times take turns: the next scan starts behind the one chosen. */
    ex->band[b].sessions = s->band_next[b];
    return unlink_after(s, b, NULL);
}

bool qb_sched_has_queued(const qb_executor *ex) {
    for (uint32_t b = 0; b < QB_BANDS; b++)
        if (ex->band[b].sessions)
            return true;
    return false;
}

/* A band that wants the device while higher bands keep it gets, after `ageing_ns` of that, a slice in
 * which they start nothing. Time in which they left the device alone counts as its slice. */
void qb_sched_age(qb_executor *ex, uint64_t now) {
    uint64_t passed = now - ex->aged_at;
    bool higher_busy = ex->band[QB_BANDS - 1].running > 0;
    ex->aged_at = now;
    if (!ex->ageing_slice_ns)
        return;
    for (uint32_t b = QB_BANDS - 1; b-- > 0;) {
        qb_band *band = &ex->band[b];
        if (!band->sessions && !band->running)
            band->blocked_ns = band->free_ns = 0;
        else if (higher_busy)
            band->blocked_ns += passed;
        else
            band->free_ns += passed;
        if (band->free_ns >= ex->ageing_slice_ns) {
            band->blocked_ns = band->free_ns = 0;
        } else if (band->blocked_ns >= ex->ageing_ns) {
            band->blocked_ns = band->free_ns = 0;
            ex->hold_band = b;
            ex->hold_until = now + ex->ageing_slice_ns;
        }
        higher_busy = higher_busy || band->running > 0;
    }
}

static qb_submission *remove_waiting(qb_binding *b, uint64_t ticket, bool from_ring) {
    qb_submission *prev = NULL;
    for (qb_submission *sub = b->waiting.head; sub; prev = sub, sub = sub->next) {
        if (sub->ticket != ticket || sub->from_ring != from_ring)
            continue;
        if (prev)
            prev->next = sub->next;
        else
            b->waiting.head = sub->next;
        if (b->waiting.tail == sub)
            b->waiting.tail = prev;
        b->session->put_aside--;
        return sub;
    }
    return NULL;
}

/* A ring's tickets and a call's tickets are numbers of their own. */
qb_submission *qb_sched_remove_ticket(qb_session *s, uint64_t ticket, bool from_ring) {
    for (uint32_t b = 0; b < QB_BANDS; b++) {
        qb_submission *prev = NULL;
        for (qb_submission *sub = s->queue[b].head; sub; prev = sub, sub = sub->next)
            if (sub->ticket == ticket && sub->from_ring == from_ring)
                return unlink_after(s, b, prev);
    }
    for (uint32_t i = 0; s->put_aside && i < s->entry_count; i++) {
        qb_binding *binding = s->entries[i].binding;
        qb_submission *sub = binding ? remove_waiting(binding, ticket, from_ring) : NULL;
        if (sub)
            return sub;
    }
    return NULL;
}

qb_submission *qb_sched_remove_binding(qb_binding *binding) {
    qb_submission *prev = NULL;
    for (qb_submission *sub = binding->session->queue[binding->band].head; sub;
         prev = sub, sub = sub->next)
        if (sub->binding == binding)
            return unlink_after(binding->session, binding->band, prev);
    return NULL;
}

qb_submission *qb_sched_pop_any(qb_session *s) {
    for (uint32_t b = 0; b < QB_BANDS; b++)
        if (s->queue[b].head)
            return unlink_after(s, b, NULL);
    return NULL;
}

void qb_sched_charge(qb_session *s, uint32_t b, uint64_t device_ns) {
    s->vtime[b] += device_ns / s->weight + 1;
}
