# SPDX-License-Identifier: Apache-2.0
"""Doorbells as fds: an eventfd towards the broker, a socket, the bell, towards the client."""

import os

from cpython.exc cimport PyErr_SetFromErrno

cdef extern from "qb_doorbell.h" nogil:
    int qb_doorbell_new()
    int qb_bell_new(int ends[2])


def eventfd():
    """A new eventfd, CLOEXEC and non-blocking. The caller closes it.

    Raises:
        OSError: out of fds.
    """
    cdef int fd = qb_doorbell_new()
    if fd < 0:
        PyErr_SetFromErrno(OSError)
    return fd


def bell():
    """(the client's end, the broker's end), two sockets, CLOEXEC. Who rings never blocks.

    Raises:
        OSError: out of fds.
    """
    cdef int ends[2]
    if qb_bell_new(ends) < 0:
        PyErr_SetFromErrno(OSError)
    return ends[0], ends[1]
