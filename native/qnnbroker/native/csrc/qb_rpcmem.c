/* SPDX-License-Identifier: Apache-2.0 */
#include "qb_rpcmem.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static qb_rpcmem *opened;

static qb_rpcmem *load(const char *path, char *why, size_t why_bytes) {
    qb_rpcmem *r = calloc(1, sizeof *r);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!r || !library) {
        const char *said = r ? dlerror() : "out of memory";
        snprintf(why, why_bytes, "%s", said ? said : "it cannot be loaded");
        free(r);
        return NULL;
    }
    r->alloc = (void *(*)(int, uint32_t, int))dlsym(library, "rpcmem_alloc");
    r->alloc2 = (void *(*)(int, uint32_t, size_t))dlsym(library, "rpcmem_alloc2");
    r->free = (void (*)(void *))dlsym(library, "rpcmem_free");
    r->to_fd = (int (*)(void *))dlsym(library, "rpcmem_to_fd");
    r->path = strdup(path);
    if ((!r->alloc && !r->alloc2) || !r->free || !r->to_fd || !r->path) {
        snprintf(why, why_bytes, "%s lacks rpcmem_alloc, rpcmem_free or rpcmem_to_fd", path);
        free(r->path);
        free(r);
        dlclose(library);
        return NULL;
    }
    return r;
}

const qb_rpcmem *qb_rpcmem_open(const char *path, char *why, size_t why_bytes) {
    qb_rpcmem *r;
    pthread_mutex_lock(&lock);
    for (r = opened; r && strcmp(r->path, path) != 0; r = r->next)
        continue;
    if (!r && (r = load(path, why, why_bytes)) != NULL) {
        r->next = opened;
        opened = r;
    }
    pthread_mutex_unlock(&lock);
    return r;
}

int qb_rpcmem_alloc(const qb_rpcmem *r, int heap, uint32_t flags, uint64_t size, void **base,
                    int *fd) {
    if (!r->alloc2 && size > QB_RPCMEM_OLD_MAX)
        return EFBIG;
    *base = r->alloc2 ? r->alloc2(heap, flags, (size_t)size) : r->alloc(heap, flags, (int)size);
    if (!*base)
        return ENOMEM;
    *fd = r->to_fd(*base);
    if (*fd >= 0)
        return 0;
    r->free(*base);
    *base = NULL;
    return EBADF;
}
