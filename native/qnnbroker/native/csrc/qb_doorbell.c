/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "qb_doorbell.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "qb_ring.h"

int qb_doorbell_new(void) { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }

int qb_bell_new(int ends[2]) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
        return -1;
    /* Nothing comes from the client: what it sends would only be kept for it. */
    shutdown(ends[1], SHUT_RD);
    return 0;
}

void qb_doorbell_ring(int fd) {
    uint64_t one = 1;
    /* EAGAIN: the counter is full, so it rings already. */
    if (write(fd, &one, sizeof one) < 0) {
    }
}

void qb_bell_ring(int fd) {
    char one = 1;
    /* EAGAIN: full, so it rings already. EPIPE: the client is gone; its session ends elsewhere. */
    if (send(fd, &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    }
}

void qb_client_wake(uint32_t asleep, int bell, const uint32_t *tail) {
    if (asleep & QB_SLEEPS_ON_BELL)
        qb_bell_ring(bell);
    if (asleep & QB_SLEEPS_ON_TAIL)
        qb_nap_end(tail);
}

int qb_waiter_new(void) { return epoll_create1(EPOLL_CLOEXEC); }

int qb_waiter_add(int waiter, int doorbell, uint64_t key) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = key};
    return epoll_ctl(waiter, EPOLL_CTL_ADD, doorbell, &event);
}

void qb_waiter_remove(int waiter, int doorbell) {
    epoll_ctl(waiter, EPOLL_CTL_DEL, doorbell, NULL);
}

int qb_waiter_wait(int waiter, uint64_t *keys, int n, int64_t timeout_ns) {
    struct epoll_event events[64];
    int timeout_ms = timeout_ns < 0 ? -1 : (int)((timeout_ns + 999999) / 1000000);
    int got = epoll_wait(waiter, events, n < 64 ? n : 64, timeout_ms);
    for (int i = 0; i < got; i++)
        keys[i] = events[i].data.u64;
    return got < 0 ? 0 : got;
}

enum qb_bell_news qb_bell_wait(int fd, int wake, int64_t timeout_ns) {
    char rung[512];
    struct pollfd p[2] = {{.fd = fd, .events = POLLIN}, {.fd = wake, .events = POLLIN}};
    struct timespec ts = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    int ready = ppoll(p, 2, timeout_ns < 0 ? NULL : &ts, NULL);
    if (ready == 0)
        return QB_BELL_TIMED_OUT;
    if (ready < 0)
        return errno == EINTR ? QB_BELL_INTERRUPTED : QB_BELL_CLOSED;
    if (!p[0].revents) {
        uint64_t count;
        return read(wake, &count, sizeof count) < 0 && errno == EINTR ? QB_BELL_INTERRUPTED
                                                                      : QB_BELL_WOKEN;
    }
    ssize_t got = read(fd, rung, sizeof rung);
    if (got > 0)
        return QB_BELL_RUNG;
    if (got < 0 && errno == EINTR)
        return QB_BELL_INTERRUPTED;
    return got < 0 && errno == EAGAIN ? QB_BELL_RUNG : QB_BELL_CLOSED;
}

bool qb_nap(const uint32_t *word, uint32_t value, uint64_t ns) {
    struct timespec ts = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    return !syscall(SYS_futex, word, FUTEX_WAIT, value, &ts, NULL, 0) || errno != EINTR;
}

void qb_nap_end(const uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0); }
