# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

cdef extern from "qb_span.h" nogil:
    bint qb_span_ok(uint64_t total, uint64_t offset, uint64_t length)

cdef class Region:
    cdef void *base               # what mmap returned; NULL once unmapped
    cdef size_t mapped_bytes      # what mmap was given
    cdef unsigned char *data      # base, or inside it for a file range that starts between pages
    cdef Py_ssize_t size          # bytes from data on; also the `shape` of exported buffers
    cdef Py_ssize_t stride        # 1; exported buffers point here
    cdef Py_ssize_t export_count  # buffer exports and pins
    cdef int fd                   # ours; -1 once closed
    cdef bint can_write
    cdef bint dying               # release() was called: unmap with the last export
    cdef object __weakref__

    # For native holders of the address: the mapping stays until `unpin`. Both need the GIL.
    cdef int pin(self) except -1
    cdef void unpin(self) noexcept
    cdef int _map(self, int fd, size_t length, uint64_t offset, bint writable) except -1
    cdef void _unmap(self) noexcept
    cdef int _check_open(self) except -1
