/* SPDX-License-Identifier: Apache-2.0
 * Drives qb_place.c with a clock and a scheduler of its own; test_place.py says what to do.
 *
 *   pass NS                       time goes by
 *   executed SHORT                an execute ends; a short one or not
 *   completed CORE HINT WOKEN     and is told to a client that says HINT
 *   sleeping FLAG, in_flight N, others N     of that client: its flag, and other sessions awake
 *   look NS                       how many ns it looks; something comes after NS, -1: nothing
 *   up NS                         the same; the client's flag goes down after NS, and nothing comes
 *   go                            where it goes: a core from 1, or 0
 *
 * look, up and go print a line each. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qb_executor_impl.h"

enum { CORES = 3, STEP_NS = 100 };

static uint64_t now = 1000000000000;
static cpu_set_t allowed, last_but_one;
static int settings;
static uint32_t core = 1;
static qb_client_file client;
static qb_session session = {.ring = {.client = &client}}, other;
static qb_executor ex = {.lock = PTHREAD_MUTEX_INITIALIZER, .spin_ns = 10000, .awake = &session};

uint64_t qb_now_ns(void) { return now; }

/* In place of the C library's. */
int sched_getcpu(void) { return (int)core - 1; }

int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t *set) {
    (void)pid;
    memcpy(set, &allowed, bytes);
    return 0;
}

int sched_setaffinity(pid_t pid, size_t bytes, const cpu_set_t *set) {
    (void)pid;
    last_but_one = allowed;
    memcpy(&allowed, set, bytes);
    settings++;
    return 0;
}

static long long look(long long comes_ns, long long up_ns) {
    uint64_t start = now;
    bool came = false;
    for (; !came && qb_place_looks(&ex, now); now += STEP_NS) {
        came = comes_ns >= 0 && now - start >= (uint64_t)comes_ns;
        if (up_ns >= 0 && now - start >= (uint64_t)up_ns)
            client.sleeping = 0;
    }
    qb_place_looked(&ex, came);
    return (long long)(now - start);
}

static int go(void) {
    settings = 0;
    pthread_mutex_lock(&ex.lock);
    qb_place_go(&ex);
    pthread_mutex_unlock(&ex.lock);
    if (!settings)
        return 0;
    if (settings != 2 || CPU_COUNT(&allowed) != CORES) {
        fprintf(stderr, "it may not run where it could before\n");
        exit(1);
    }
    for (int i = 0; i < CORES; i++)
        if (CPU_ISSET((size_t)i, &last_but_one))
            return (int)(core = (uint32_t)i + 1);
    return -1;
}

int main(int argc, char **argv) {
    for (int i = 0; i < CORES; i++)
        CPU_SET((size_t)i, &allowed);
    for (char **a = argv + 1; a < argv + argc; a++) {
        const char *what = *a;
        if (!strcmp(what, "pass")) {
            now += strtoull(*++a, NULL, 10);
        } else if (!strcmp(what, "executed")) {
            qb_place_executed(&ex, atoi(*++a), now);
        } else if (!strcmp(what, "completed")) {
            core = (uint32_t)atoi(*++a);
            client.core = (uint32_t)strtoul(*++a, NULL, 0);
            qb_place_completed(&ex, &session, core, atoi(*++a));
        } else if (!strcmp(what, "sleeping")) {
            client.sleeping = (uint32_t)atoi(*++a);
        } else if (!strcmp(what, "in_flight")) {
            session.in_flight = (uint32_t)atoi(*++a);
        } else if (!strcmp(what, "others")) {
            session.awake_next = atoi(*++a) ? &other : NULL;
        } else if (!strcmp(what, "look")) {
            printf("%lld\n", look(atoll(*++a), -1));
        } else if (!strcmp(what, "up")) {
            printf("%lld\n", look(-1, atoll(*++a)));
        } else if (!strcmp(what, "go")) {
            printf("%d\n", go());
        } else {
            fprintf(stderr, "what is %s?\n", what);
            return 1;
        }
    }
    return 0;
}
