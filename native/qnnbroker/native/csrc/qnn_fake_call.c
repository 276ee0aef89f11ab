/* SPDX-License-Identifier: Apache-2.0
 *
 * One call of the API from begin to end: its arguments for the record, its faults, its result.
 */
#include "qnn_fake.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POLL_US 20000 /* how soon a waiting call sees a changed control file */

uint64_t fake_now_us(void) {
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

void fake_begin(struct fake_call *call, const char *name) {
    fake_control_poll();
    call->name = name;
    call->started_us = fake_now_us();
    call->used = 0;
    call->arguments[0] = 0;
    call->why[0] = 0;
}

void fake_note(struct fake_call *call, const char *format, ...) {
    size_t room = sizeof call->arguments - call->used;
    va_list list;
    int wrote;

    if (room < 2)
        return;
    call->arguments[call->used] = ' ';
    va_start(list, format);
    wrote = vsnprintf(call->arguments + call->used + 1, room - 1, format, list);
    va_end(list);
    if (wrote < 0 || (size_t)wrote >= room - 1)
        call->arguments[call->used] = 0; /* whole arguments or none */
    else
        call->used += (size_t)wrote + 1;
}

/* key=text with everything but plain characters written as %41, so that a line splits at spaces. */
void fake_note_text(struct fake_call *call, const char *key, const char *text) {
    char escaped[256];
    size_t used = 0;

    for (; text && *text && used + 4 < sizeof escaped; text++) {
        if (*text > ' ' && *text < 0x7f && *text != '%')
            escaped[used++] = *text;
        else
            used += (size_t)snprintf(escaped + used, 4, "%%%02X", (unsigned char)*text);
    }
    escaped[used] = 0;
    fake_note(call, "%s=%s", key, escaped);
}

void fake_why(struct fake_call *call, const char *format, ...) {
    va_list list;

    va_start(list, format);
    vsnprintf(call->why, sizeof call->why, format, list);
    va_end(list);
}

uint64_t fake_end(struct fake_call *call, uint64_t code) {
    fake_note(call, "us=%llu", (unsigned long long)(fake_now_us() - call->started_us));
    fake_record_line(call->name, call->arguments, code);
    if (code != FAKE_OK && code != FAKE_NOT_SUPPORTED)
        fake_log(1, " <E> %s failed with %llu: %s\n", call->name, (unsigned long long)code,
                 call->why[0] ? call->why : "refused");
    else
        fake_log(4, " <V> %s gives %llu\n", call->name, (unsigned long long)code);
    return code;
}

static void timed_wait_locked(uint64_t until_us) {
    struct timespec until = {.tv_sec = (time_t)(until_us / 1000000u),
                             .tv_nsec = (long)(until_us % 1000000u) * 1000};

    pthread_cond_timedwait(&fake_changed, &fake_lock, &until);
}

/* Waits until the time has come or wanted() says so; false when the generation has passed. */
static bool wait_until(uint64_t until_us, uint64_t generation, bool (*wanted)(uint64_t),
                       uint64_t argument) {
    for (;;) {
        uint64_t now = fake_now_us();
        bool same;

        if (now >= until_us || (wanted && wanted(argument)))
            return true;
        pthread_mutex_lock(&fake_lock);
        same = generation == fake_generation;
        if (same)
            timed_wait_locked(until_us - now > POLL_US ? now + POLL_US : until_us);
        pthread_mutex_unlock(&fake_lock);
        if (!same)
            return false;
        fake_control_poll();
    }
}

bool fake_sleep_us(uint64_t us, uint64_t generation) {
    struct timespec short_while = {.tv_nsec = (long)us * 1000};

    if (us > 2000)
        return wait_until(fake_now_us() + us, generation, NULL, 0);
    while (us > 0 && clock_nanosleep(CLOCK_MONOTONIC, 0, &short_while, &short_while) == EINTR)
        continue;
    return true;
}

static bool hang_is_over(uint64_t epoch) {
    return fake_hang_epoch() != epoch;
}

void fake_crash(int number) {
    if (number == SIGABRT)
        abort();
    signal(number, SIG_DFL); /* not into somebody's handler: the process has to die of it */
    kill(getpid(), number);
    for (;;)
        pause();
}

static void note_fault(const struct fake_call *call, const char *kind) {
    char text[128];

    snprintf(text, sizeof text, " call=%s kind=%s", call->name, kind);
    fake_record_line("fault", text, 0);
}

uint64_t fake_fault_apply(struct fake_call *call, const struct fake_fault *fault,
                          uint64_t generation) {
    if (fault->delay_us) {
        note_fault(call, "delay");
        if (!fake_sleep_us(fault->delay_us, generation))
            return FAKE_RESTARTED;
    }
    if (fault->hang) {
        uint64_t epoch = fake_hang_epoch();

        note_fault(call, "hang");
        if (!wait_until(UINT64_MAX, generation, hang_is_over, epoch))
            return FAKE_RESTARTED;
    }
    if (fault->crash) {
        note_fault(call, "crash");
        fake_crash(fault->crash);
    }
    if (fault->code == 0)
        return FAKE_OK;
    note_fault(call, "fail");
    fake_why(call, "a fault rule says so");
    if (fault->code == FAKE_RESTARTED)
        fake_restart(true);
    if (fault->code == FAKE_LOST_FOR_GOOD)
        fake_fatal();
    return fault->code;
}

uint64_t fake_check(struct fake_call *call) {
    struct fake_fault fault = fake_faults_of(call->name, NULL, 0);

    return fake_fault_apply(call, &fault, fake_generation_now());
}
