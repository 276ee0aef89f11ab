/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded, lets memfds pass for DMA buffers, and records how CPU access to them is bracketed: lines
 * "PID TIME_US FLAGS" in the file that QNNBROKER_DMABUF_RECORD names. As kernels may, it asks to be
 * called again the first time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define SYNC _IOW('b', 0, uint64_t)
#define DMABUF 0x444d4142
#define TMPFS 0x01021994

int fstatfs(int fd, struct statfs *info) {
    int (*real)(int, struct statfs *) = (int (*)(int, struct statfs *))dlsym(RTLD_NEXT, "fstatfs");
    int answer = real(fd, info);

    if (answer == 0 && info->f_type == TMPFS)
        info->f_type = DMABUF;
    return answer;
}

static void record(uint64_t flags) {
    const char *path = getenv("QNNBROKER_DMABUF_RECORD");
    struct timespec now;
    char line[64];
    int fd;

    clock_gettime(CLOCK_MONOTONIC, &now);
    if (path == NULL || (fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) < 0)
        return;
    if (write(fd, line,
              (size_t)snprintf(line, sizeof line, "%d %lld %llu\n", (int)getpid(),
                               (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000,
                               (unsigned long long)flags)) < 0)
        perror(path);
    close(fd);
}

int ioctl(int fd, unsigned long request, ...) {
    static int asked_again;
    va_list list;
    void *argument;
    int (*real)(int, unsigned long, void *);

    va_start(list, request);
    argument = va_arg(list, void *);
    va_end(list);
    if (request == SYNC) {
        if (!asked_again) {
            asked_again = 1;
            errno = EAGAIN;
            return -1;
        }
        record(*(uint64_t *)argument);
        return 0;
    }
    real = (int (*)(int, unsigned long, void *))dlsym(RTLD_NEXT, "ioctl");
    return real(fd, request, argument);
}
