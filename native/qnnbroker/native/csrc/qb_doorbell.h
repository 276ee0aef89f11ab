/* SPDX-License-Identifier: Apache-2.0
 * Doorbells: "look at the ring", without data. Together with fds and region the only place with calls
 * that exist on Linux alone.
 *
 * Client to broker: an eventfd in an edge-triggered epoll; the broker never reads it. Broker to
 * client: a pipe whose write end only the broker holds, never blocking; full means already rung. (An
 * eventfd towards the client would let it block the broker: it can make the shared description
 * blocking and fill the counter.) */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

/* An eventfd, CLOEXEC and non-blocking; -1 and errno. */
QB_EXPORT int qb_doorbell_new(void);
/* A pipe, CLOEXEC: ends[0] for the client, ends[1] non-blocking for the broker. 0, or -1 and errno. */
QB_EXPORT int qb_pipe_new(int ends[2]);
/* Rings either kind; never blocks. */
void qb_doorbell_ring(int fd);
void qb_pipe_ring(int fd);

/* What a leader waits on. */
int qb_waiter_new(void);
int qb_waiter_add(int waiter, int doorbell, uint64_t key);
void qb_waiter_remove(int waiter, int doorbell);
/* Up to n keys of doorbells that rang; timeout_ns < 0 waits for ever. EINTR is an empty wake. */
int qb_waiter_wait(int waiter, uint64_t *keys, int n, int64_t timeout_ns);

/* Waits for the pipe to be rung and empties it. wake: an eventfd that ends the wait too, and is
 * emptied; -1 for none. timeout_ns < 0 waits for ever. */
enum qb_pipe_news {
    QB_PIPE_TIMED_OUT,
    QB_PIPE_RUNG,
    QB_PIPE_WOKEN,
    QB_PIPE_INTERRUPTED, /* by a signal */
    QB_PIPE_CLOSED,      /* by the broker */
};
enum qb_pipe_news qb_pipe_wait(int fd, int wake, int64_t timeout_ns);
