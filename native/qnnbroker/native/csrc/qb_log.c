/* SPDX-License-Identifier: Apache-2.0
 * The log ring: a fixed array under a mutex that is held for one copy of a line. */
#include "qb_log.h"

#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct line {
    uint32_t level;
    char text[QB_LOG_LINE_BYTES];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct line ring[QB_LOG_LINES];
static uint32_t head, count; /* the oldest line; how many there are */
static uint64_t dropped;
static int event_fd = -1;

static _Thread_local char last_error[QB_LOG_LINE_BYTES];

static void copy_text(char *to, const char *from, size_t length) {
    if (length >= QB_LOG_LINE_BYTES)
        length = QB_LOG_LINE_BYTES - 1;
    memcpy(to, from, length);
    to[length] = 0;
}

static void push(uint32_t level, const char *text, size_t length) {
    pthread_mutex_lock(&lock);
    if (count == QB_LOG_LINES) {
        dropped++;
    } else {
        struct line *slot = &ring[(head + count) % QB_LOG_LINES];
        slot->level = level;
        copy_text(slot->text, text, length);
        if (count++ == 0 && event_fd >= 0)
            eventfd_write(event_fd, 1);
    }
    pthread_mutex_unlock(&lock);
}

/* Messages start with " <E> " or the like; the level says that already. */
static const char *skip_prefix(const char *p) {
    while (isspace((unsigned char)*p))
        p++;
    if (p[0] == '<' && isupper((unsigned char)p[1]) && p[2] == '>') {
        p += 3;
        while (isspace((unsigned char)*p))
            p++;
    }
    return p;
}

void qb_log_callback(const char *format, uint32_t level, uint64_t timestamp, va_list args) {
    char message[2 * QB_LOG_LINE_BYTES];
    int saved = errno;
    if (!format || vsnprintf(message, sizeof message, format, args) < 0)
        return;
    /* One call is one message, with or without a newline at its end; one inside makes two lines. */
    const char *p = skip_prefix(message);
    while (*p) {
        const char *end = strchr(p, '\n');
        const char *next = end ? end + 1 : p + strlen(p);
        end = end ? end : next;
        while (end > p && isspace((unsigned char)end[-1]))
            end--;
        if (end > p) {
            push(level, p, (size_t)(end - p));
            if (level == 1)
                copy_text(last_error, p, (size_t)(end - p));
        }
        p = next;
    }
    errno = saved;
}

int qb_log_take(uint32_t *level, char *text) {
    int found = 0;
    eventfd_t ignored;
    pthread_mutex_lock(&lock);
    if (count > 0) {
        *level = ring[head].level;
        memcpy(text, ring[head].text, QB_LOG_LINE_BYTES);
        head = (head + 1) % QB_LOG_LINES;
        count--;
        found = 1;
    }
    if (count == 0 && event_fd >= 0)
        eventfd_read(event_fd, &ignored);
    pthread_mutex_unlock(&lock);
    return found;
}

uint64_t qb_log_dropped(void) {
    pthread_mutex_lock(&lock);
    uint64_t n = dropped;
    pthread_mutex_unlock(&lock);
    return n;
}

int qb_log_fd(void) {
    pthread_mutex_lock(&lock);
    if (event_fd < 0)
        event_fd = eventfd(count > 0, EFD_CLOEXEC | EFD_NONBLOCK);
    int fd = event_fd;
    pthread_mutex_unlock(&lock);
    return fd;
}

void qb_log_clear_error(void) { last_error[0] = 0; }

const char *qb_log_last_error(void) { return last_error; }
