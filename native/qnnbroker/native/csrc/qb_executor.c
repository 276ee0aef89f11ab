/* SPDX-License-Identifier: Apache-2.0
 * The executor's threads: leader and followers. A thread that finds something to run runs it; one that
 * finds nothing and nobody watching the doorbells watches them; the rest wait to be wanted. */
#include "qb_executor.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "qb_doorbell.h"
#include "qb_executor_impl.h"

/* How long a thread may keep others from the lock, and how long it stays out then. */
enum { HOLD_NS = 50000 };

uint64_t qb_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint32_t status_of(uint64_t qnn_code) {
    if (!qnn_code)
        return QB_OK;
    switch (qnn_code & 0xffff) {
    case 1000: return QB_UNSUPPORTED;
    case 1002:
    case 1010: return QB_NPU_MEMORY;
    case 1007:
    case 5002: /* a handle that we hold is invalid: it went with a restart */
    case 6001: return QB_NPU_RESTARTED;
    case 1008: return QB_BINARY_VERSION;
    case 1011: return QB_NPU_LOST;
    default: return QB_QNN_ERROR;
    }
}

static void record(qb_graph *graph, qb_session *s, const qb_submission *sub, uint64_t end, bool ok) {
    s->run_count++;
    s->device_ns += sub->execute_ns;
    qb_hist_add(&s->queue_hist, sub->queue_ns);
    qb_hist_add(&s->execute_hist, sub->execute_ns);
    qb_hist_add(&s->total_hist, sub->queue_ns + sub->execute_ns);
    if (!graph)
        return;
    graph->last_end_ns = end;
    if (!ok) {
        graph->error_count++;
        return;
    }
    if (!graph->run_count || sub->execute_ns < graph->execute_ns_min)
        graph->execute_ns_min = sub->execute_ns;
    if (sub->execute_ns > graph->execute_ns_max)
        graph->execute_ns_max = sub->execute_ns;
    /* A running median: half the steps up, half down. */
    if (!graph->run_count)
        graph->median_ns = sub->execute_ns;
    else if (sub->execute_ns > graph->median_ns)
        graph->median_ns += graph->median_ns / 8 + 1;
    else if (sub->execute_ns < graph->median_ns)
        graph->median_ns -= graph->median_ns / 8;
    graph->run_count++;
    graph->execute_ns_total += sub->execute_ns;
    graph->queue_ns_total += sub->queue_ns;
    qb_hist_add(&graph->queue, sub->queue_ns);
    qb_hist_add(&graph->execute, sub->execute_ns);
    qb_hist_add(&graph->total, sub->queue_ns + sub->execute_ns);
}

/* Runs one submission: the ns it took. The lock is held on entry and on return, not in between. */
static uint64_t run(qb_executor *ex, qb_submission *sub) {
    qb_binding *b = sub->binding;
    qb_session *s = sub->session;
    qb_runnable *runnable = b->runnable;
    qb_graph *graph = runnable->graph;
    uint32_t band = b->band;
    uint64_t start = qb_now_ns(), end, code = 0;
    bool prioritise = graph && graph->set_priority && graph->priority != ex->band[band].priority;
    bool is_short = graph && graph->run_count > 2 && graph->median_ns <= ex->spin_limit_ns;
    uint64_t unwatched = 0;
    qb_sched_age(ex, start);
    b->running++;
    ex->band[band].running++;
    if (graph)
        graph->running++;
    if (prioritise) /* keeps every other band off this graph until it is done */
        graph->priority = QB_PRIORITY_CHANGING;
    /* Somebody must watch the doorbells meanwhile, unless this is over before they could; and what
     * can start beside this must not wait for its end. */
    if (qb_sched_has_queued(ex) && qb_sched_can_pick(ex)) {
        qb_wake_worker(ex);
    } else if (!is_short) {
        qb_leave_watch(ex);
    } else if (!ex->leading) {
        unwatched = ex->unwatched = ++ex->unwatched_count;
        ex->unwatched_since = start;
        if (!ex->deputy && !qb_wake_follower(ex))
            qb_wake_worker(ex); /* all sleep on the doorbells: one becomes the deputy */
    }
    pthread_mutex_unlock(&ex->lock);

    if (prioritise) {
        code = graph->set_priority(graph, ex->band[band].priority);
        qb_lock(ex);
        if (!code) {
            graph->priority = ex->band[band].priority;
            if (qb_sched_has_queued(ex) && qb_sched_can_pick(ex))
                qb_wake_worker(ex);
        }
        pthread_mutex_unlock(&ex->lock);
        start = qb_now_ns();
    }
    if (!code)
        code = runnable->execute(runnable);
    end = qb_now_ns();

    qb_lock(ex);
    if (unwatched && ex->unwatched == unwatched)
        ex->unwatched = 0;
    qb_sched_age(ex, end);
    sub->started = true;
    sub->queue_ns = start - sub->queued_ns;
    sub->execute_ns = end - start;
    b->running--;
    ex->band[band].running--;
    if (graph)
        graph->running--;
    if (code)
        b->last_error = code;
    record(graph, s, sub, end, !code);
    qb_sched_charge(s, band, sub->execute_ns);
    qb_place_executed(ex, graph && graph->median_ns <= ex->spin_limit_ns, end);
    /* What waited for this graph, binding or band may start now: this thread looks next, and wakes
     * another one for the rest when it starts something itself. */
    if (sub->from_ring) /* the client's next submission may come before this thread sleeps */
        qb_attend(s);
    qb_complete(ex, sub, status_of(code), code);
    return end - start;
}

/* Takes one submission through; whether others had the time to take the lock meanwhile. */
static bool handle(qb_executor *ex, qb_submission *sub) {
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
        b->session->put_aside++;
        qb_post(ex, &b->wanted_node, QB_EVENT_BINDING_PARKED_WANTED);
    } else {
        return run(ex, sub) >= HOLD_NS;
    }
    return false;
}

bool qb_wake_follower(qb_executor *ex) {
    qb_follower **at = &ex->followers;
    while (*at && !(*at)->warm)
        at = &(*at)->next;
    if (!*at)
        at = &ex->followers;
    qb_follower *f = *at;
    if (!f)
        return false;
    *at = f->next;
    f->is_wanted = true;
    pthread_cond_signal(&f->wanted);
    return true;
}

/* Does a short execute that nobody watches the doorbells beside take its time? */
static bool unwatched_for_long(const qb_executor *ex) {
    return ex->unwatched && qb_now_ns() - ex->unwatched_since >= QB_DEPUTY_TICK_NS;
}

/* Is it on this thread, which has found nothing to do, to look at the rings? When somebody sleeps on
 * the doorbells already, only if it has just executed: the kernel wakes the latest sleeper first, so
 * one thread does all the work for as long as one is enough. That saves a wake-up beside each long
 * execute, and what a library keeps for every thread that has executed. But rings that were told not
 * to ring must not be left so: whoever finds some looks after them until they are told again. */
static bool may_lead(const qb_executor *ex, bool busy) {
    if (ex->leading)
        return false;
    return ex->unwatched ? unwatched_for_long(ex) : busy || ex->awake || !ex->sleepers;
}

/* Waits to be wanted, or until the time comes (0: never). */
static void wait_wanted(qb_executor *ex, bool warm, uint64_t until_ns) {
    struct timespec ts = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    qb_follower me = {.warm = warm, .next = ex->followers};
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&me.wanted, &monotonic);
    pthread_condattr_destroy(&monotonic);
    ex->followers = &me;
    for (int result = 0; !me.is_wanted && !result;)
        result = until_ns ? pthread_cond_timedwait(&me.wanted, &ex->lock, &ts)
                          : pthread_cond_wait(&me.wanted, &ex->lock);
    if (!me.is_wanted) {
        qb_follower **at = &ex->followers;
        while (*at != &me)
            at = &(*at)->next;
        *at = me.next;
    }
    pthread_cond_destroy(&me.wanted);
}

/* Nobody who finds nothing to do may sleep past the end of a hold, which nothing else tells. And while
 * there are executes with nobody at the doorbells, one follower, the deputy, looks now and then; it
 * goes on for some time after the last one, so that not each has to wake it. */
static void follow(qb_executor *ex, bool warm) {
    uint64_t until = 0;
    if (ex->hold_until && ex->hold_until > qb_now_ns())
        until = ex->hold_until;
    if (ex->deputy || (!ex->unwatched && !ex->deputy_ticks)) {
        wait_wanted(ex, warm, until);
        return;
    }
    uint64_t tick = (ex->unwatched ? ex->unwatched_since : qb_now_ns()) + QB_DEPUTY_TICK_NS;
    ex->deputy = true;
    ex->deputy_ticks = ex->unwatched ? QB_DEPUTY_TICKS : ex->deputy_ticks - 1;
    wait_wanted(ex, warm, until && until < tick ? until : tick);
    ex->deputy = false;
}

/* A client can keep a thread busy without anything being executed, or with executes of no length: the
 * lock would be taken again before anybody who waits for it has woken up. */
static void give_way(qb_executor *ex, uint64_t *held_since) {
    struct timespec pause = {0, HOLD_NS};
    if (!__atomic_load_n(&ex->lock_waiters, __ATOMIC_RELAXED) ||
        qb_now_ns() - *held_since < HOLD_NS)
        return;
    pthread_mutex_unlock(&ex->lock);
    nanosleep(&pause, NULL);
    qb_lock(ex);
    *held_since = qb_now_ns();
}

/* Something can start, and there are threads that have executed and do not now: sees to it that one of
 * them comes. It waits to be wanted, or sleeps on the doorbells (whoever wakes in its stead does this
 * again), or is awake. */
static void hand_over(qb_executor *ex) {
    for (qb_follower *f = ex->followers; f; f = f->next)
        if (f->warm) {
            qb_wake_follower(ex);
            return;
        }
    if (ex->sleepers)
        qb_doorbell_ring(ex->wake);
}

/* Invariants, whenever the lock is free (a woken thread counts as awake, until it has looked):
 *  1. If something can start, some thread is awake. Who starts one thing wakes somebody for the next;
 *     who sleeps has just looked; what makes something startable from outside calls qb_wake_worker;
 *     the end of a hold is in the timeouts.
 *  2. Somebody watches the doorbells, or is awake and will, or an execute is under way that has always
 *     been short, and a deputy looks after that. There is one thread more than can execute.
 *  3. Nobody sleeps, on the doorbells or as a follower, while rings are told not to ring, unless
 *     another thread leads or the case is that of a short execute. */
static void *worker(void *arg) {
    qb_executor *ex = arg;
    bool busy = false;   /* has executed since it last slept */
    bool warm = false;   /* has ever executed */
    bool let_go = true;  /* others had the time to take the lock */
    uint64_t held_since; /* and had not since then */
    qb_lock(ex);
    for (;;) {
        if (let_go)
            held_since = qb_now_ns();
        else
            give_way(ex, &held_since);
        /* What the first execute of a thread costs, in time and in memory of the library, is left to as
         * few threads as there are executes at a time. */
        bool leave_it = !warm && ex->warm_free && !ex->stopping;
        qb_submission *sub = leave_it ? NULL : qb_sched_pick(ex);
        if (sub) {
            ex->warm_free -= warm;
            let_go = handle(ex, sub);
            ex->warm_free++;
            busy = warm = true;
        } else if (ex->stopping) {
            break;
        } else if (leave_it && qb_sched_can_pick(ex)) {
            hand_over(ex);
            busy = false;
            follow(ex, warm);
            let_go = true;
        } else if (may_lead(ex, busy)) {
            busy = false;
            ex->unwatched = 0;
            ex->leading = true;
            let_go = qb_lead(ex);
        } else {
            busy = false;
            follow(ex, warm);
            let_go = true;
        }
    }
    qb_doorbell_ring(ex->wake); /* the next one that sleeps on the doorbells stops too */
    pthread_mutex_unlock(&ex->lock);
    return NULL;
}

qb_executor *qb_executor_new(const qb_executor_config *config) {
    qb_executor *ex = calloc(1, sizeof *ex);
    if (!ex)
        return NULL;
    ex->thread_count = 1; /* one more than can execute: somebody is left to watch */
    for (int b = 0; b < QB_BANDS; b++) {
        ex->band[b].workers = config->workers[b] ? config->workers[b] : 1;
        ex->band[b].priority = config->priority[b];
        ex->thread_count += ex->band[b].workers;
    }
    ex->spin_ns = config->spin_ns;
    ex->spin_limit_ns = config->spin_limit_ns;
    ex->ageing_ns = config->ageing_ns;
    ex->ageing_slice_ns = config->ageing_slice_ns;
    ex->aged_at = qb_now_ns();
    ex->threads = calloc(ex->thread_count, sizeof *ex->threads);
    ex->event_fd = qb_doorbell_new();
    ex->wake = qb_doorbell_new();
    ex->waiter = qb_waiter_new();
    if (!ex->threads || ex->event_fd < 0 || ex->wake < 0 || ex->waiter < 0 ||
        qb_waiter_add(ex->waiter, ex->wake, UINT64_MAX) < 0) {
        for (int fds[3] = {ex->event_fd, ex->wake, ex->waiter}, i = 0; i < 3; i++)
            if (fds[i] >= 0)
                close(fds[i]);
        free(ex->threads);
        free(ex);
        return NULL;
    }
    pthread_mutex_init(&ex->lock, NULL);
    return ex;
}

int qb_executor_start(qb_executor *ex) {
    if (ex->started)
        return 0;
    ex->started = true;
    for (uint32_t i = 0; i < ex->thread_count; i++) {
        int error = pthread_create(&ex->threads[i], NULL, worker, ex);
        if (error) {
            ex->thread_count = i;
            qb_executor_stop(ex);
            return error;
        }
    }
    return 0;
}

void qb_executor_stop(qb_executor *ex) {
    qb_lock(ex);
    bool join = ex->started;
    ex->started = false;
    ex->stopping = true;
    /* At once: what runs may take long, and nothing of this will start after it. */
    for (uint32_t b = 0; b < QB_BANDS; b++)
        for (qb_session *s; (s = ex->band[b].sessions);)
            for (qb_submission *sub; (sub = qb_sched_pop_any(s));)
                qb_complete(ex, sub, QB_STOPPING, 0);
    while (qb_wake_follower(ex))
        ;
    qb_doorbell_ring(ex->wake);
    pthread_mutex_unlock(&ex->lock);
    for (uint32_t i = 0; join && i < ex->thread_count; i++)
        pthread_join(ex->threads[i], NULL);
}

void qb_executor_free(qb_executor *ex) {
    qb_event rest[16];
    while (qb_executor_drain(ex, rest, 16))
        ;
    close(ex->event_fd);
    close(ex->wake);
    close(ex->waiter);
    pthread_mutex_destroy(&ex->lock);
    free(ex->rings);
    free(ex->threads);
    free(ex);
}
