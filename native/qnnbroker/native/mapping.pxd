# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

cdef extern from "qb_span.h" nogil:
    bint qb_span_ok(uint64_t total, uint64_t offset, uint64_t length)

# What refers to it keeps the pages; views refer to it, not to the Region.
cdef class Mapping:
    cdef void *base              # what mmap returned; NULL before
    cdef size_t mapped_bytes     # what mmap was given
    cdef unsigned char *data     # base, or inside it for a file range that starts between pages
    cdef Py_ssize_t size         # bytes from data on; also the `shape` of exported buffers
    cdef Py_ssize_t stride       # 1; exported buffers point here
    cdef int fd                  # ours; -1 before
    cdef bint can_write
    cdef void (*free_base)(void *base) noexcept nogil  # NULL: mapped here, by mmap
    cdef object __weakref__

    cdef int map(self, size_t length, uint64_t offset, bint writable) except -1

cdef uint64_t whole(object value, str what) except? 0  # a count of bytes from Python, checked
cdef Mapping map_new(uint64_t size, object name, bint others_write)
cdef Mapping map_sealed(int fd, uint64_t wanted, bint writable)
cdef Mapping map_dma_buf(int fd, uint64_t wanted)
cdef int move_range(Mapping mapping, int fd) except -1
cdef Mapping map_range(int fd, uint64_t start, object size_bytes)
