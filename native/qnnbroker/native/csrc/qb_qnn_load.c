/* SPDX-License-Identifier: Apache-2.0
 * Loads the two QNN libraries of a directory, keeping what they do on loading away from us. */
#define _GNU_SOURCE
#include "qb_qnn_slots.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* From this core API on, tensor records have the stride that qb_tensor.h states. */
enum { CORE_MAJOR = 2, CORE_MINOR_MIN = 15, SYSTEM_MAJOR = 1 };

/* What cannot be done without. */
static const struct {
    unsigned slot;
    const char *name;
} CORE_NEEDED[] = {
    {QB_SLOT_BACKEND_CREATE, "backendCreate"},
    {QB_SLOT_BACKEND_FREE, "backendFree"},
    {QB_SLOT_CONTEXT_FROM_BINARY, "contextCreateFromBinary"},
    {QB_SLOT_CONTEXT_FREE, "contextFree"},
    {QB_SLOT_GRAPH_RETRIEVE, "graphRetrieve"},
    {QB_SLOT_GRAPH_EXECUTE, "graphExecute"},
    {QB_SLOT_DEVICE_CREATE, "deviceCreate"},
    {QB_SLOT_DEVICE_FREE, "deviceFree"},
}, SYSTEM_NEEDED[] = {
    {QB_SYSTEM_SLOT_CREATE, "systemContextCreate"},
    {QB_SYSTEM_SLOT_BINARY_INFO, "systemContextGetBinaryInfo"},
    {QB_SYSTEM_SLOT_FREE, "systemContextFree"},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static qb_qnn *opened;

/* The state of the process that loading must not leak into. */
struct surroundings {
    int directory, output; /* what they were; -1: fd 1 was closed */
};

/* A directory that is deleted while we are in it: no file can be in it or come into it. */
static int enter_nowhere(void) {
    const char *roots[] = {getenv("TMPDIR"), "/tmp", "/dev/shm", "/run"};
    for (unsigned i = 0; i < sizeof roots / sizeof *roots; i++) {
        char path[4096];
        if (!roots[i] || snprintf(path, sizeof path, "%s/qnnbroker-XXXXXX", roots[i]) >= 4096)
            continue;
        if (!mkdtemp(path))
            continue;
        int failed = chdir(path);
        rmdir(path);
        if (!failed)
            return 0;
    }
    return chdir("/proc/self/fdinfo"); /* no file can be put here either */
}

static int leave_surroundings(struct surroundings *s) {
    s->directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (s->directory < 0)
        return -1;
    if (enter_nowhere() != 0) {
        close(s->directory);
        return -1;
    }
    fflush(stdout);
    s->output = fcntl(1, F_DUPFD_CLOEXEC, 3);
    if (dup2(2, 1) < 0) { /* no fd 2 either */
        int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        dup2(null, 1);
        if (null > 1)
            close(null);
    }
    return 0;
}

static int restore_surroundings(struct surroundings *s) {
    fflush(stdout); /* the library prints through stdio, which would surface at exit */
    if (s->output >= 0) {
        dup2(s->output, 1);
        close(s->output);
    } else {
        close(1);
    }
    int failed = fchdir(s->directory);
    close(s->directory);
    return failed;
}

typedef uint64_t (*get_providers)(const void *const **list, uint32_t *count);

/* The interface records that a library offers; 0 of them when something is wrong. */
static uint32_t load_one(const char *directory, const char *name, const char *symbol,
                         const void *const **list, char *why, size_t n) {
    char path[4096];
    uint32_t count = 0;
    *list = NULL;
    if (snprintf(path, sizeof path, "%s/%s", directory, name) >= (int)sizeof path) {
        snprintf(why, n, "the path of %s is too long", name);
        return 0;
    }
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, n, "cannot be loaded: %s", dlerror());
        return 0;
    }
    get_providers providers = (get_providers)dlsym(library, symbol);
    if (!providers) {
        snprintf(why, n, "%s is not a QNN library: it does not export %s", path, symbol);
        return 0;
    }
    uint64_t code = providers(list, &count);
    if (code != 0 || count == 0 || !*list) {
        snprintf(why, n, "%s offers no interface (code %llu, %u providers)", path,
                 (unsigned long long)code, count);
        return 0;
    }
    return count;
}

static void triplet(uint32_t out[3], const void *record, size_t offset) {
    for (int i = 0; i < 3; i++)
        out[i] = qb_u32(record, offset + 4 * i);
}

static bool load_core(qb_qnn *q, char *why, size_t n) {
    const void *const *list;
    uint32_t count =
        load_one(q->directory, "libQnnHtp.so", "QnnInterface_getProviders", &list, why, n);
    if (count == 0)
        return false;
    for (uint32_t i = 0; i < count && !q->core; i++) {
        if (!list[i])
            continue;
        triplet(q->core_api, list[i], 16);
        if (q->core_api[0] == CORE_MAJOR && q->core_api[1] >= CORE_MINOR_MIN)
            q->core = list[i];
    }
    if (!q->core) {
        snprintf(why, n, "%s/libQnnHtp.so has QNN core API %u.%u.%u; %d.%d or a later %d.x is wanted",
                 q->directory, q->core_api[0], q->core_api[1], q->core_api[2], CORE_MAJOR,
                 CORE_MINOR_MIN, CORE_MAJOR);
        return false;
    }
    q->backend_id = qb_u32(q->core, 0);
    q->provider_name = qb_ptr(q->core, 8);
    triplet(q->backend_api, q->core, 28);
    for (unsigned i = 0; i < sizeof CORE_NEEDED / sizeof *CORE_NEEDED; i++)
        if (!qb_qnn_slot(qb_qnn_core_table(q), CORE_NEEDED[i].slot)) {
            snprintf(why, n, "%s/libQnnHtp.so lacks %s", q->directory, CORE_NEEDED[i].name);
            return false;
        }
    return true;
}

static bool load_system(qb_qnn *q, char *why, size_t n) {
    const void *const *list;
    uint32_t count = load_one(q->directory, "libQnnSystem.so", "QnnSystemInterface_getProviders",
                              &list, why, n);
    if (count == 0)
        return false;
    for (uint32_t i = 0; i < count && !q->system; i++) {
        if (!list[i])
            continue;
        triplet(q->system_api, list[i], 16);
        if (q->system_api[0] == SYSTEM_MAJOR)
            q->system = list[i];
    }
    if (!q->system) {
        snprintf(why, n, "%s/libQnnSystem.so has QNN system API %u.%u.%u; %d.x is wanted",
                 q->directory, q->system_api[0], q->system_api[1], q->system_api[2], SYSTEM_MAJOR);
        return false;
    }
    for (unsigned i = 0; i < sizeof SYSTEM_NEEDED / sizeof *SYSTEM_NEEDED; i++)
        if (!qb_qnn_slot(qb_qnn_system_table(q), SYSTEM_NEEDED[i].slot)) {
            snprintf(why, n, "%s/libQnnSystem.so lacks %s", q->directory, SYSTEM_NEEDED[i].name);
            return false;
        }
    return true;
}

static qb_qnn *open_new(const char *directory, char *why, size_t n) {
    struct surroundings before;
    qb_qnn *q = calloc(1, sizeof *q);
    if (q)
        q->directory = strdup(directory);
    if (!q || !q->directory) {
        snprintf(why, n, "out of memory");
        free(q);
        return NULL;
    }
    if (leave_surroundings(&before) != 0) {
        snprintf(why, n, "no private working directory to load in: %s", strerror(errno));
        free(q->directory);
        free(q);
        return NULL;
    }
    bool ok = load_core(q, why, n) && load_system(q, why, n);
    if (restore_surroundings(&before) != 0) {
        snprintf(why, n, "the working directory cannot be entered again: %s", strerror(errno));
        ok = false;
    }
    if (!ok) { /* the libraries stay: some cannot be unloaded */
        free(q->directory);
        free(q);
        return NULL;
    }
    return q;
}

const qb_qnn *qb_qnn_open(const char *directory, char *why, size_t n) {
    pthread_mutex_lock(&lock);
    qb_qnn *q = opened;
    while (q && strcmp(q->directory, directory) != 0)
        q = q->next;
    if (!q && (q = open_new(directory, why, n))) {
        q->next = opened;
        opened = q;
    }
    pthread_mutex_unlock(&lock);
    return q;
}
