/* SPDX-License-Identifier: Apache-2.0
 * One datagram with file descriptors over a Unix socket; no received fd is ever left open unseen. */
#pragma once
#include <stddef.h>
#include <sys/types.h>

#include "qb_counters.h" /* QB_EXPORT */

/* The most fds that the kernel takes in one message (SCM_MAX_FD). */
#define QB_MAX_FDS 253

/* Bytes sent, or -errno. One try: the caller handles EINTR and EAGAIN. */
QB_EXPORT ssize_t qb_send_frame(int sock, const void *data, size_t length, const int *fds,
                                size_t fd_count);

/* Bytes received (0: the peer closed), or -errno; then nothing is open. The fds in `fds` (room for
 * QB_MAX_FDS) are the caller's, are close-on-exec, and are there even when `truncated` is set. */
QB_EXPORT ssize_t qb_recv_frame(int sock, void *data, size_t capacity, int *fds, size_t *fd_count,
                                int *truncated);
