/* SPDX-License-Identifier: Apache-2.0
 * Doorbells: "look at the ring", without data. Together with fds and region the only place with calls
 * that exist on Linux alone.
 *
 * Client to broker, the doorbell: an eventfd in an edge-triggered epoll; the broker never reads it.
 * Broker to client, the bell: a pair of stream sockets, of which the broker sends on its own without
 * ever blocking; full means already rung. Nothing else would do. An eventfd is one description for
 * both, which the client can make blocking and fill. A pipe has a lock that a client can keep, with a
 * splice(2) into a socket that is full: O_NONBLOCK does not help a writer that waits for that.
 *
 * A client that waits for a short execute sleeps on the ring itself, by futex: one call less, and another
 * core. Whoever writes into a socket or pipe tells the kernel "I sleep soon", and the one that reads is
 * woken on the writer's core, where neither can look while the other one works, and which the library's
 * own threads have not left yet. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

/* An eventfd, CLOEXEC and non-blocking; -1 and errno. */
QB_EXPORT int qb_doorbell_new(void);
/* A bell, CLOEXEC: ends[0] for the client, ends[1] for the broker. 0, or -1 and errno. */
QB_EXPORT int qb_bell_new(int ends[2]);
/* Rings either kind; never blocks. */
void qb_doorbell_ring(int fd);
void qb_bell_ring(int fd);
/* Wakes a client that sleeps so (QB_SLEEPS_...): by its bell, by the tail of the completions, by both. */
void qb_client_wake(uint32_t asleep, int bell, const uint32_t *tail);

/* What a leader waits on. */
int qb_waiter_new(void);
int qb_waiter_add(int waiter, int doorbell, uint64_t key);
void qb_waiter_remove(int waiter, int doorbell);
/* Up to n keys of doorbells that rang; timeout_ns < 0 waits for ever. EINTR is an empty wake. */
int qb_waiter_wait(int waiter, uint64_t *keys, int n, int64_t timeout_ns);

/* Waits for the bell to be rung and empties it. wake: an eventfd that ends the wait too, and is
 * emptied; -1 for none. timeout_ns < 0 waits for ever. */
enum qb_bell_news {
    QB_BELL_TIMED_OUT,
    QB_BELL_RUNG,
    QB_BELL_WOKEN,
    QB_BELL_INTERRUPTED, /* by a signal */
    QB_BELL_CLOSED,      /* by the broker */
};
enum qb_bell_news qb_bell_wait(int fd, int wake, int64_t timeout_ns);

/* Sleeps while *word is `value`, until somebody ends that (from any process that maps the same memory)
 * or time is up; false: a signal came. */
bool qb_nap(const uint32_t *word, uint32_t value, uint64_t ns);
void qb_nap_end(const uint32_t *word);
