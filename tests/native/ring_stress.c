/* SPDX-License-Identifier: Apache-2.0
 * A session's rings under stress: client threads over qb_client.c against a broker over qb_ring.h, in
 * two threads or in two processes, with real doorbells.
 *
 *   ring_stress {threads|processes} MESSAGES CLIENT_THREADS LIMIT CLIENT_SPIN_NS BROKER_SPINS SEED
 *
 * Every message carries its thread's next number and comes back with a sum over it, so that a lost,
 * doubled, reordered or torn one is seen. Some are cancelled, some abandoned. Prints "ok" and counts; a
 * lost wake-up ends it by SIGALRM. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "qb_client.h"
#include "qb_doorbell.h"

#define DIE(...) (fprintf(stderr, __VA_ARGS__), fputc('\n', stderr), exit(1))
#define CANCELLED 9u
enum { MAX_THREADS = 8, STUCK_SECONDS = 30 };
/* Where the indexes start, so that they wrap soon. */
#define START ((uint32_t)-1000)

static uint64_t messages, client_spin_ns;
static uint32_t thread_count, limit, broker_spins, seed;
static int doorbell, bell_ends[2];
static qb_client_file *client_file;
static qb_broker_file *broker_file;
static uint32_t slots;

static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u;
    return x ^ (x >> 29);
}
static uint32_t next_random(uint64_t *state) {
    *state = mixed(*state + 0x632be59bd9b4e019u);
    return (uint32_t)(*state >> 32);
}

/* ---- the broker ------------------------------------------------------------------------------- */

typedef struct broker {
    qb_ring ring;
    qb_sq_slot queued[65536];
    uint32_t count;
    uint64_t next[MAX_THREADS]; /* number expected of each client thread */
    uint64_t taken, completed, cancelled, naps, bells, tails, random;
} broker;

static void complete(broker *b, uint32_t at, uint32_t status) {
    qb_sq_slot s = b->queued[at];
    qb_cq_slot done = {.ticket = s.ticket,
                       .status = status,
                       .queue_ns = s.deadline_ns,
                       .execute_ns = mixed(s.binding),
                       .copied_bytes = ~s.ticket};
    memmove(&b->queued[at], &b->queued[at + 1], (b->count - at - 1) * sizeof s);
    b->count--;
    if (!qb_ring_push(&b->ring, &done))
        DIE("the completion ring is full after %llu", (unsigned long long)b->completed);
    b->completed++;
    uint32_t asleep = qb_ring_client_sleeps(&b->ring);
    b->bells += (asleep & QB_SLEEPS_ON_BELL) != 0;
    b->tails += (asleep & QB_SLEEPS_ON_TAIL) != 0;
    qb_client_wake(asleep, bell_ends[1], &broker_file->cq_tail);
}

static void take(broker *b) {
    qb_sq_slot s;
    qb_ring_pop(&b->ring, &s);
    if (s.flags & QB_SUBMIT_CANCEL) {
        for (uint32_t i = 0; i < b->count; i++)
            if (b->queued[i].ticket == s.ticket) {
                b->cancelled++;
                complete(b, i, CANCELLED);
                break;
            }
        return;
    }
    uint32_t thread = (uint32_t)(s.binding >> 56);
    uint64_t number = s.binding & 0xffffffffffffffu;
    if (thread >= thread_count || number != b->next[thread] || s.flags || s.reserved)
        DIE("thread %u: message %llu wanted, %llu found", thread,
            (unsigned long long)b->next[thread], (unsigned long long)number);
    b->next[thread]++;
    b->taken++;
    b->queued[b->count++] = s;
}

/* Takes what waits; whether there was anything. */
static bool drain(broker *b) {
    int64_t n = qb_ring_waiting(&b->ring);
    if (n < 0)
        DIE("the submissions' tail makes no sense");
    for (int64_t i = 0; i < n; i++)
        take(b);
    if (n)
        qb_ring_release(&b->ring);
    return n > 0;
}

static void *run_broker(void *arg) {
    broker *b = arg;
    int waiter = qb_waiter_new();
    uint64_t key;
    if (waiter < 0 || qb_waiter_add(waiter, doorbell, 1) < 0)
        DIE("epoll: %s", strerror(errno));
    while (b->completed < messages) {
        bool news = drain(b);
        /* Completes some, in another order now and then; all when there is nothing else to do. */
        while (b->count && (!news || next_random(&b->random) % 4))
            complete(b, next_random(&b->random) % 16 ? 0 : b->count - 1, 0);
        if (news || b->count || b->completed == messages)
            continue;
        for (uint32_t i = 0; i < broker_spins && !news; i++) {
            qb_cpu_relax();
            news = qb_ring_waiting(&b->ring) != 0;
        }
        if (news)
            continue;
        qb_store_relaxed(&b->ring.broker->sleeping, 1);
        qb_full_fence();
        if (!qb_ring_waiting(&b->ring)) {
            b->naps++;
            qb_waiter_wait(waiter, &key, 1, -1);
        }
        qb_store_relaxed(&b->ring.broker->sleeping, 0);
        qb_full_fence();
    }
    close(waiter);
    return NULL;
}

/* ---- the client ------------------------------------------------------------------------------- */

typedef struct flight {
    uint64_t ticket, binding;
    bool cancelled;
} flight;

static qb_client *client;
static uint64_t abandoned_count, cancelled_seen;

static void check(const flight *f, const qb_cq_slot *done) {
    bool good = done->status == 0 || (done->status == CANCELLED && f->cancelled);
    if (!good || done->ticket != f->ticket || done->execute_ns != mixed(f->binding) ||
        done->copied_bytes != ~f->ticket || done->queue_ns != mixed(f->binding + 1))
        DIE("completion of %llx is not its own", (unsigned long long)f->binding);
    if (done->status)
        __atomic_fetch_add(&cancelled_seen, 1, __ATOMIC_RELAXED);
}

static void wait_for(const flight *f, bool look_first) {
    qb_cq_slot done;
    int result = look_first ? qb_client_wait(client, f->ticket, 0, &done) : QB_CLIENT_TIMED_OUT;
    while (result == QB_CLIENT_TIMED_OUT || result == QB_CLIENT_INTERRUPTED)
        result = qb_client_wait(client, f->ticket, -1, &done);
    if (result)
        DIE("waiting gave %d", result);
    check(f, &done);
}

static void *run_client(void *arg) {
    uint64_t thread = (uint64_t)(uintptr_t)arg, count = messages / thread_count;
    uint64_t random = seed + thread * 77;
    uint32_t own = limit / thread_count ? limit / thread_count : 1, first = 0, flying = 0;
    flight *f = calloc(own, sizeof *f);
    for (uint64_t n = 0; n < count || flying;) {
        flight *next = &f[(first + flying) % own];
        if (n < count && flying < own) {
            *next = (flight){.binding = thread << 56 | n};
            int result = qb_client_submit(client, next->binding, mixed(next->binding + 1), false,
                                          &next->ticket);
            if (result == QB_CLIENT_WOULD_BLOCK) {
                /* Not while we hold what others wait for. */
                if (!flying) {
                    result = qb_client_wait_room(client, -1);
                    if (result && result != QB_CLIENT_INTERRUPTED)
                        DIE("waiting for room gave %d", result);
                    continue;
                }
            } else if (result) {
                DIE("a submission gave %d", result);
            } else {
                n++;
                flying++;
                if (next_random(&random) % 64 == 0)
                    next->cancelled = qb_client_cancel(client, next->ticket) == 0;
                if (next_random(&random) % 4)
                    continue;
            }
        }
        if (next_random(&random) % 256 == 0) {
            qb_client_abandon(client, f[first].ticket);
            __atomic_fetch_add(&abandoned_count, 1, __ATOMIC_RELAXED);
        } else {
            wait_for(&f[first], next_random(&random) % 8 == 0);
        }
        first = (first + 1) % own;
        flying--;
    }
    free(f);
    return NULL;
}

static void run_clients(void) {
    pthread_t threads[MAX_THREADS];
    client = qb_client_new(client_file, qb_client_file_bytes(2 * slots), broker_file,
                           qb_broker_file_bytes(slots), doorbell, bell_ends[0], limit,
                           client_spin_ns, UINT64_MAX);
    if (!client)
        DIE("no client: %s", strerror(errno));
    client->sq_tail = client->cq_head = START;
    for (uint64_t i = 0; i < thread_count; i++)
        if (pthread_create(&threads[i], NULL, run_client, (void *)(uintptr_t)i))
            DIE("no thread");
    for (uint32_t i = 0; i < thread_count; i++)
        pthread_join(threads[i], NULL);
    /* What was abandoned comes still, or has: no ticket is left. */
    qb_cq_slot none;
    while (qb_client_in_flight(client))
        qb_client_take_watched(client, &none, 1);
    qb_client_free(client);
}

static void on_alarm(int signal) {
    static const char text[] = "stuck: a wake-up was lost\n";
    if (write(2, text, sizeof text - 1) < 0) {
    }
    _exit(2);
}

/* Any progress of either side puts the alarm off; looked at by a thread of its own. */
static void *watch(void *arg) {
    uint32_t before = 0;
    for (;;) {
        uint32_t now = qb_load_relaxed(&client_file->sq_tail) ^
                       qb_load_relaxed(&client_file->cq_head) << 16 ^
                       qb_load_relaxed(&broker_file->cq_tail);
        if (now != before)
            alarm(STUCK_SECONDS);
        before = now;
        sleep(1);
    }
    return arg;
}

int main(int argc, char **argv) {
    if (argc != 8)
        DIE("see the head of the file");
    bool processes = !strcmp(argv[1], "processes");
    messages = strtoull(argv[2], NULL, 10);
    thread_count = (uint32_t)atoi(argv[3]);
    limit = (uint32_t)atoi(argv[4]);
    client_spin_ns = strtoull(argv[5], NULL, 10);
    broker_spins = (uint32_t)atoi(argv[6]);
    seed = (uint32_t)atoi(argv[7]);
    if (!thread_count || thread_count > MAX_THREADS || messages % thread_count)
        DIE("1 to %d threads that divide the messages", MAX_THREADS);
    for (slots = 1; slots < limit;)
        slots *= 2;
    int files[2] = {memfd_create("submissions", MFD_CLOEXEC), memfd_create("completions", MFD_CLOEXEC)};
    uint64_t sizes[2] = {qb_client_file_bytes(2 * slots), qb_broker_file_bytes(slots)};
    void *maps[2];
    for (int i = 0; i < 2; i++) {
        if (files[i] < 0 || ftruncate(files[i], (off_t)sizes[i]) < 0)
            DIE("memory: %s", strerror(errno));
        maps[i] = mmap(NULL, sizes[i], PROT_READ | PROT_WRITE, MAP_SHARED, files[i], 0);
        if (maps[i] == MAP_FAILED)
            DIE("mmap: %s", strerror(errno));
    }
    client_file = maps[0];
    broker_file = maps[1];
    doorbell = qb_doorbell_new();
    if (doorbell < 0 || qb_bell_new(bell_ends) < 0)
        DIE("doorbells: %s", strerror(errno));
    broker *b = calloc(1, sizeof *b);
    b->random = seed + 1;
    qb_ring_init(&b->ring, client_file, broker_file, 2 * slots, slots);
    b->ring.sq_head = b->ring.cq_tail = broker_file->sq_head = broker_file->cq_tail = START;
    client_file->sq_tail = client_file->cq_head = START;
    pthread_t thread, watcher;
    signal(SIGALRM, on_alarm);
    alarm(STUCK_SECONDS);
    if (processes) {
        pid_t child = fork();
        if (child == 0) {
            close(bell_ends[1]);
            mprotect(broker_file, sizes[1], PROT_READ);
            alarm(STUCK_SECONDS);
            pthread_create(&watcher, NULL, watch, NULL);
            run_clients();
            printf("abandoned %llu cancelled %llu\n", (unsigned long long)abandoned_count,
                   (unsigned long long)cancelled_seen);
            fflush(stdout);
            _exit(0);
        }
        mprotect(client_file, sizes[0], PROT_READ);
        pthread_create(&watcher, NULL, watch, NULL);
        run_broker(b);
        int status = 0;
        if (waitpid(child, &status, 0) != child || status)
            DIE("the client ended with %#x", status);
    } else {
        pthread_create(&watcher, NULL, watch, NULL);
        pthread_create(&thread, NULL, run_broker, b);
        run_clients();
        pthread_join(thread, NULL);
    }
    if (b->taken != messages || b->completed != messages || b->count)
        DIE("%llu messages, %llu completed", (unsigned long long)b->taken,
            (unsigned long long)b->completed);
    printf("ok %llu messages, %llu cancelled, %llu naps of the broker; the client slept on its bell %llu "
           "times, on the tail %llu times\n",
           (unsigned long long)messages, (unsigned long long)b->cancelled,
           (unsigned long long)b->naps, (unsigned long long)b->bells, (unsigned long long)b->tails);
    free(b);
    return 0;
}
