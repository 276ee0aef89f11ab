/* SPDX-License-Identifier: Apache-2.0
 *
 * A stand-in for libcdsprpc.so: rpcmem over memfds, for tests and for machines without a DSP.
 *
 * It knows what it gave out: memory that stays, is freed twice or was never ours can be counted,
 * also from outside: QNNBROKER_FAKE_RPCMEM names a file that gets a line for each call,
 *
 *     PID alloc FD BYTES     PID free FD BYTES     PID refused 0 BYTES     PID bad_free 0 0
 *
 * Built a second time, with FAKE_CDSPRPC_OLD, it is a library without rpcmem_alloc2. The variable
 * QNNBROKER_FAKE_RPCMEM_LIMIT says how many bytes there are altogether.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define SYSTEM_HEAP 25
#define MAX_LIVE 65536

struct allocation {
    void *base;
    size_t bytes;
    int fd;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation live[MAX_LIVE];
static size_t live_count, live_bytes;
static uint64_t bad_frees;

/* With the lock held. */
static void record(const char *what, int fd, size_t bytes) {
    const char *path = getenv("QNNBROKER_FAKE_RPCMEM");
    char line[96];
    int length = snprintf(line, sizeof line, "%d %s %d %zu\n", (int)getpid(), what, fd, bytes);
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;

    if (file < 0)
        return;
    if (write(file, line, (size_t)length) != length)
        bad_frees++; /* a lost line would hide a leak */
    close(file);
}

static size_t limit(void) {
    const char *text = getenv("QNNBROKER_FAKE_RPCMEM_LIMIT");

    return text ? (size_t)strtoull(text, NULL, 10) : SIZE_MAX;
}

/* With the lock held. */
static void *allocate(size_t bytes) {
    struct allocation made = {.bytes = bytes, .fd = memfd_create("rpcmem", MFD_CLOEXEC | MFD_ALLOW_SEALING)};

    if (made.fd < 0)
        return NULL;
    made.base = MAP_FAILED;
    if (ftruncate(made.fd, (off_t)bytes) == 0 &&
        fcntl(made.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        made.base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made.fd, 0);
    if (made.base == MAP_FAILED) {
        close(made.fd);
        return NULL;
    }
    live[live_count++] = made;
    live_bytes += bytes;
    record("alloc", made.fd, bytes);
    return made.base;
}

static void *alloc_any(int heap, uint32_t flags, size_t size) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), bytes = (size + page - 1) / page * page;
    void *base = NULL;

    (void)flags;
    pthread_mutex_lock(&lock);
    if (heap == SYSTEM_HEAP && size > 0 && bytes >= size && live_count < MAX_LIVE &&
        bytes <= limit() - (live_bytes < limit() ? live_bytes : limit()))
        base = allocate(bytes);
    if (base == NULL)
        record("refused", 0, size);
    pthread_mutex_unlock(&lock);
    return base;
}

#ifndef FAKE_CDSPRPC_OLD
EXPORT void *rpcmem_alloc2(int heap, uint32_t flags, size_t size) {
    return alloc_any(heap, flags, size);
}
#endif

EXPORT void *rpcmem_alloc(int heap, uint32_t flags, int size) {
    return size > 0 ? alloc_any(heap, flags, (size_t)size) : NULL;
}

static struct allocation *find(const void *base) {
    for (size_t i = 0; i < live_count; i++)
        if (live[i].base == base)
            return &live[i];
    return NULL;
}

EXPORT void rpcmem_free(void *base) {
    struct allocation *found;

    pthread_mutex_lock(&lock);
    found = find(base);
    if (found == NULL) {
        bad_frees++;
        record("bad_free", 0, 0);
    } else {
        record("free", found->fd, found->bytes);
        munmap(found->base, found->bytes);
        close(found->fd);
        live_bytes -= found->bytes;
        *found = live[--live_count];
    }
    pthread_mutex_unlock(&lock);
}

EXPORT int rpcmem_to_fd(void *base) {
    struct allocation *found;
    int fd;

    pthread_mutex_lock(&lock);
    found = find(base);
    fd = found ? found->fd : -1;
    pthread_mutex_unlock(&lock);
    return fd;
}

/* For tests in the same process: what is out, and how often something wrong was freed. */
EXPORT uint64_t fake_cdsprpc_live(void) {
    return live_count;
}

EXPORT uint64_t fake_cdsprpc_bad_frees(void) {
    return bad_frees;
}
