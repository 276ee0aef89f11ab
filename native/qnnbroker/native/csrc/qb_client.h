/* SPDX-License-Identifier: Apache-2.0
 * The client's end of a session's rings: submit, wait, cancel, from any number of threads.
 *
 * One thread at a time reads completions (and sleeps on the bell) for all; the others wait for it.
 * The broker is not trusted either: indexes are checked, slots copied once. */
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "qb_ring.h"

#define QB_EXPORT __attribute__((visibility("default")))

/* A ticket is (sequence << 16) | (place in the table): at most 65536 in flight. */
enum qb_ticket_state { QB_TICKET_FREE, QB_TICKET_PENDING, QB_TICKET_DONE, QB_TICKET_ABANDONED };

typedef struct qb_ticket {
    uint64_t number;
    uint32_t state;
    bool watched;    /* somebody wants to hear of it by qb_client_take_watched */
    bool cancelling; /* a cancel was submitted for it */
    uint32_t next_free;
    uint64_t *median_ns; /* of the binding, in qb_client.median_ns */
    qb_cq_slot completion;
} qb_ticket;

/* Bindings that have a median of their own; more share them. */
enum { QB_CLIENT_MEDIANS = 64 };

typedef struct qb_client {
    pthread_mutex_t lock;
    pthread_cond_t progress; /* completions were taken, or the reader's place is free */
    bool reading;            /* a thread reads completions */
    bool lost;               /* the broker closed the bell, or its ring makes no sense */
    bool closed;             /* by us: nobody waits any more */
    bool armed;              /* an event loop wants the bell rung */
    bool reader_wants_room;  /* what the reader waits for may come without a completion */
    uint32_t reader_sleeps;  /* how, QB_SLEEPS_...; 0: it is awake */
    uint32_t room_waiters;
    qb_client_file *mine;
    const qb_broker_file *theirs;
    uint32_t sq_mask, cq_mask, sq_tail, cq_head;
    int doorbell, bell, wake; /* wake: our own eventfd, for whoever sleeps on the bell */
    uint32_t limit, in_flight, free_ticket;
    uint64_t sequence;
    uint64_t spin_ns, spin_limit_ns;
    uint64_t median_ns[QB_CLIENT_MEDIANS]; /* running medians of execute times, by binding */
    uint64_t wait_ns[QB_CLIENT_MEDIANS];   /* how long the last run was, with its time in the queue */
    uint32_t watched_done; /* completions of watched tickets not taken yet */
    qb_ticket *tickets;
} qb_client;

/* Results of the calls below, besides 0. */
#define QB_CLIENT_WOULD_BLOCK (-1)
#define QB_CLIENT_TIMED_OUT (-2)
#define QB_CLIENT_INTERRUPTED (-3)
#define QB_CLIENT_LOST (-4)
#define QB_CLIENT_UNKNOWN (-5)
#define QB_CLIENT_CLOSED (-6)

/* NULL: out of memory, or the broker's file is not of this ABI (errno EPROTO). The memory and fds
 * stay the caller's. limit: in flight at most; not more than the slots of either ring. */
QB_EXPORT qb_client *qb_client_new(void *client_file, uint64_t client_bytes, const void *broker_file,
                                   uint64_t broker_bytes, int doorbell, int bell, uint32_t limit,
                                   uint64_t spin_ns, uint64_t spin_limit_ns);
/* When no call is under way. Never in the child of a fork: what other threads held is held there for
 * ever. */
QB_EXPORT void qb_client_free(qb_client *c);
/* Ends the waits under way with QB_CLIENT_CLOSED. Idempotent. */
QB_EXPORT void qb_client_close(qb_client *c);

/* Submits one execute of a binding; never sleeps. watched: for an event loop. */
QB_EXPORT int qb_client_submit(qb_client *c, uint64_t binding, uint64_t deadline_ns, bool watched,
                               uint64_t *ticket);
/* Waits for a completion and takes it. timeout_ns < 0: for ever. */
QB_EXPORT int qb_client_wait(qb_client *c, uint64_t ticket, int64_t timeout_ns, qb_cq_slot *out);
/* Waits until a ticket is free, or time is up. */
QB_EXPORT int qb_client_wait_room(qb_client *c, int64_t timeout_ns);
/* Asks for a queued submission not to run; its completion says what happened. Cancels take no slot
 * that an execute may need, so an execute with a free ticket always fits. */
QB_EXPORT int qb_client_cancel(qb_client *c, uint64_t ticket);
/* Nobody will wait for it: the ticket is free once its completion has come. */
QB_EXPORT void qb_client_abandon(qb_client *c, uint64_t ticket);
/* Reads what has come, without sleeping, and makes the bell ring for what comes next. Takes up to n
 * completions of watched tickets; how many, or QB_CLIENT_LOST. */
QB_EXPORT int qb_client_take_watched(qb_client *c, qb_cq_slot *out, uint32_t n);
/* No event loop listens any more. */
QB_EXPORT void qb_client_unwatch(qb_client *c);
QB_EXPORT uint32_t qb_client_in_flight(qb_client *c);
QB_EXPORT bool qb_client_lost(qb_client *c);
