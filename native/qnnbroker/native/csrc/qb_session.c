/* SPDX-License-Identifier: Apache-2.0
 * Sessions, their bindings, and submissions made by a call. */
#include <errno.h>
#include <stdlib.h>

#include "qb_counters.h"
#include "qb_executor_impl.h"

/* ---- sessions --------------------------------------------------------------------------------- */

qb_session *qb_session_new(qb_executor *ex, uint64_t id, uint64_t cookie, uint32_t weight,
                           uint32_t max_in_flight) {
    qb_session *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->ex = ex;
    s->id = id;
    s->cookie = cookie;
    s->weight = weight ? weight : 1;
    s->max_in_flight = max_in_flight;
    qb_count(QB_COUNT_SESSION, 1);
    return s;
}

void qb_session_close(qb_session *s) {
    qb_executor *ex = s->ex;
    qb_submission *sub;
    qb_lock(ex);
    s->closing = true;
    qb_ring_detach(s);
    while ((sub = qb_sched_pop_any(s)))
        qb_complete(ex, sub, QB_SESSION_CLOSED, 0);
    qb_tell_session_idle(ex, s);
    pthread_mutex_unlock(&ex->lock);
}

void qb_session_free(qb_session *s) {
    qb_executor *ex = s->ex;
    qb_lock(ex);
    qb_ring_detach(s);
    qb_unpost(ex, &s->idle_node);
    qb_unpost(ex, &s->broken_node);
    pthread_mutex_unlock(&ex->lock);
    free(s->slab);
    free(s->entries);
    free(s);
    qb_count(QB_COUNT_SESSION, -1);
}

void qb_session_get_stats(qb_session *s, qb_session_stats *out) {
    qb_lock(s->ex);
    *out = (qb_session_stats){.in_flight = s->in_flight,
                              .run_count = s->run_count,
                              .error_count = s->error_count,
                              .device_ns = s->device_ns,
                              .queue_p50_ns = qb_hist_quantile(&s->queue_hist, 0.5),
                              .queue_p99_ns = qb_hist_quantile(&s->queue_hist, 0.99),
                              .execute_p50_ns = qb_hist_quantile(&s->execute_hist, 0.5),
                              .execute_p99_ns = qb_hist_quantile(&s->execute_hist, 0.99),
                              .total_p50_ns = qb_hist_quantile(&s->total_hist, 0.5),
                              .total_p99_ns = qb_hist_quantile(&s->total_hist, 0.99)};
    pthread_mutex_unlock(&s->ex->lock);
}

/* ---- bindings --------------------------------------------------------------------------------- */

qb_binding *qb_binding_new(qb_session *s, qb_runnable *runnable, uint32_t band, uint64_t cookie) {
    qb_binding *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    b->session = s;
    b->runnable = runnable;
    b->band = band < QB_BANDS ? band : QB_BAND_NORMAL;
    b->cookie = cookie;
    qb_lock(s->ex);
    s->bindings++;
    pthread_mutex_unlock(&s->ex->lock);
    qb_count(QB_COUNT_BINDING, 1);
    return b;
}

int qb_binding_publish(qb_binding *b, uint64_t id) {
    qb_session *s = b->session;
    uint32_t index = (uint32_t)id - 1, generation = (uint32_t)(id >> 32);
    int error = 0;
    if (!generation || index == UINT32_MAX)
        return EINVAL;
    qb_lock(s->ex);
    if (index >= s->entry_count) {
        uint32_t more = s->entry_count ? s->entry_count * 2 : 16;
        while (more <= index)
            more *= 2;
        qb_entry *entries = realloc(s->entries, more * sizeof *entries);
        if (entries) {
            for (uint32_t i = s->entry_count; i < more; i++)
                entries[i] = (qb_entry){NULL, 0};
            s->entries = entries;
            s->entry_count = more;
        } else {
            error = ENOMEM;
        }
    }
    if (!error) {
        b->id = id;
        s->entries[index] = (qb_entry){b, generation};
    }
    pthread_mutex_unlock(&s->ex->lock);
    return error;
}

static void fail_waiting(qb_binding *b, uint32_t status, uint64_t qnn_code) {
    qb_submission *sub;
    while ((sub = b->waiting.head)) {
        b->waiting.head = sub->next;
        if (!b->waiting.head)
            b->waiting.tail = NULL;
        b->session->put_aside--;
        qb_complete(b->session->ex, sub, status, qnn_code);
    }
}

void qb_binding_release(qb_binding *b) {
    qb_executor *ex = b->session->ex;
    qb_submission *sub;
    qb_lock(ex);
    if (b->state != QB_DYING) {
        b->state = QB_DYING;
        b->idle_told = false; /* an idle told while parked was of another kind */
        if (b->id)
            b->session->entries[(uint32_t)b->id - 1].binding = NULL;
        fail_waiting(b, QB_LEASE_REVOKED, 0);
        while ((sub = qb_sched_remove_binding(b)))
            qb_complete(ex, sub, QB_LEASE_REVOKED, 0);
        qb_tell_binding_idle(ex, b);
        qb_wake_worker(ex); /* what stood behind them may start */
    }
    pthread_mutex_unlock(&ex->lock);
}

bool qb_binding_park(qb_binding *b) {
    qb_executor *ex = b->session->ex;
    qb_lock(ex);
    bool live = b->state == QB_LIVE;
    if (live) {
        b->state = QB_PARKED;
        b->idle_told = false;
        qb_tell_binding_idle(ex, b);
        qb_wake_worker(ex); /* what is queued is put aside, and lets others pass */
    }
    pthread_mutex_unlock(&ex->lock);
    return live;
}

bool qb_binding_revive(qb_binding *b, qb_runnable *runnable) {
    qb_executor *ex = b->session->ex;
    qb_lock(ex);
    bool parked = b->state == QB_PARKED && !b->running;
    if (parked) {
        b->state = QB_LIVE;
        b->runnable = runnable;
        /* Back to the front of the queue, oldest first: push in reverse. */
        qb_submission *reversed = NULL, *sub;
        while ((sub = b->waiting.head)) {
            b->waiting.head = sub->next;
            sub->next = reversed;
            reversed = sub;
            b->session->put_aside--;
        }
        b->waiting.tail = NULL;
        while ((sub = reversed)) {
            reversed = sub->next;
            qb_sched_push(b->session, b->band, sub, true);
        }
        qb_wake_worker(ex);
    }
    pthread_mutex_unlock(&ex->lock);
    return parked;
}

void qb_binding_fail_waiting(qb_binding *b, uint32_t status, uint64_t qnn_code) {
    qb_lock(b->session->ex);
    fail_waiting(b, status, qnn_code);
    pthread_mutex_unlock(&b->session->ex->lock);
}

bool qb_binding_is_wanted(qb_binding *b) {
    qb_lock(b->session->ex);
    bool wanted = b->state == QB_PARKED && b->waiting.head;
    pthread_mutex_unlock(&b->session->ex->lock);
    return wanted;
}

bool qb_binding_is_idle(qb_binding *b) {
    qb_lock(b->session->ex);
    bool idle = qb_binding_idle_now(b);
    pthread_mutex_unlock(&b->session->ex->lock);
    return idle;
}

uint64_t qb_binding_last_error(qb_binding *b) {
    qb_lock(b->session->ex);
    uint64_t code = b->last_error;
    pthread_mutex_unlock(&b->session->ex->lock);
    return code;
}

void qb_binding_free(qb_binding *b) {
    qb_executor *ex = b->session->ex;
    qb_lock(ex);
    qb_unpost(ex, &b->idle_node);
    qb_unpost(ex, &b->wanted_node);
    b->session->bindings--;
    qb_tell_session_idle(ex, b->session);
    pthread_mutex_unlock(&ex->lock);
    free(b);
    qb_count(QB_COUNT_BINDING, -1);
}

/* ---- submissions ------------------------------------------------------------------------------ */

void qb_enqueue(qb_submission *sub, qb_binding *b) {
    sub->binding = b;
    sub->queued_ns = qb_now_ns();
    b->queued++;
    sub->session->in_flight++;
    qb_count(QB_COUNT_SUBMISSION, 1);
    if (b->session->ex->tell_next) {
        b->session->ex->tell_next = false;
        qb_post(b->session->ex, &b->session->ex->active_node, QB_EVENT_ACTIVE);
    }
    qb_sched_push(sub->session, b->band, sub, false);
}

uint32_t qb_submit(qb_binding *b, uint64_t ticket, uint64_t deadline_ns) {
    qb_session *s = b->session;
    qb_executor *ex = s->ex;
    uint32_t status = QB_OK;
    qb_submission *sub = calloc(1, sizeof *sub);
    if (!sub)
        return QB_INTERNAL;
    qb_lock(ex);
    if (ex->stopping)
        status = QB_STOPPING;
    else if (s->closing)
        status = QB_SESSION_CLOSED;
    else if (b->state == QB_DYING)
        status = QB_LEASE_REVOKED;
    else if (s->max_in_flight && s->in_flight >= s->max_in_flight)
        status = QB_CREDITS;
    if (status == QB_OK) {
        sub->session = s;
        sub->session_id = s->id;
        sub->ticket = ticket;
        sub->deadline_ns = deadline_ns;
        qb_enqueue(sub, b);
        qb_wake_worker(ex);
    }
    pthread_mutex_unlock(&ex->lock);
    if (status != QB_OK)
        free(sub);
    return status;
}

bool qb_cancel(qb_session *s, uint64_t ticket) {
    qb_lock(s->ex);
    qb_submission *sub = qb_sched_remove_ticket(s, ticket, false);
    if (sub) {
        qb_complete(s->ex, sub, QB_CANCELLED, 0);
        qb_wake_worker(s->ex); /* what stood behind it may start */
    }
    pthread_mutex_unlock(&s->ex->lock);
    return sub != NULL;
}
