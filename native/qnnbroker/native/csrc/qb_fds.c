/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "qb_fds.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef union {
    struct cmsghdr align;
    /* Room for credentials beside the fds, should somebody have switched SO_PASSCRED on. */
    char bytes[CMSG_SPACE(QB_MAX_FDS * sizeof(int)) + CMSG_SPACE(sizeof(struct ucred))];
} control_t;

ssize_t qb_send_frame(int sock, const void *data, size_t length, const int *fds, size_t fd_count) {
    control_t control;
    struct iovec part = {.iov_base = (void *)data, .iov_len = length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count > QB_MAX_FDS) return -EINVAL;
    if (fd_count > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, fd_count * sizeof(int));
    }
    ssize_t sent = sendmsg(sock, &message, MSG_NOSIGNAL);
    return sent < 0 ? -errno : sent;
}

ssize_t qb_recv_frame(int sock, void *data, size_t capacity, int *fds, size_t *fd_count,
                      int *truncated) {
    control_t control;
    struct iovec part = {.iov_base = data, .iov_len = capacity};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof control};
    *fd_count = 0;
    *truncated = 0;
    ssize_t got = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
    if (got < 0) return -errno;
    *truncated = (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h != NULL; h = CMSG_NXTHDR(&message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof fd);
            if (*fd_count < QB_MAX_FDS) {
                fds[(*fd_count)++] = fd;
            } else { /* the kernel sends no more than that; belt and braces */
                close(fd);
                *truncated = 1;
            }
        }
    }
    return got;
}
