/* SPDX-License-Identifier: Apache-2.0
 * The log ring: lines that a QNN library says go in, from whatever thread it says them on, and wait
 * there until Python drains them. One ring per process.
 *
 * No function here takes the GIL or allocates memory. When the ring is full the newest line is
 * dropped and counted, so that what led to a failure is kept. */
#pragma once
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define QB_EXPORT __attribute__((visibility("default")))

#define QB_LOG_LINE_BYTES 480 /* with the closing NUL; longer lines are cut */
#define QB_LOG_LINES 512

/* What logCreate takes. `args` must be used up inside the call, so the text is formatted here. */
QB_EXPORT void qb_log_callback(const char *format, uint32_t level, uint64_t timestamp, va_list args);

/* Moves the oldest line into `text` (QB_LOG_LINE_BYTES). 1: there was one; 0: the ring is empty. */
QB_EXPORT int qb_log_take(uint32_t *level, char *text);

/* Lines lost because the ring was full, since the process started. */
QB_EXPORT uint64_t qb_log_dropped(void);

/* An eventfd that is readable while lines wait; made on first use, -1 with errno if that fails. */
QB_EXPORT int qb_log_fd(void);

/* The last error line (level 1) that the calling thread's QNN calls logged since it was cleared; ""
 * if none. QNN logs on the thread that called it, so this is what goes with an error code. */
QB_EXPORT void qb_log_clear_error(void);
QB_EXPORT const char *qb_log_last_error(void);
