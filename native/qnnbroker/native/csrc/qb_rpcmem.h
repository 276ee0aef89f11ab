/* SPDX-License-Identifier: Apache-2.0
 * Shared memory of the DSP, from libcdsprpc.so, which is found at run time.
 *
 * Threads: any. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

#define QB_RPCMEM_SYSTEM_HEAP 25
#define QB_RPCMEM_CACHED 1u
/* rpcmem_alloc counts in int. */
#define QB_RPCMEM_OLD_MAX 0x7FFFFFFFull

typedef struct qb_rpcmem {
    struct qb_rpcmem *next;
    char *path;
    void *(*alloc)(int heap, uint32_t flags, int size);
    void *(*alloc2)(int heap, uint32_t flags, size_t size); /* NULL: an old library */
    void (*free)(void *base);
    int (*to_fd)(void *base);
} qb_rpcmem;

/* Loads the library, or gives what an earlier call loaded from there; it stays. NULL: `why` has a
 * sentence. */
QB_EXPORT const qb_rpcmem *qb_rpcmem_open(const char *path, char *why, size_t why_bytes);

/* 0, or an errno: EFBIG, too much for an old library; ENOMEM; EBADF, no fd for the memory. The fd
 * belongs to the allocation. */
QB_EXPORT int qb_rpcmem_alloc(const qb_rpcmem *r, int heap, uint32_t flags, uint64_t size,
                              void **base, int *fd);
