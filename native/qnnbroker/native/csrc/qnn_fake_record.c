/* SPDX-License-Identifier: Apache-2.0
 *
 * The record of calls: the last lines in memory, and all of them in a file when one is named.
 *
 * A line is "sequence time_us pid tid name key=value ... -> code", with a newline. It reaches the
 * file in one write with O_APPEND, so that several processes can share one file.
 */
#include "qnn_fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RING_LINES 4096
#define LINE_BYTES 768

static pthread_mutex_t record_mutex = PTHREAD_MUTEX_INITIALIZER;
static char ring[RING_LINES][LINE_BYTES];
static uint64_t next_sequence = 1;
static int file = -1;
static char file_path[256];

static void follow_path(const char *path) {
    if (strcmp(path, file_path) == 0)
        return;
    if (file >= 0)
        close(file);
    file = path[0] ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    snprintf(file_path, sizeof file_path, "%s", path);
}

void fake_record_line(const char *name, const char *arguments, uint64_t code) {
    struct fake_switches switches = fake_switches_now();
    char *line;
    int used;

    if (switches.record_off)
        return;
    pthread_mutex_lock(&record_mutex);
    follow_path(switches.record);
    line = ring[next_sequence % RING_LINES];
    used = snprintf(line, LINE_BYTES, "%llu %llu %d %ld %s%.640s -> %llu\n",
                    (unsigned long long)next_sequence, (unsigned long long)fake_now_us(),
                    (int)getpid(), (long)syscall(SYS_gettid), name, arguments,
                    (unsigned long long)code);
    next_sequence++;
    if (file >= 0 && used > 0 && write(file, line, (size_t)used) != used)
        fprintf(stderr, "fake QNN: cannot write to %s\n", file_path);
    pthread_mutex_unlock(&record_mutex);
}

/* Something that the caller did and should not have done, though the real library allows it. */
void fake_record_error(const char *what, const char *format, ...) {
    char text[300];
    int used = snprintf(text, sizeof text, " what=%s ", what);
    va_list list;

    va_start(list, format);
    vsnprintf(text + used, sizeof text - (size_t)used, format, list);
    va_end(list);
    fake_record_line("error", text, 0);
}

/* Copies whole lines from the one numbered `from` (1 is the first) that are still in memory, as many
 * as fit, and ends them with a NUL. Returns the number to ask for next time. */
FAKE_EXPORT uint64_t qnn_fake_record(uint64_t from, char *out, uint64_t room) {
    uint64_t used = 0;

    if (out == NULL || room == 0)
        return from;
    pthread_mutex_lock(&record_mutex);
    if (from + RING_LINES <= next_sequence)
        from = next_sequence - RING_LINES + 1;
    if (from == 0)
        from = 1;
    for (; from < next_sequence; from++) {
        const char *line = ring[from % RING_LINES];
        size_t length = strlen(line);

        if (used + length >= room)
            break;
        memcpy(out + used, line, length);
        used += length;
    }
    out[used] = 0;
    pthread_mutex_unlock(&record_mutex);
    return from;
}
