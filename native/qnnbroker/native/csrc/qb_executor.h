/* SPDX-License-Identifier: Apache-2.0
 * The executor: native threads that take submissions, choose, execute and complete.
 *
 * A session submits a binding, through its ring or by a call; a worker executes the binding's runnable;
 * the completion goes back the way the submission came. Between the two nothing takes the GIL.
 *
 * Lifetimes. A submission counts on its binding and its session; both are freed by the owner (Python)
 * only after the executor said, with an event, that nothing counts on them any more. Counts drop
 * before the completion is posted, so whoever sees a completion may already release what it used.
 *
 * Threads: every function may be called from any thread; none calls back. One lock guards everything
 * and is never held across an execute. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "qb_runnable.h"

/* Bands of priority; each has its own workers, so a higher band runs beside a lower one. */
enum { QB_BAND_LOW, QB_BAND_NORMAL, QB_BAND_HIGH, QB_BANDS };

/* Completion codes; the same numbers as protos/status.py. Never renumber. */
enum qb_status {
    QB_OK = 0,
    QB_INVALID_ARGUMENT = 1,
    QB_BINDING_UNKNOWN = 2,
    QB_STALE_GENERATION = 3,
    QB_LEASE_REVOKED = 4,
    QB_CREDITS = 5,
    QB_NPU_MEMORY = 6,
    QB_DEADLINE_QUEUED = 7,
    QB_DEADLINE_RUNNING = 8,
    QB_CANCELLED = 9,
    QB_SESSION_CLOSED = 10,
    QB_NPU_RESTARTED = 11,
    QB_STOPPING = 12,
    QB_NPU_LOST = 13,
    QB_UNSUPPORTED = 14,
    QB_QNN_ERROR = 15,
    QB_BAD_SLOT = 16,
    QB_BINARY_VERSION = 17,
    QB_INTERNAL = 18,
};

typedef struct qb_executor qb_executor;
typedef struct qb_session qb_session;
typedef struct qb_binding qb_binding;

typedef struct qb_executor_config {
    uint32_t workers[QB_BANDS];  /* executes at a time, per band; 0 means 1 */
    uint32_t priority[QB_BANDS]; /* QNN priority of the band's executes */
    uint64_t spin_ns;       /* how long a worker looks for more before it sleeps; 0: never */
    uint64_t spin_limit_ns; /* no spinning after graphs whose median execute is longer */
    uint64_t ageing_ns;     /* a band kept waiting this long ... */
    uint64_t ageing_slice_ns; /* ... gets the device to itself this long; 0: no ageing */
} qb_executor_config;

/* What the owner must hear. Drained with qb_executor_drain after the event fd became readable. */
enum qb_event_kind {
    QB_EVENT_COMPLETED = 1, /* a submission made by qb_submit is done */
    QB_EVENT_BINDING_IDLE,  /* a dying or parked binding has nothing left: its runnable is unused */
    QB_EVENT_BINDING_PARKED_WANTED, /* a submission waits for this parked binding */
    QB_EVENT_SESSION_IDLE,          /* a closed session has nothing left: free it */
    QB_EVENT_SESSION_BROKEN,        /* its ring makes no sense: end the session */
    QB_EVENT_ACTIVE,                /* the submission that qb_executor_tell_next asked to hear of */
};

typedef struct qb_event {
    uint32_t kind;
    uint32_t status;     /* enum qb_status */
    uint64_t cookie;     /* of the binding or session */
    uint64_t ticket;     /* COMPLETED */
    uint64_t session;    /* COMPLETED: the session's id */
    uint64_t qnn_code;   /* COMPLETED with QB_QNN_ERROR and its relatives */
    uint64_t queue_ns;   /* submit to start */
    uint64_t execute_ns; /* inside the backend */
} qb_event;

typedef struct qb_session_stats {
    uint32_t in_flight;
    uint64_t run_count, error_count, device_ns;
    uint64_t queue_p50_ns, queue_p99_ns, execute_p50_ns, execute_p99_ns, total_p50_ns, total_p99_ns;
} qb_session_stats;

QB_EXPORT qb_executor *qb_executor_new(const qb_executor_config *config);
/* Starts the threads. 0 or an errno. */
QB_EXPORT int qb_executor_start(qb_executor *ex);
/* Completes what is queued as QB_STOPPING, waits for what runs, ends the threads. Idempotent. */
QB_EXPORT void qb_executor_stop(qb_executor *ex);
/* After stop, and after every session and binding was freed. */
QB_EXPORT void qb_executor_free(qb_executor *ex);
/* An eventfd, readable while events wait. */
QB_EXPORT int qb_executor_event_fd(qb_executor *ex);
QB_EXPORT size_t qb_executor_drain(qb_executor *ex, qb_event *out, size_t n);
/* Posts QB_EVENT_ACTIVE with the next submission of anybody, once. For owners that do something only
 * while there is work: they need not look again and again, and a run costs nothing more. */
QB_EXPORT void qb_executor_tell_next(qb_executor *ex);

/* weight: share of device time against others of the band, 1 is normal. max_in_flight 0: no limit
 * (then no ring). NULL: out of memory. */
QB_EXPORT qb_session *qb_session_new(qb_executor *ex, uint64_t id, uint64_t cookie, uint32_t weight,
                                     uint32_t max_in_flight);
/* Gives the session a ring. The memory stays the caller's and must outlive the session; doorbell is
 * the eventfd the client rings, bell the end we ring. 0 or an errno. */
QB_EXPORT int qb_session_open_ring(qb_session *s, const void *client_file, void *broker_file,
                                   uint32_t sq_slots, uint32_t cq_slots, int doorbell, int bell);
/* Cancels what is queued, lets what runs finish, then posts QB_EVENT_SESSION_IDLE. Idempotent. */
QB_EXPORT void qb_session_close(qb_session *s);
QB_EXPORT void qb_session_free(qb_session *s);
QB_EXPORT void qb_session_get_stats(qb_session *s, qb_session_stats *out);

QB_EXPORT qb_binding *qb_binding_new(qb_session *s, qb_runnable *runnable, uint32_t band,
                                     uint64_t cookie);
/* Lets the ring name the binding: id is (generation << 32) | (index + 1). 0 or an errno. */
QB_EXPORT int qb_binding_publish(qb_binding *b, uint64_t id);
/* Dying: refuses submissions, fails the queued ones with QB_LEASE_REVOKED, and posts
 * QB_EVENT_BINDING_IDLE when nothing uses it. Idempotent. */
QB_EXPORT void qb_binding_release(qb_binding *b);
/* Parks: submissions wait; QB_EVENT_BINDING_IDLE follows when nothing runs. False when dying. */
QB_EXPORT bool qb_binding_park(qb_binding *b);
/* Gives a parked binding its runnable back and lets the waiting submissions run. */
QB_EXPORT bool qb_binding_revive(qb_binding *b, qb_runnable *runnable);
/* The revival failed: the waiting submissions complete with `status`. It stays parked. */
QB_EXPORT void qb_binding_fail_waiting(qb_binding *b, uint32_t status, uint64_t qnn_code);
/* Does a submission wait for this parked binding? What an owner asks after
 * QB_EVENT_BINDING_PARKED_WANTED, which may have been answered by an earlier revival. */
QB_EXPORT bool qb_binding_is_wanted(qb_binding *b);
/* Does nothing use the runnable now? What an owner asks after QB_EVENT_BINDING_IDLE, since the
 * binding may have been revived meanwhile. */
QB_EXPORT bool qb_binding_is_idle(qb_binding *b);
/* The QNN code of its last execute that failed; 0 when none did. */
QB_EXPORT uint64_t qb_binding_last_error(qb_binding *b);
QB_EXPORT void qb_binding_free(qb_binding *b);

/* Queues one execute. deadline_ns on CLOCK_MONOTONIC, 0 for none. Returns QB_OK and completes later
 * by an event, or a status and nothing follows. */
QB_EXPORT uint32_t qb_submit(qb_binding *b, uint64_t ticket, uint64_t deadline_ns);
/* Cancels a queued submission made by qb_submit: true when it will complete as QB_CANCELLED. */
QB_EXPORT bool qb_cancel(qb_session *s, uint64_t ticket);

QB_EXPORT uint64_t qb_now_ns(void);
