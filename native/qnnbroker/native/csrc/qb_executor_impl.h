/* SPDX-License-Identifier: Apache-2.0
 * The executor's own structures, shared by its files and by nobody else. In every function below the
 * executor's lock is held unless it says otherwise. */
#pragma once
#include <pthread.h>

#include "qb_executor.h"
#include "qb_place.h"
#include "qb_ring.h"

/* The priority of a graph while it is being set: no band's. */
#define QB_PRIORITY_CHANGING UINT32_MAX
/* How often the deputy looks: an execute that was wrongly thought short keeps the doorbells unwatched
 * for no longer than that. */
#define QB_DEPUTY_TICK_NS 10000000u
#define QB_DEPUTY_TICKS 10u

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
    bool started;   /* queue_ns and execute_ns are measured */
    bool from_ring; /* of the session's slab, and answered in its ring */
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
    uint64_t id; /* what rings call it; 0: not published */
    uint32_t band;
    enum qb_binding_state state;
    uint32_t running; /* executes under way; more than one never happens */
    uint32_t queued;  /* in the session's queue, waiting or running */
    qb_fifo waiting;  /* submissions that found it parked */
    bool idle_told;
    uint64_t last_error; /* QNN code */
};

/* What a ring's binding ids lead to. */
typedef struct qb_entry {
    qb_binding *binding;
    uint32_t generation; /* of the last binding at this index */
} qb_entry;

struct qb_session {
    qb_node idle_node, broken_node;
    qb_executor *ex;
    uint64_t id, cookie;
    uint32_t weight, max_in_flight;
    qb_fifo queue[QB_BANDS];
    uint64_t vtime[QB_BANDS]; /* device time used over weight: what fairness compares */
    /* Sessions with something queued in a band form a circular list per band. */
    qb_session *band_next[QB_BANDS], *band_prev[QB_BANDS];
    uint32_t in_flight, bindings;
    uint32_t put_aside; /* submissions that wait for parked bindings */
    bool closing, idle_told;

    /* The ring, when it has one. */
    bool has_ring, broken, awake;
    qb_ring ring;
    int doorbell, bell;
    uint32_t key;                   /* index in the executor's table, plus its generation */
    qb_session *awake_next, **awake_link; /* the executor's list of those that need no doorbell */
    qb_submission *slab, *free_submissions;
    qb_entry *entries;
    uint32_t entry_count;

    uint64_t run_count, error_count, device_ns;
    qb_hist queue_hist, execute_hist, total_hist;
};

typedef struct qb_band {
    qb_session *sessions; /* those with something queued */
    uint32_t running, workers;
    uint32_t priority;
    uint64_t vclock; /* vtime of the session chosen last: where newcomers start */
    /* Ageing: how long higher bands kept the device while this one wanted it, and how long not. */
    uint64_t blocked_ns, free_ns;
} qb_band;

typedef struct qb_ring_slot {
    qb_session *session;
    uint32_t generation;
} qb_ring_slot;

/* A worker that waits to be wanted: something became runnable, a leader is wanted, or stop. */
typedef struct qb_follower {
    pthread_cond_t wanted;
    bool is_wanted;
    bool warm; /* has executed */
    struct qb_follower *next;
} qb_follower;

struct qb_executor {
    pthread_mutex_t lock;
    uint32_t lock_waiters; /* atomic: threads that found it taken */
    qb_follower *followers; /* the one that came last first, see qb_wake_follower */
    qb_band band[QB_BANDS];
    pthread_t *threads;
    uint32_t thread_count;
    uint32_t warm_free; /* threads that have executed, and do not now */
    bool stopping, started;

    bool leading;      /* somebody looks at the rings; one at a time */
    uint32_t sleepers; /* threads that wait for doorbells; the kernel wakes the latest first */
    /* A short execute under way without a leader, by number (0: none); its thread leads after it. */
    uint64_t unwatched, unwatched_count, unwatched_since;
    bool deputy;           /* a follower keeps an eye on that */
    uint32_t deputy_ticks; /* how often it still looks without a reason */
    int waiter, wake;      /* the epoll, and the eventfd that wakes one of them */
    uint64_t spin_ns, spin_limit_ns;
    qb_place place;
    qb_session *awake; /* sessions whose rings are polled, not rung */
    qb_ring_slot *rings;
    uint32_t ring_count;

    uint64_t ageing_ns, ageing_slice_ns;
    uint64_t aged_at;    /* when the ageing accounts were last brought up to date */
    uint64_t hold_until; /* bands above `hold_band` start nothing before */
    uint32_t hold_band;

    bool tell_next; /* the owner asked to hear of the next submission */
    qb_node active_node;

    int event_fd;
    bool event_rung;
    qb_node *events_head, *events_tail;
};

/* Takes the lock. A mutex is not fair: those that wait for it count, so that a thread which would take
 * it again and again can stay out for a moment. */
static inline void qb_lock(qb_executor *ex) {
    if (!pthread_mutex_trylock(&ex->lock))
        return;
    __atomic_add_fetch(&ex->lock_waiters, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&ex->lock);
    __atomic_sub_fetch(&ex->lock_waiters, 1, __ATOMIC_RELAXED);
}

/* qb_sched.c: which submission next. */
void qb_sched_push(qb_session *s, uint32_t band, qb_submission *sub, bool front);
qb_submission *qb_sched_pick(qb_executor *ex);
qb_submission *qb_sched_remove_ticket(qb_session *s, uint64_t ticket, bool from_ring);
qb_submission *qb_sched_pop_any(qb_session *s);
qb_submission *qb_sched_remove_binding(qb_binding *b);
void qb_sched_charge(qb_session *s, uint32_t band, uint64_t device_ns);
/* Brings the ageing accounts up to `now`; called before a band starts or ends something. */
void qb_sched_age(qb_executor *ex, uint64_t now);
bool qb_sched_has_queued(const qb_executor *ex);
/* Would qb_sched_pick find something now? */
bool qb_sched_can_pick(qb_executor *ex);

/* qb_events.c */
void qb_post(qb_executor *ex, qb_node *node, uint32_t kind);
void qb_unpost(qb_executor *ex, qb_node *node);
bool qb_binding_idle_now(const qb_binding *b);
void qb_tell_binding_idle(qb_executor *ex, qb_binding *b);
void qb_tell_session_idle(qb_executor *ex, qb_session *s);
/* Drops the submission's counts, then posts its completion. */
void qb_complete(qb_executor *ex, qb_submission *sub, uint32_t status, uint64_t qnn_code);

/* qb_executor.c */
/* Wakes the worker that has waited for the shortest time, of those that have executed if there are any;
 * false when none waits. Its caches are warm, and what a library keeps for each thread that executes is
 * kept for as few threads as do. */
bool qb_wake_follower(qb_executor *ex);

/* qb_lead.c */
/* Looks at rings until something can run or ought to stop; may sleep, without the lock: whether it did.
 * The caller has set `leading`; it is no longer set while this sleeps, nor when it returns. */
bool qb_lead(qb_executor *ex);
/* Before a long execute: the rings are left to a thread that sleeps on the doorbells, or a follower. */
void qb_leave_watch(qb_executor *ex);
/* The caller will look at the session's ring before it sleeps: nobody need be rung for it. */
void qb_attend(qb_session *s);
/* Makes some thread look again. */
void qb_wake_worker(qb_executor *ex);
void qb_ring_complete(qb_session *s, const qb_cq_slot *slot);
void qb_ring_break(qb_session *s);
void qb_ring_detach(qb_session *s);

/* qb_session.c */
/* Queues a checked submission. */
void qb_enqueue(qb_submission *sub, qb_binding *b);
