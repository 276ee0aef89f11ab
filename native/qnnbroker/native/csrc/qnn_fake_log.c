/* SPDX-License-Identifier: Apache-2.0
 *
 * Loggers: the last one made that still lives gets the messages, by its callback's va_list.
 */
#include "qnn_fake.h"

#include <stdio.h>
#include <stdlib.h>

struct logger {
    fake_log_callback callback; /* NULL: the default stream, which the fake keeps silent */
    uint32_t level;
    uint64_t number;
};

/* Held while a callback runs, so that a logger that has been freed is not called any more. */
static pthread_mutex_t log_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct fake_table loggers;
static uint64_t next_number = 1;

static struct logger *newest(void) {
    struct logger *found = NULL;

    for (uint32_t i = 1; i <= loggers.size; i++) {
        struct logger *logger = fake_table_get(&loggers, i);

        if (logger && (found == NULL || logger->number > found->number))
            found = logger;
    }
    return found;
}

void fake_log(uint32_t level, const char *format, ...) {
    struct logger *logger;
    va_list list;

    pthread_mutex_lock(&log_mutex);
    logger = newest();
    va_start(list, format);
    if (logger && logger->callback && level <= logger->level)
        logger->callback(format, level, 0, list);
    else if (logger == NULL && level == 1 && fake_switches_now().noise)
        vprintf(format, list); /* the real library does that without being asked */
    va_end(list);
    pthread_mutex_unlock(&log_mutex);
}

uint64_t fake_log_create(fake_log_callback callback, uint32_t level, void **out) {
    struct fake_call call;
    struct logger *logger;
    uint64_t code;

    fake_begin(&call, "logCreate");
    fake_note(&call, "level=%u callback=%d", level, callback != NULL);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    if (out == NULL || level == 0 || level > 5)
        return fake_end(&call, FAKE_LOG_ARGUMENT);
    logger = calloc(1, sizeof *logger);
    if (logger == NULL)
        return fake_end(&call, FAKE_NO_MEMORY);
    logger->callback = callback;
    logger->level = level;
    pthread_mutex_lock(&log_mutex);
    logger->number = next_number++;
    *out = fake_to_handle(fake_table_put(&loggers, logger));
    pthread_mutex_unlock(&log_mutex);
    fake_note(&call, "logger=%llu", (unsigned long long)fake_handle(*out));
    return fake_end(&call, FAKE_OK);
}

uint64_t fake_log_set_level(void *handle, uint32_t level) {
    struct fake_call call;
    struct logger *logger;
    uint64_t code;

    fake_begin(&call, "logSetLogLevel");
    fake_note(&call, "logger=%llu level=%u", (unsigned long long)fake_handle(handle), level);
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&log_mutex);
    logger = fake_table_get(&loggers, fake_handle(handle));
    code = logger == NULL ? FAKE_LOG_HANDLE : level == 0 || level > 5 ? FAKE_LOG_ARGUMENT : FAKE_OK;
    if (code == FAKE_OK)
        logger->level = level;
    pthread_mutex_unlock(&log_mutex);
    return fake_end(&call, code);
}

uint64_t fake_log_free(void *handle) {
    struct fake_call call;
    struct logger *logger;
    uint64_t code;

    fake_begin(&call, "logFree");
    fake_note(&call, "logger=%llu", (unsigned long long)fake_handle(handle));
    if ((code = fake_check(&call)) != FAKE_OK)
        return fake_end(&call, code);
    pthread_mutex_lock(&log_mutex);
    logger = fake_table_get(&loggers, fake_handle(handle));
    fake_table_drop(&loggers, fake_handle(handle));
    pthread_mutex_unlock(&log_mutex);
    free(logger);
    return fake_end(&call, logger ? FAKE_OK : FAKE_LOG_HANDLE);
}
