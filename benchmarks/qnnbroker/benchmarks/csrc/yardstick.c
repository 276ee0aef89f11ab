/* SPDX-License-Identifier: Apache-2.0
 * The yardstick: what two processes need to reach one another, without any broker.
 *
 * One line on standard input asks for one measurement, and its times in ns come back as so many
 * 64-bit numbers on standard output:
 *   eventfd COUNT [NS]   news there and back, over two eventfds; the other side computes for NS
 *                        in between, which does not count
 *   socket BYTES COUNT   so many bytes there and so many back, over a Unix stream socket
 */
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void die(const char *what) {
    fprintf(stderr, "yardstick: %s: %s\n", what, strerror(errno));
    _exit(1);
}

/* Reads or writes all of it; false at the end of the file. */
static int all(int fd, char *data, size_t size, int writing) {
    while (size) {
        ssize_t n = writing ? write(fd, data, size) : read(fd, data, size);
        if (n == 0)
            return 0;
        if (n < 0) {
            if (errno == EINTR)
                continue;
            die(writing ? "write" : "read");
        }
        data += n;
        size -= (size_t)n;
    }
    return 1;
}

struct order {
    uint64_t is_socket, bytes, count, busy_ns;
};

static char *buffer(size_t size) {
    char *data = malloc(size ? size : 1);
    if (!data)
        die("malloc");
    memset(data, 1, size); /* its pages are there before the clock runs */
    return data;
}

/* The other process: does as ordered until the socket ends. */
static void answer(int ask, int tell, int peer) {
    struct order order;
    while (all(peer, (char *)&order, sizeof order, 0)) {
        char *data = buffer(order.bytes), ready = 1;
        all(peer, &ready, 1, 1);
        for (uint64_t i = 0; i < order.count; i++) {
            uint64_t value;
            if (order.is_socket) {
                if (!all(peer, data, order.bytes, 0))
                    _exit(0);
                all(peer, data, order.bytes, 1);
            } else {
                all(ask, (char *)&value, sizeof value, 0);
                uint64_t started = order.busy_ns ? now_ns() : 0;
                value = 0;
                while (value < order.busy_ns)
                    value = now_ns() - started;
                value++; /* how long it computed, and never 0, which would not wake anybody */
                all(tell, (char *)&value, sizeof value, 1);
            }
        }
        free(data);
    }
    _exit(0);
}

static void measure(const struct order *order, int ask, int tell, int peer) {
    uint64_t *times = malloc(order->count * sizeof *times);
    char *data = buffer(order->bytes), ready;
    if (!times)
        die("malloc");
    all(peer, (char *)order, sizeof *order, 1);
    all(peer, &ready, 1, 0);
    for (uint64_t i = 0; i < order->count; i++) {
        uint64_t started = now_ns(), value = 1;
        if (order->is_socket) {
            all(peer, data, order->bytes, 1);
            all(peer, data, order->bytes, 0);
        } else {
            all(ask, (char *)&value, sizeof value, 1);
            all(tell, (char *)&value, sizeof value, 0);
        }
        times[i] = now_ns() - started - (order->is_socket ? 0 : value - 1);
    }
    all(STDOUT_FILENO, (char *)times, order->count * sizeof *times, 1);
    free(data);
    free(times);
}

int main(void) {
    char line[128];
    int sockets[2], ask = eventfd(0, EFD_CLOEXEC), tell = eventfd(0, EFD_CLOEXEC);
    if (ask < 0 || tell < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) < 0)
        die("eventfd or socketpair");
    pid_t parent = getpid(), child = fork();
    if (child < 0)
        die("fork");
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* it may be waiting on an eventfd, which has no end */
        if (getppid() != parent)
            _exit(0);
        close(sockets[0]);
        answer(ask, tell, sockets[1]);
    }
    close(sockets[1]);
    while (fgets(line, sizeof line, stdin)) {
        unsigned long long bytes = 0, count = 0, busy_ns = 0;
        struct order order = {0};
        if (sscanf(line, "eventfd %llu %llu", &count, &busy_ns) >= 1)
            order = (struct order){.count = count, .busy_ns = busy_ns};
        else if (sscanf(line, "socket %llu %llu", &bytes, &count) == 2)
            order = (struct order){.is_socket = 1, .bytes = bytes, .count = count};
        else
            die("not an order");
        measure(&order, ask, tell, sockets[0]);
    }
    return 0;
}
