/* SPDX-License-Identifier: Apache-2.0
 * The shared-memory layout of a session's rings: the ABI between client and broker (WIRE.md).
 *
 * Two memory files per session, each written by one side only:
 *   client file  submissions' tail and slots, completions' head, "client sleeps"   (client writes)
 *   broker file  completions' tail and slots, submissions' head, "broker sleeps"   (broker writes)
 * The broker maps the client file read-only; the client cannot map the broker file writable.
 *
 * Indexes run freely (u32, modulo 2^32); an index modulo the slot count is a slot. All numbers are
 * little endian. Nothing here is a pointer, a size or a name.
 *
 * ABI versions
 *   1  submission 32 bytes, completion 64 bytes, header of 256 bytes in each file */
#pragma once
#include <assert.h>
#include <stdint.h>

#define QB_RING_ABI 1u
#define QB_RING_MAGIC 0x474e5251u /* "QRNG" */
#define QB_RING_HEADER_BYTES 256u
#define QB_RING_MAX_SLOTS 65536u
#define QB_CACHE_LINE 64

/* Flags of a submission. Unknown ones are a protocol error. */
#define QB_SUBMIT_CANCEL 1u /* not an execute: cancels the queued submission `ticket` */

/* How the client sleeps: any of these. */
#define QB_SLEEPS_ON_BELL 1u /* ring the bell */
#define QB_SLEEPS_ON_TAIL 2u /* FUTEX_WAKE cq_tail, shared */
/* In the client's `core`: it sleeps there, and a core in common is best. */
#define QB_SLEEPS_THERE 0x80000000u

typedef struct qb_sq_slot {
    uint64_t binding;     /* id with its generation in the high half */
    uint64_t ticket;      /* the client's number, echoed in the completion */
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: none */
    uint32_t flags;
    uint32_t reserved; /* 0 */
} qb_sq_slot;

typedef struct qb_cq_slot {
    uint64_t ticket;
    uint32_t status; /* 0, or the number of the typed reason (WIRE.md) */
    uint32_t reserved;
    uint64_t queue_ns;   /* from taking the submission to the start of the execute */
    uint64_t execute_ns; /* inside the backend */
    uint64_t copied_bytes;
    uint64_t padding[3];
} qb_cq_slot;

typedef struct qb_client_file {
    _Alignas(QB_CACHE_LINE) uint32_t sq_tail; /* submissions written */
    uint32_t core; /* a hint: 1 + the core on which the client looks for completions; 0: none */
    _Alignas(QB_CACHE_LINE) uint32_t cq_head; /* completions taken */
    _Alignas(QB_CACHE_LINE) uint32_t sleeping; /* QB_SLEEPS_...: what to do after a completion */
    _Alignas(QB_CACHE_LINE) uint32_t unused;
    qb_sq_slot slots[] __attribute__((aligned(QB_CACHE_LINE)));
} qb_client_file;

typedef struct qb_broker_file {
    _Alignas(QB_CACHE_LINE) uint32_t magic;
    uint32_t abi, sq_slots, cq_slots; /* slot counts are powers of two */
    _Alignas(QB_CACHE_LINE) uint32_t cq_tail; /* completions written */
    uint32_t core; /* a hint: 1 + the core on which the broker wrote the last one */
    _Alignas(QB_CACHE_LINE) uint32_t sq_head; /* submissions taken */
    _Alignas(QB_CACHE_LINE) uint32_t sleeping; /* 1: ring the eventfd after a submission */
    qb_cq_slot slots[] __attribute__((aligned(QB_CACHE_LINE)));
} qb_broker_file;

static_assert(sizeof(qb_sq_slot) == 32, "ABI");
static_assert(sizeof(qb_cq_slot) == 64, "ABI");
static_assert(sizeof(qb_client_file) == QB_RING_HEADER_BYTES, "ABI");
static_assert(sizeof(qb_broker_file) == QB_RING_HEADER_BYTES, "ABI");
static_assert(__builtin_offsetof(qb_client_file, cq_head) == 64, "ABI");
static_assert(__builtin_offsetof(qb_client_file, sleeping) == 128, "ABI");
static_assert(__builtin_offsetof(qb_broker_file, cq_tail) == 64, "ABI");
static_assert(__builtin_offsetof(qb_broker_file, sq_head) == 128, "ABI");
static_assert(__builtin_offsetof(qb_broker_file, sleeping) == 192, "ABI");

static inline uint64_t qb_client_file_bytes(uint32_t sq_slots) {
    return QB_RING_HEADER_BYTES + (uint64_t)sq_slots * sizeof(qb_sq_slot);
}
static inline uint64_t qb_broker_file_bytes(uint32_t cq_slots) {
    return QB_RING_HEADER_BYTES + (uint64_t)cq_slots * sizeof(qb_cq_slot);
}

/* ---- access: nothing else in the project knows the memory order ------------------------------- */

#define qb_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define qb_load_relaxed(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define qb_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define qb_store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
/* Between "I published" and "does the other side sleep", and between "I sleep" and "is there
 * something": acquire and release alone would lose wake-ups. */
#define qb_full_fence() __atomic_thread_fence(__ATOMIC_SEQ_CST)

/* Copies a slot out of memory that the other side may be rewriting: each word is read once. */
typedef uint64_t __attribute__((may_alias)) qb_word;
static inline void qb_copy_words(void *to, const void *from, uint32_t bytes) {
    qb_word *out = to;
    const qb_word *in = from;
    for (uint32_t i = 0; i < bytes / sizeof(qb_word); i++)
        out[i] = qb_load_relaxed(&in[i]);
}

static inline void qb_cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The broker's end. */
typedef struct qb_ring {
    const qb_client_file *client;
    qb_broker_file *broker;
    uint32_t sq_mask, cq_mask;
    uint32_t sq_head, cq_tail; /* our own indexes; the shared ones are copies for the client */
} qb_ring;

/* Writes the broker file's header. Slot counts are powers of two. */
static inline void qb_ring_init(qb_ring *r, const void *client, void *broker, uint32_t sq_slots,
                                uint32_t cq_slots) {
    *r = (qb_ring){client, broker, sq_slots - 1, cq_slots - 1, 0, 0};
    r->broker->magic = QB_RING_MAGIC;
    r->broker->abi = QB_RING_ABI;
    r->broker->sq_slots = sq_slots;
    r->broker->cq_slots = cq_slots;
    qb_store_release(&r->broker->sleeping, 1);
}

/* How many submissions wait; -1 when the client's index makes no sense. */
static inline int64_t qb_ring_waiting(const qb_ring *r) {
    uint32_t n = qb_load_acquire(&r->client->sq_tail) - r->sq_head;
    return n > r->sq_mask + 1 ? -1 : (int64_t)n;
}

/* Takes the next submission; the caller knows that one waits. */
static inline void qb_ring_pop(qb_ring *r, qb_sq_slot *out) {
    qb_copy_words(out, &r->client->slots[r->sq_head & r->sq_mask], sizeof *out);
    r->sq_head++;
}

/* Tells the client that the slots taken so far are free. */
static inline void qb_ring_release(qb_ring *r) {
    qb_store_release(&r->broker->sq_head, r->sq_head);
}

/* Writes a completion. False: the client's index makes no sense, or it takes no completions. */
static inline int qb_ring_push(qb_ring *r, const qb_cq_slot *slot) {
    if (r->cq_tail - qb_load_acquire(&r->client->cq_head) > r->cq_mask)
        return 0;
    r->broker->slots[r->cq_tail & r->cq_mask] = *slot;
    r->cq_tail++;
    qb_store_release(&r->broker->cq_tail, r->cq_tail);
    return 1;
}

/* After a push: does the client sleep, and how? */
static inline uint32_t qb_ring_client_sleeps(const qb_ring *r) {
    qb_full_fence();
    return qb_load_relaxed(&r->client->sleeping) & (QB_SLEEPS_ON_BELL | QB_SLEEPS_ON_TAIL);
}
