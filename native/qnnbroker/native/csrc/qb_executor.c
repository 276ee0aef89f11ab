/* SPDX-License-Identifier: Apache-2.0 */
#include "qb_executor.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "qb_counters.h"
#include "qb_executor_impl.h"

uint64_t qb_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* ---- events ---------------------------------------------------------------------------------- */

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
        ex->event_rung = true;
        /* Cannot block: the counter is at most 1, and only we write to it. */
        if (write(ex->event_fd, &one, sizeof one) != sizeof one)
            ex->event_rung = false;
    }
}

/* Takes a node back that nobody drained yet; the lock is held. */
static void unpost(qb_executor *ex, qb_node *node) {
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

static bool binding_is_idle(qb_binding *b) {
    return b->state != QB_LIVE && !b->running && (b->state == QB_PARKED || !b->queued);
}

static void tell_binding_idle(qb_executor *ex, qb_binding *b) {
    if (binding_is_idle(b) && !b->idle_told) {
        b->idle_told = true;
        qb_post(ex, &b->idle_node, QB_EVENT_BINDING_IDLE);
    }
}

static void tell_session_idle(qb_executor *ex, qb_session *s) {
    if (s->closing && !s->in_flight && !s->bindings && !s->idle_told) {
        s->idle_told = true;
        qb_post(ex, &s->idle_node, QB_EVENT_SESSION_IDLE);
    }
}

void qb_complete(qb_executor *ex, qb_submission *sub, uint32_t status, uint64_t qnn_code) {
    qb_binding *b = sub->binding;
    qb_session *s = sub->session;
    sub->status = status;
    sub->qnn_code = qnn_code;
    if (!sub->queue_ns)
        sub->queue_ns = qb_now_ns() - sub->queued_ns;
    /* Counts drop before the completion is posted. */
    sub->binding = NULL;
    sub->session = NULL;
    b->queued--;
    s->in_flight--;
    if (status != QB_OK)
        s->error_count++;
    tell_binding_idle(ex, b);
    qb_post(ex, &sub->node, QB_EVENT_COMPLETED);
    tell_session_idle(ex, s);
}

size_t qb_executor_drain(qb_executor *ex, qb_event *out, size_t n) {
    size_t count = 0;
    qb_submission *done = NULL;
    pthread_mutex_lock(&ex->lock);
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
        if (node->kind == QB_EVENT_COMPLETED) {
            qb_submission *sub = (qb_submission *)node;
            e->status = sub->status;
            e->ticket = sub->ticket;
            e->session = sub->session_id;
            e->qnn_code = sub->qnn_code;
            e->queue_ns = sub->queue_ns;
            e->execute_ns = sub->execute_ns;
            sub->next = done;
            done = sub;
        } else if (node->kind == QB_EVENT_SESSION_IDLE) {
            e->cookie = ((qb_session *)node)->cookie;
        } else if (node->kind == QB_EVENT_BINDING_IDLE) {
            e->cookie = ((qb_binding *)((char *)node - offsetof(qb_binding, idle_node)))->cookie;
        } else {
            e->cookie = ((qb_binding *)((char *)node - offsetof(qb_binding, wanted_node)))->cookie;
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

int qb_executor_event_fd(qb_executor *ex) { return ex->event_fd; }

/* ---- workers --------------------------------------------------------------------------------- */

static uint32_t status_of(uint64_t qnn_code) {
    switch (qnn_code & 0xffff) {
    case 0: return QB_OK;
    case 1000: return QB_UNSUPPORTED;
    case 1002:
    case 1010: return QB_NPU_MEMORY;
    case 1007: return QB_NPU_RESTARTED;
    case 1008: return QB_BINARY_VERSION;
    case 1011: return QB_NPU_LOST;
    default: return QB_QNN_ERROR;
    }
}

static void record(qb_graph *graph, uint64_t queue_ns, uint64_t execute_ns, bool ok) {
    if (!ok) {
        graph->error_count++;
        return;
    }
    if (!graph->run_count || execute_ns < graph->execute_ns_min)
        graph->execute_ns_min = execute_ns;
    if (execute_ns > graph->execute_ns_max)
        graph->execute_ns_max = execute_ns;
    graph->run_count++;
    graph->execute_ns_total += execute_ns;
    graph->queue_ns_total += queue_ns;
}

/* Runs one submission. The lock is held on entry and on return, not in between. */
static void run(qb_executor *ex, qb_submission *sub) {
    qb_binding *b = sub->binding;
    qb_session *s = sub->session;
    qb_runnable *runnable = b->runnable;
    qb_graph *graph = runnable->graph;
    uint32_t band = b->band;
    bool prioritise = graph && graph->set_priority && graph->priority != ex->band[band].priority;
    b->running++;
    ex->band[band].running++;
    if (graph)
        graph->running++;
    pthread_mutex_unlock(&ex->lock);

    uint64_t code = 0, start = qb_now_ns(), end;
    if (prioritise)
        code = graph->set_priority(graph, ex->band[band].priority);
    if (!code) {
        start = qb_now_ns();
        code = runnable->execute(runnable);
    }
    end = qb_now_ns();

    pthread_mutex_lock(&ex->lock);
    sub->queue_ns = start - sub->queued_ns;
    sub->execute_ns = end - start;
    if (graph) {
        graph->running--;
        if (prioritise && !code)
            graph->priority = ex->band[band].priority;
        record(graph, sub->queue_ns, sub->execute_ns, !code);
    }
    b->running--;
    ex->band[band].running--;
    qb_sched_charge(s, band, sub->execute_ns);
    s->device_ns += sub->execute_ns;
    s->run_count++;
    qb_complete(ex, sub, status_of(code), code);
    /* What waited for this graph or binding may be startable in another band: this thread takes one,
     * somebody else must look for the rest. */
    for (int i = 0; i < QB_BANDS; i++)
        if (ex->band[i].sessions) {
            pthread_cond_signal(&ex->work);
            break;
        }
}

/* Takes one submission through. The lock is held. */
static void handle(qb_executor *ex, qb_submission *sub) {
    qb_binding *b = sub->binding;
    if (ex->stopping) {
        qb_complete(ex, sub, QB_STOPPING, 0);
    } else if (b->state == QB_DYING) {
        qb_complete(ex, sub, QB_LEASE_REVOKED, 0);
    } else if (sub->deadline_ns && qb_now_ns() >= sub->deadline_ns) {
        qb_complete(ex, sub, QB_DEADLINE_QUEUED, 0);
    } else if (b->state == QB_PARKED) {
        sub->next = NULL;
        if (b->waiting.tail)
            b->waiting.tail->next = sub;
        else
            b->waiting.head = sub;
        b->waiting.tail = sub;
        qb_post(ex, &b->wanted_node, QB_EVENT_BINDING_PARKED_WANTED);
    } else {
        run(ex, sub);
    }
}

static void *worker(void *arg) {
    qb_executor *ex = arg;
    pthread_mutex_lock(&ex->lock);
    for (;;) {
        qb_submission *sub = qb_sched_pick(ex);
        if (sub)
            handle(ex, sub);
        else if (ex->stopping)
            break;
        else
            pthread_cond_wait(&ex->work, &ex->lock);
    }
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}

qb_executor *qb_executor_new(const qb_executor_config *config) {
    qb_executor *ex = calloc(1, sizeof *ex);
    if (!ex)
        return NULL;
    for (int b = 0; b < QB_BANDS; b++) {
        ex->band[b].workers = config->workers[b] ? config->workers[b] : 1;
        ex->band[b].priority = config->priority[b];
        ex->thread_count += ex->band[b].workers;
    }
    ex->threads = calloc(ex->thread_count, sizeof *ex->threads);
    ex->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!ex->threads || ex->event_fd < 0) {
        free(ex->threads);
        free(ex);
        return NULL;
    }
    pthread_mutex_init(&ex->lock, NULL);
    pthread_cond_init(&ex->work, NULL);
    return ex;
}

int qb_executor_start(qb_executor *ex) {
    if (ex->started)
        return 0;
    for (uint32_t i = 0; i < ex->thread_count; i++) {
        int error = pthread_create(&ex->threads[i], NULL, worker, ex);
        if (error) {
            ex->thread_count = i;
            ex->started = true;
            qb_executor_stop(ex);
            return error;
        }
    }
    ex->started = true;
    return 0;
}

void qb_executor_stop(qb_executor *ex) {
    pthread_mutex_lock(&ex->lock);
    bool join = ex->started;
    ex->started = false;
    ex->stopping = true;
    pthread_cond_broadcast(&ex->work);
    pthread_mutex_unlock(&ex->lock);
    for (uint32_t i = 0; join && i < ex->thread_count; i++)
        pthread_join(ex->threads[i], NULL);
}

void qb_executor_free(qb_executor *ex) {
    qb_event rest[16];
    while (qb_executor_drain(ex, rest, 16))
        ;
    close(ex->event_fd);
    pthread_mutex_destroy(&ex->lock);
    pthread_cond_destroy(&ex->work);
    free(ex->threads);
    free(ex);
}

/* ---- sessions and bindings ------------------------------------------------------------------- */

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
    pthread_mutex_lock(&ex->lock);
    s->closing = true;
    while ((sub = qb_sched_pop_any(s)))
        qb_complete(ex, sub, QB_SESSION_CLOSED, 0);
    tell_session_idle(ex, s);
    pthread_mutex_unlock(&ex->lock);
}

void qb_session_free(qb_session *s) {
    free(s);
    qb_count(QB_COUNT_SESSION, -1);
}

void qb_session_get_stats(qb_session *s, qb_session_stats *out) {
    pthread_mutex_lock(&s->ex->lock);
    *out = (qb_session_stats){s->in_flight, s->run_count, s->error_count, s->device_ns};
    pthread_mutex_unlock(&s->ex->lock);
}

qb_binding *qb_binding_new(qb_session *s, qb_runnable *runnable, uint32_t band, uint64_t cookie) {
    qb_binding *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    b->session = s;
    b->runnable = runnable;
    b->band = band < QB_BANDS ? band : QB_BAND_NORMAL;
    b->cookie = cookie;
    pthread_mutex_lock(&s->ex->lock);
    s->bindings++;
    pthread_mutex_unlock(&s->ex->lock);
    qb_count(QB_COUNT_BINDING, 1);
    return b;
}

/* The lock is held. */
static void fail_waiting(qb_binding *b, uint32_t status, uint64_t qnn_code) {
    qb_submission *sub;
    while ((sub = b->waiting.head)) {
        b->waiting.head = sub->next;
        if (!b->waiting.head)
            b->waiting.tail = NULL;
        qb_complete(b->session->ex, sub, status, qnn_code);
    }
}

void qb_binding_release(qb_binding *b) {
    qb_executor *ex = b->session->ex;
    qb_submission *sub;
    pthread_mutex_lock(&ex->lock);
    if (b->state != QB_DYING) {
        b->state = QB_DYING;
        b->idle_told = false; /* an idle told while parked was of another kind */
        fail_waiting(b, QB_LEASE_REVOKED, 0);
        while ((sub = qb_sched_remove_binding(b)))
            qb_complete(ex, sub, QB_LEASE_REVOKED, 0);
        tell_binding_idle(ex, b);
        pthread_cond_signal(&ex->work); /* what stood behind them may start */
    }
    pthread_mutex_unlock(&ex->lock);
}

bool qb_binding_park(qb_binding *b) {
    qb_executor *ex = b->session->ex;
    pthread_mutex_lock(&ex->lock);
    bool live = b->state == QB_LIVE;
    if (live) {
        b->state = QB_PARKED;
        b->idle_told = false;
        tell_binding_idle(ex, b);
        pthread_cond_signal(&ex->work); /* what is queued is put aside, and lets others pass */
    }
    pthread_mutex_unlock(&ex->lock);
    return live;
}

bool qb_binding_revive(qb_binding *b, qb_runnable *runnable) {
    qb_executor *ex = b->session->ex;
    pthread_mutex_lock(&ex->lock);
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
        }
        b->waiting.tail = NULL;
        while ((sub = reversed)) {
            reversed = sub->next;
            qb_sched_push(b->session, b->band, sub, true);
        }
        pthread_cond_broadcast(&ex->work);
    }
    pthread_mutex_unlock(&ex->lock);
    return parked;
}

void qb_binding_fail_waiting(qb_binding *b, uint32_t status, uint64_t qnn_code) {
    pthread_mutex_lock(&b->session->ex->lock);
    fail_waiting(b, status, qnn_code);
    pthread_mutex_unlock(&b->session->ex->lock);
}

bool qb_binding_is_idle(qb_binding *b) {
    pthread_mutex_lock(&b->session->ex->lock);
    bool idle = binding_is_idle(b);
    pthread_mutex_unlock(&b->session->ex->lock);
    return idle;
}

void qb_binding_free(qb_binding *b) {
    qb_executor *ex = b->session->ex;
    pthread_mutex_lock(&ex->lock);
    unpost(ex, &b->idle_node);
    unpost(ex, &b->wanted_node);
    b->session->bindings--;
    tell_session_idle(ex, b->session);
    pthread_mutex_unlock(&ex->lock);
    free(b);
    qb_count(QB_COUNT_BINDING, -1);
}

/* ---- submissions ----------------------------------------------------------------------------- */

uint32_t qb_submit(qb_binding *b, uint64_t ticket, uint64_t deadline_ns) {
    qb_session *s = b->session;
    qb_executor *ex = s->ex;
    uint32_t status = QB_OK;
    qb_submission *sub = calloc(1, sizeof *sub);
    if (!sub)
        return QB_INTERNAL;
    pthread_mutex_lock(&ex->lock);
    if (ex->stopping)
        status = QB_STOPPING;
    else if (s->closing)
        status = QB_SESSION_CLOSED;
    else if (b->state == QB_DYING)
        status = QB_LEASE_REVOKED;
    else if (s->max_in_flight && s->in_flight >= s->max_in_flight)
        status = QB_CREDITS;
    if (status == QB_OK) {
        sub->binding = b;
        sub->session = s;
        sub->session_id = s->id;
        sub->ticket = ticket;
        sub->deadline_ns = deadline_ns;
        sub->queued_ns = qb_now_ns();
        b->queued++;
        s->in_flight++;
        qb_count(QB_COUNT_SUBMISSION, 1);
        qb_sched_push(s, b->band, sub, false);
        pthread_cond_signal(&ex->work);
    }
    pthread_mutex_unlock(&ex->lock);
    if (status != QB_OK)
        free(sub);
    return status;
}

bool qb_cancel(qb_session *s, uint64_t ticket) {
    pthread_mutex_lock(&s->ex->lock);
    qb_submission *sub = qb_sched_remove_ticket(s, ticket);
    if (sub) {
        qb_complete(s->ex, sub, QB_CANCELLED, 0);
        pthread_cond_signal(&s->ex->work); /* what stood behind it may start */
    }
    pthread_mutex_unlock(&s->ex->lock);
    return sub != NULL;
}
