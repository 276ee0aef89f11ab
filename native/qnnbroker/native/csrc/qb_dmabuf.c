/* SPDX-License-Identifier: Apache-2.0 */
#include "qb_dmabuf.h"

#include <errno.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>

/* <linux/dma-buf.h> is not installed everywhere: the file system's magic number, and the request. */
#define DMABUF_MAGIC 0x444d4142
#define DMABUF_SYNC _IOW('b', 0, struct { uint64_t flags; })
#define DMABUF_END 4u

bool qb_dmabuf_is(int fd) {
    struct statfs info;
    return fstatfs(fd, &info) == 0 && info.f_type == DMABUF_MAGIC;
}

static int dmabuf_sync(int fd, uint64_t flags) {
    while (ioctl(fd, DMABUF_SYNC, &flags) != 0)
        if (errno != EINTR && errno != EAGAIN)
            return errno;
    return 0;
}

int qb_dmabuf_begin(int fd, uint32_t access) { return dmabuf_sync(fd, access); }

int qb_dmabuf_end(int fd, uint32_t access) { return dmabuf_sync(fd, access | DMABUF_END); }
