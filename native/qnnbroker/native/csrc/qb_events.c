/* SPDX-License-Identifier: Apache-2.0
 * What the executor tells: completions, and that something is idle. */
#include <stdlib.h>
#include <unistd.h>

#include "qb_counters.h"
#include "qb_executor_impl.h"

void qb_post(qb_executor *ex, qb_node *node, uint32_t kind) {
    if (node->posted)
        return;
    node->posted = true;
    node->kind = kind;
    node->next = NULL;
    if (ex->events_tail)
        ex->events_tail->next = node;
    else
        ex->events_head = node;
    ex->events_tail = node;
    if (!ex->event_rung) {
        uint64_t one = 1;
        /* Cannot block: the counter is at most 1, and only we write to it. */
        ex->event_rung = write(ex->event_fd, &one, sizeof one) == sizeof one;
    }
}

/* Takes a node back that nobody drained yet. */
void qb_unpost(qb_executor *ex, qb_node *node) {
    qb_node *prev = NULL;
    for (qb_node *at = node->posted ? ex->events_head : NULL; at; prev = at, at = at->next) {
        if (at != node)
            continue;
        if (prev)
            prev->next = node->next;
        else
            ex->events_head = node->next;
        if (ex->events_tail == node)
            ex->events_tail = prev;
        node->posted = false;
        return;
    }
}

bool qb_binding_idle_now(const qb_binding *b) {
    return b->state != QB_LIVE && !b->running && (b->state == QB_PARKED || !b->queued);
}

void qb_tell_binding_idle(qb_executor *ex, qb_binding *b) {
    if (qb_binding_idle_now(b) && !b->idle_told) {
        b->idle_told = true;
        qb_post(ex, &b->idle_node, QB_EVENT_BINDING_IDLE);
    }
}

void qb_tell_session_idle(qb_executor *ex, qb_session *s) {
    if (s->closing && !s->in_flight && !s->bindings && !s->idle_told) {
        s->idle_told = true;
        qb_post(ex, &s->idle_node, QB_EVENT_SESSION_IDLE);
    }
}

void qb_complete(qb_executor *ex, qb_submission *sub, uint32_t status, uint64_t qnn_code) {
    qb_binding *b = sub->binding;
    qb_session *s = sub->session;
    if (!sub->started)
        sub->queue_ns = qb_now_ns() - sub->queued_ns;
    /* Counts drop before the completion is posted. */
    sub->binding = NULL;
    sub->session = NULL;
    b->queued--;
    s->in_flight--;
    if (status != QB_OK)
        s->error_count++;
    qb_tell_binding_idle(ex, b);
    if (sub->from_ring) {
        qb_cq_slot slot = {.ticket = sub->ticket,
                           .status = status,
                           .queue_ns = sub->queue_ns,
                           .execute_ns = sub->execute_ns};
        sub->next = s->free_submissions;
        s->free_submissions = sub;
        qb_count(QB_COUNT_SUBMISSION, -1);
        qb_ring_complete(s, &slot);
    } else {
        sub->status = status;
        sub->qnn_code = qnn_code;
        qb_post(ex, &sub->node, QB_EVENT_COMPLETED);
    }
    qb_tell_session_idle(ex, s);
}

#define OWNER(type, member, node) ((type *)((char *)(node) - offsetof(type, member)))

size_t qb_executor_drain(qb_executor *ex, qb_event *out, size_t n) {
    size_t count = 0;
    qb_submission *done = NULL;
    qb_lock(ex);
    if (ex->event_rung) {
        uint64_t ignored;
        if (read(ex->event_fd, &ignored, sizeof ignored) < 0) { /* already empty: nothing to do */
        }
        ex->event_rung = false;
    }
    while (count < n && ex->events_head) {
        qb_node *node = ex->events_head;
        qb_event *e = &out[count++];
        ex->events_head = node->next;
        if (!ex->events_head)
            ex->events_tail = NULL;
        node->posted = false;
        *e = (qb_event){.kind = node->kind};
        switch (node->kind) {
        case QB_EVENT_COMPLETED: {
            qb_submission *sub = (qb_submission *)node;
            e->status = sub->status;
            e->ticket = sub->ticket;
            e->session = sub->session_id;
            e->qnn_code = sub->qnn_code;
            e->queue_ns = sub->queue_ns;
            e->execute_ns = sub->execute_ns;
            sub->next = done;
            done = sub;
            break;
        }
        case QB_EVENT_SESSION_IDLE:
            e->cookie = OWNER(qb_session, idle_node, node)->cookie;
            break;
        case QB_EVENT_SESSION_BROKEN:
            e->cookie = OWNER(qb_session, broken_node, node)->cookie;
            break;
        case QB_EVENT_ACTIVE:
            break;
        case QB_EVENT_BINDING_IDLE:
            e->cookie = OWNER(qb_binding, idle_node, node)->cookie;
            break;
        default:
            e->cookie = OWNER(qb_binding, wanted_node, node)->cookie;
        }
    }
    if (ex->events_head) { /* more than fits: stay readable */
        uint64_t one = 1;
        ex->event_rung = write(ex->event_fd, &one, sizeof one) == sizeof one;
    }
    pthread_mutex_unlock(&ex->lock);
    while (done) {
        qb_submission *next = done->next;
        free(done);
        qb_count(QB_COUNT_SUBMISSION, -1);
        done = next;
    }
    return count;
}

void qb_executor_tell_next(qb_executor *ex) {
    qb_lock(ex);
    ex->tell_next = true;
    pthread_mutex_unlock(&ex->lock);
}

int qb_executor_event_fd(qb_executor *ex) { return ex->event_fd; }
