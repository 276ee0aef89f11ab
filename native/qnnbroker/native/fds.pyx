# SPDX-License-Identifier: Apache-2.0
"""File descriptors between processes: frames with SCM_RIGHTS, credentials and pidfds.

Nothing here waits with a timeout: poll the socket first. All calls release the GIL, retry after
signals (whose Python handlers run, and may raise), and are safe from any thread.
"""

import errno as _errno
import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR, errno
from libc.stdlib cimport free, malloc


cdef extern from "qb_fds.h" nogil:
    enum: QB_MAX_FDS
    ssize_t qb_send_frame(int sock, const void *data, size_t length, const int *fds, size_t count)
    ssize_t qb_recv_frame(int sock, void *data, size_t capacity, int *fds, size_t *count,
                          int *truncated)

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    long syscall(long number, ...)

cdef extern from *:
    """
    #include <sys/socket.h>
    #include <sys/syscall.h>
    #ifndef SYS_pidfd_open
    #define SYS_pidfd_open 434
    #endif
    """
    const long SYS_pidfd_open
    int SOL_SOCKET, SO_PEERCRED
    ctypedef unsigned int socklen_t
    struct ucred:
        int pid
        unsigned int uid, gid
    int getsockopt(int sock, int level, int name, void *value, socklen_t *length) nogil

#: File descriptors in one frame, by the kernel's own limit.
MAX_FDS = QB_MAX_FDS
#: Nobody means a frame larger than this.
_MAX_FRAME_BYTES = 1 << 24


class FrameTruncated(OSError):
    """A frame was longer, or carried more fds, than allowed. It is lost and its fds are closed.

    `data` is what it said, when only fds are missing; that is so, too, when this process has none
    left to take them with.
    """

    data = b""


cdef object _os_error(int code, str what):
    return OSError(code, f"{what}: {os.strerror(code)}")


def send_frame(int sock_fd, bytes data not None, fds=()):
    """Sends one datagram with duplicates of `fds`, which the caller keeps.

    Raises:
        ValueError: no data (the peer would see an end-of-file), or more than MAX_FDS fds.
        BlockingIOError: no room now, on a socket that does not block.
        BrokenPipeError: the peer is gone. Never SIGPIPE.
        OSError: what the kernel says.
    """
    cdef int numbers[QB_MAX_FDS]
    cdef size_t length = len(data), count = len(fds), i = 0
    cdef const char *start = PyBytes_AS_STRING(data)
    cdef ssize_t sent
    if length == 0:
        raise ValueError("a frame needs at least 1 byte; 0 would look like an end-of-file")
    if count > QB_MAX_FDS:
        raise ValueError(f"a frame takes at most {QB_MAX_FDS} fds, not {count}")
    for i in range(count):
        numbers[i] = fds[i]
    while True:
        with nogil:
            sent = qb_send_frame(sock_fd, start, length, numbers, count)
        if sent != -EINTR:
            break
        PyErr_CheckSignals()
    if sent < 0:
        raise _os_error(<int>-sent, f"sending a frame of {length} bytes and {count} fds")
    if <size_t>sent != length:  # never on a datagram socket
        raise OSError(_errno.EMSGSIZE, f"only {sent} of {length} bytes of a frame were sent")


def recv_frame(int sock_fd, max_bytes, max_fds):
    """Receives one datagram. Gives (bytes, fds); the fds are the caller's and close-on-exec.

    `(b"", [])` is the peer's end-of-file.

    Raises:
        FrameTruncated: longer than `max_bytes` or more than `max_fds` fds; all of them are closed.
        BlockingIOError: nothing there now, on a socket that does not block.
        ConnectionResetError: the peer is gone.
        ValueError: limits that make no sense.
        OSError: what the kernel says.
    """
    if not 1 <= max_bytes <= _MAX_FRAME_BYTES:
        raise ValueError(f"max_bytes must be from 1 to {_MAX_FRAME_BYTES}, not {max_bytes}")
    if not 0 <= max_fds <= QB_MAX_FDS:
        raise ValueError(f"max_fds must be from 0 to {QB_MAX_FDS}, not {max_fds}")
    cdef int numbers[QB_MAX_FDS]
    cdef size_t capacity = max_bytes, allowed = max_fds, count = 0, i
    cdef int truncated = 0
    cdef bint kept = False
    cdef ssize_t got
    cdef char *room = <char *>malloc(capacity)
    if room is NULL:
        raise MemoryError(f"{capacity} bytes for a frame")
    try:
        while True:
            with nogil:
                got = qb_recv_frame(sock_fd, room, capacity, numbers, &count, &truncated)
            if got != -EINTR:
                break
            PyErr_CheckSignals()
        if got < 0:
            raise _os_error(<int>-got, "receiving a frame")
        if got == 0:  # end-of-file; or an empty frame, which we do not have
            return b"", []
        if truncated or count > allowed:
            error = FrameTruncated(
                _errno.EMSGSIZE,
                f"a frame exceeds {capacity} bytes or {allowed} fds (at least {got} bytes and "
                f"{count} fds came)",
            )
            if <size_t>got < capacity and count <= allowed:
                error.data = PyBytes_FromStringAndSize(room, got)
            raise error
        answer = PyBytes_FromStringAndSize(room, got), [numbers[i] for i in range(count)]
        kept = True
        return answer
    finally:
        free(room)
        if not kept:
            for i in range(count):
                close(numbers[i])


def peer_credentials(int sock_fd):
    """(pid, uid, gid) of the process that connected or listened, as the kernel recorded it then.

    Raises:
        OSError: not a connected Unix socket.
    """
    cdef ucred peer
    cdef socklen_t length = sizeof(peer)
    if getsockopt(sock_fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0:
        raise _os_error(errno, f"credentials of the peer of fd {sock_fd}")
    return peer.pid, peer.uid, peer.gid


def pidfd_open(int pid):
    """A close-on-exec fd of a process; readable once the process has ended. The caller closes it.

    Raises:
        ProcessLookupError: no such process.
        OSError: what the kernel says.
    """
    cdef long fd = syscall(SYS_pidfd_open, pid, 0)
    if fd < 0:
        raise _os_error(errno, f"pidfd of process {pid}")
    return <int>fd
