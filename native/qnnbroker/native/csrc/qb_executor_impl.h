/* SPDX-License-Identifier: Apache-2.0
 * The executor's own structures, shared by its files and by nobody else. */
#pragma once
#include <pthread.h>

#include "qb_executor.h"

/* Something that waits in the event list; embedded, so that posting never allocates. */
typedef struct qb_node {
    struct qb_node *next;
    uint32_t kind;
    bool posted;
} qb_node;

typedef struct qb_submission {
    qb_node node; /* first: event list */
    struct qb_submission *next;
    qb_binding *binding;
    qb_session *session;
    uint64_t ticket, deadline_ns, queued_ns;
    uint64_t session_id; /* outlives the session, for the event */
    uint32_t status;
    uint64_t qnn_code, queue_ns, execute_ns;
} qb_submission;

typedef struct qb_fifo {
    qb_submission *head, *tail;
} qb_fifo;

enum qb_binding_state { QB_LIVE, QB_PARKED, QB_DYING };

struct qb_binding {
    qb_node idle_node, wanted_node;
    qb_session *session;
    qb_runnable *runnable;
    uint64_t cookie;
    uint32_t band;
    enum qb_binding_state state;
    uint32_t running; /* executes under way; more than one never happens */
    uint32_t queued;  /* in the session's queue or waiting */
    qb_fifo waiting;  /* submissions that found it parked */
    bool idle_told;
};

struct qb_session {
    qb_node idle_node;
    qb_executor *ex;
    uint64_t id, cookie;
    uint32_t weight, max_in_flight;
    qb_fifo queue[QB_BANDS];
    uint64_t vtime[QB_BANDS]; /* device time used over weight: what fairness compares */
    /* Sessions with something queued in a band form a ring list per band. */
    qb_session *band_next[QB_BANDS], *band_prev[QB_BANDS];
    uint32_t in_flight, bindings;
    bool closing, idle_told;
    uint64_t run_count, error_count, device_ns;
};

typedef struct qb_band {
    qb_session *sessions; /* those with something queued */
    uint32_t running, workers;
    uint32_t priority;
    uint64_t vclock; /* vtime of the session chosen last: where newcomers start */
} qb_band;

struct qb_executor {
    pthread_mutex_t lock;
    pthread_cond_t work; /* something became runnable, or stop */
    qb_band band[QB_BANDS];
    pthread_t *threads;
    uint32_t thread_count;
    bool stopping, started;
    int event_fd;
    bool event_rung;
    qb_node *events_head, *events_tail;
};

/* qb_sched.c: which submission next. The lock is held in all of them. */
void qb_sched_push(qb_session *s, uint32_t band, qb_submission *sub, bool front);
qb_submission *qb_sched_pick(qb_executor *ex);
qb_submission *qb_sched_remove_ticket(qb_session *s, uint64_t ticket);
qb_submission *qb_sched_pop_any(qb_session *s);
qb_submission *qb_sched_remove_binding(qb_binding *b);
void qb_sched_charge(qb_session *s, uint32_t band, uint64_t device_ns);

/* qb_executor.c, the lock held: drops the submission's counts, then posts its completion. */
void qb_complete(qb_executor *ex, qb_submission *sub, uint32_t status, uint64_t qnn_code);
void qb_post(qb_executor *ex, qb_node *node, uint32_t kind);
