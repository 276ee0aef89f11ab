/* SPDX-License-Identifier: Apache-2.0
 * The executor under stress: clients over rings and by calls, all bands, graphs shared, priorities set,
 * bindings parked, revived and released, sessions closed, against runnables that only keep books.
 *
 *   executor_stress SUBMISSIONS SESSIONS SPIN_NS SEED
 *
 * SUBMISSIONS is of each session. Every submission completes once; what completed as done was executed
 * once; no binding executes twice at a time, and no priority is set while its graph runs. Prints "ok"
 * and counts; something that is never woken ends it by SIGALRM. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "qb_client.h"
#include "qb_counters.h"
#include "qb_doorbell.h"
#include "qb_executor.h"

#define DIE(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))
enum { MAX_SESSIONS = 16, BINDINGS = 6, GRAPHS = 4, LIMIT = 8, SLOTS = 8, STUCK_SECONDS = 60 };
enum { CALLED = BINDINGS - 1 }; /* the binding that is submitted by calls */

typedef struct graph {
    qb_graph native; /* first */
    uint32_t running, priority_sets;
} graph;

typedef struct session session;

typedef struct binding {
    qb_runnable runnable; /* first */
    session *session;
    qb_binding *native;
    uint32_t running;
    uint64_t executed, random;
    bool released;
} binding;

struct session {
    qb_session *native;
    qb_client *client;
    binding bindings[BINDINGS];
    pthread_t thread;
    int doorbell, bells[2];
    void *client_file, *broker_file;
    uint64_t done[32]; /* completions of the ring, by status */
    uint64_t calls, calls_done[32];
    bool idle;
};

static uint64_t submissions, spin_ns, seed;
static uint32_t session_count, clients_left;
static session sessions[MAX_SESSIONS];
static graph graphs[GRAPHS];
static qb_executor *executor;

static uint32_t next_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)((x ^ (x >> 27)) >> 16);
}

static void nap(long ns) {
    struct timespec ts = {0, ns};
    nanosleep(&ts, NULL);
}

/* ---- what is executed ------------------------------------------------------------------------- */

static uint64_t execute(qb_runnable *self) {
    binding *b = (binding *)self;
    graph *g = (graph *)b->runnable.graph;
    if (__atomic_fetch_add(&b->running, 1, __ATOMIC_SEQ_CST))
        DIE("a binding executes twice at a time");
    __atomic_fetch_add(&g->running, 1, __ATOMIC_SEQ_CST);
    uint32_t chance = next_random(&b->random) % 64; /* only one thread at a time is here */
    if (chance == 0)
        nap(300000);
    else if (chance < 4)
        nap(1000);
    b->executed++;
    __atomic_fetch_sub(&g->running, 1, __ATOMIC_SEQ_CST);
    __atomic_fetch_sub(&b->running, 1, __ATOMIC_SEQ_CST);
    return chance == 63 ? 1100 : 0;
}

static uint64_t set_priority(qb_graph *self, uint32_t priority) {
    graph *g = (graph *)self;
    (void)priority;
    if (__atomic_load_n(&g->running, __ATOMIC_SEQ_CST))
        DIE("a priority is set while its graph runs");
    __atomic_fetch_add(&g->priority_sets, 1, __ATOMIC_RELAXED);
    return 0;
}

/* ---- clients ---------------------------------------------------------------------------------- */

static void *run_client(void *arg) {
    session *s = arg;
    uint64_t random = seed * 77 + (uint64_t)(s - sessions), sent = 0, taken = 0;
    uint64_t flying[LIMIT];
    uint32_t count = 0;
    while (taken < submissions) {
        while (count < LIMIT && sent < submissions && (count == 0 || next_random(&random) % 4)) {
            uint32_t which = next_random(&random) % CALLED;
            uint64_t deadline = next_random(&random) % 16 ? 0 : 1;
            uint64_t id = (uint64_t)1 << 32 | (which + 1);
            if (qb_client_submit(s->client, id, deadline, false, &flying[count]))
                DIE("no room for a submission");
            sent++;
            if (next_random(&random) % 8 == 0)
                qb_client_cancel(s->client, flying[count]);
            count++;
        }
        uint32_t at = next_random(&random) % count;
        qb_cq_slot slot;
        int result = qb_client_wait(s->client, flying[at], -1, &slot);
        if (result || slot.ticket != flying[at] || slot.status >= 32)
            DIE("a wait ended with %d", result);
        s->done[slot.status]++;
        flying[at] = flying[--count];
        taken++;
    }
    __atomic_fetch_sub(&clients_left, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* ---- the owner -------------------------------------------------------------------------------- */

static void look_after(binding *b) {
    if (!b->native)
        return;
    if (b->released && qb_binding_is_idle(b->native)) {
        qb_binding_free(b->native);
        b->native = NULL;
    } else if (!b->released && qb_binding_is_wanted(b->native)) {
        qb_binding_revive(b->native, &b->runnable); /* refused while it runs: idle is told then */
    }
}

static void drain(void) {
    qb_event events[16];
    for (size_t n = 16; n == 16;) {
        n = qb_executor_drain(executor, events, 16);
        for (size_t i = 0; i < n; i++) {
            qb_event *e = &events[i];
            if (e->kind == QB_EVENT_COMPLETED)
                sessions[e->session - 1].calls_done[e->status]++;
            else if (e->kind == QB_EVENT_SESSION_IDLE)
                ((session *)e->cookie)->idle = true;
            else if (e->kind == QB_EVENT_SESSION_BROKEN)
                DIE("a ring makes no sense");
            else if (e->kind != QB_EVENT_ACTIVE)
                look_after((binding *)e->cookie);
        }
    }
}

static void wait_events(int milliseconds) {
    struct pollfd p = {.fd = qb_executor_event_fd(executor), .events = POLLIN};
    if (poll(&p, 1, milliseconds) < 0 && errno != EINTR)
        DIE("poll: %s", strerror(errno));
    drain();
}

static void own(void) {
    uint64_t random = seed * 13 + 5, ticket = 1;
    while (__atomic_load_n(&clients_left, __ATOMIC_SEQ_CST)) {
        session *s = &sessions[next_random(&random) % session_count];
        binding *b = &s->bindings[next_random(&random) % BINDINGS];
        uint32_t chance = next_random(&random) % 8;
        if (chance == 0) {
            qb_binding_park(b->native);
        } else if (chance == 1) {
            qb_binding_fail_waiting(b->native, QB_NPU_RESTARTED, 1007);
        } else if (chance < 6) {
            /* By calls: together with the ring it may be more than the session may have. */
            uint32_t status = qb_submit(s->bindings[CALLED].native, ticket, 0);
            if (status == QB_OK)
                s->calls++;
            else if (status != QB_CREDITS)
                DIE("a call was refused with %u", status);
            if (status == QB_OK && chance == 5)
                qb_cancel(s->native, ticket);
            ticket++;
        } else if (chance == 6) {
            qb_executor_tell_next(executor);
            qb_session_stats stats;
            qb_session_get_stats(s->native, &stats);
        }
        wait_events(next_random(&random) % 2);
    }
}

static void close_all(void) {
    for (uint32_t n = 0; n < session_count; n++) {
        session *s = &sessions[n];
        for (int i = 0; i < BINDINGS; i++) {
            s->bindings[i].released = true;
            qb_binding_release(s->bindings[i].native);
        }
        qb_session_close(s->native);
        while (!s->idle)
            wait_events(1000);
        qb_session_free(s->native);
        qb_client_close(s->client);
        qb_client_free(s->client);
    }
    qb_executor_stop(executor);
    qb_executor_free(executor);
}

static void open_session(uint32_t n) {
    session *s = &sessions[n];
    uint64_t sizes[2] = {qb_client_file_bytes(2 * SLOTS), qb_broker_file_bytes(SLOTS)};
    s->client_file = aligned_alloc(4096, (sizes[0] + 4095) & ~4095ull);
    s->broker_file = aligned_alloc(4096, (sizes[1] + 4095) & ~4095ull);
    memset(s->client_file, 0, sizes[0]);
    memset(s->broker_file, 0, sizes[1]);
    s->doorbell = qb_doorbell_new();
    s->native = qb_session_new(executor, n + 1, (uint64_t)s, 1 + n % 3, LIMIT);
    if (s->doorbell < 0 || qb_bell_new(s->bells) < 0 || !s->native ||
        qb_session_open_ring(s->native, s->client_file, s->broker_file, 2 * SLOTS, SLOTS,
                             s->doorbell, s->bells[1]))
        DIE("a session: %s", strerror(errno));
    for (int i = 0; i < BINDINGS; i++) {
        binding *b = &s->bindings[i];
        b->session = s;
        b->random = seed + n * 100 + (uint64_t)i;
        b->runnable = (qb_runnable){&graphs[(n + (uint32_t)i) % GRAPHS].native, execute};
        b->native = qb_binding_new(s->native, &b->runnable, (uint32_t)i % QB_BANDS, (uint64_t)b);
        if (!b->native || qb_binding_publish(b->native, (uint64_t)1 << 32 | (uint64_t)(i + 1)))
            DIE("a binding");
    }
    s->client = qb_client_new(s->client_file, sizes[0], s->broker_file, sizes[1], s->doorbell,
                              s->bells[0], LIMIT, spin_ns, 50000);
    if (!s->client)
        DIE("a client: %s", strerror(errno));
}

static void check(void) {
    uint64_t executed = 0, wanted = 0, done = 0, calls = 0, late = 0, cancelled = 0;
    for (uint32_t n = 0; n < session_count; n++) {
        session *s = &sessions[n];
        for (int i = 0; i < BINDINGS; i++)
            executed += s->bindings[i].executed;
        wanted += submissions + s->calls;
        for (uint32_t status = 0; status < 32; status++) {
            uint64_t count = s->done[status] + s->calls_done[status];
            done += count;
            if (status == QB_OK || status == QB_QNN_ERROR)
                calls += count;
            else if (count && status != QB_DEADLINE_QUEUED && status != QB_CANCELLED &&
                     status != QB_NPU_RESTARTED && status != QB_CREDITS &&
                     status != QB_LEASE_REVOKED)
                DIE("%llu completions of status %u", (unsigned long long)count, status);
        }
        late += s->done[QB_DEADLINE_QUEUED];
        cancelled += s->done[QB_CANCELLED] + s->calls_done[QB_CANCELLED];
    }
    if (done != wanted || executed != calls)
        DIE("%llu submissions, %llu completions; %llu executes, %llu done",
            (unsigned long long)wanted, (unsigned long long)done, (unsigned long long)executed,
            (unsigned long long)calls);
    if (qb_counter_value(QB_COUNT_SUBMISSION) || qb_counter_value(QB_COUNT_BINDING) ||
        qb_counter_value(QB_COUNT_SESSION) || qb_counter_value(QB_COUNT_RING))
        DIE("something is left");
    printf("ok %llu submissions, %llu late, %llu cancelled\n", (unsigned long long)wanted,
           (unsigned long long)late, (unsigned long long)cancelled);
}

int main(int argc, char **argv) {
    if (argc != 5)
        DIE("see the head of the file");
    submissions = strtoull(argv[1], NULL, 10);
    session_count = (uint32_t)atoi(argv[2]);
    spin_ns = strtoull(argv[3], NULL, 10);
    seed = strtoull(argv[4], NULL, 10);
    if (!session_count || session_count > MAX_SESSIONS)
        DIE("1 to %d sessions", MAX_SESSIONS);
    qb_executor_config config = {.workers = {1, 2, 1},
                                 .priority = {0, 100, 200},
                                 .spin_ns = spin_ns,
                                 .spin_limit_ns = 50000,
                                 .ageing_ns = 3000000,
                                 .ageing_slice_ns = 500000};
    alarm(STUCK_SECONDS);
    for (int i = 0; i < GRAPHS; i++)
        graphs[i].native.set_priority = i ? set_priority : NULL;
    executor = qb_executor_new(&config);
    if (!executor || qb_executor_start(executor))
        DIE("the executor");
    for (uint32_t n = 0; n < session_count; n++)
        open_session(n);
    clients_left = session_count;
    for (uint32_t n = 0; n < session_count; n++)
        if (pthread_create(&sessions[n].thread, NULL, run_client, &sessions[n]))
            DIE("a thread");
    own();
    for (uint32_t n = 0; n < session_count; n++)
        pthread_join(sessions[n].thread, NULL);
    close_all();
    check();
    return 0;
}
