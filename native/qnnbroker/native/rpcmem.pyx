# SPDX-License-Identifier: Apache-2.0
"""RpcMem: shared memory that the DSP can use, allocated by libcdsprpc.so."""

import errno as _errno
import os

from libc.stdint cimport uint32_t, uint64_t

from qnnbroker.native.counters cimport QB_COUNT_REGION, QB_COUNT_RPCMEM, qb_count
from qnnbroker.native.mapping cimport Mapping, whole
from qnnbroker.native.region cimport Region

cdef extern from "qb_rpcmem.h" nogil:
    const int QB_RPCMEM_SYSTEM_HEAP
    const uint32_t QB_RPCMEM_CACHED
    const uint64_t QB_RPCMEM_OLD_MAX
    ctypedef struct qb_rpcmem:
        char *path
        void *(*alloc2)(int heap, uint32_t flags, size_t size)
        void (*free)(void *base) noexcept nogil
    const qb_rpcmem *qb_rpcmem_open(const char *path, char *why, size_t why_bytes)
    int qb_rpcmem_alloc(const qb_rpcmem *r, int heap, uint32_t flags, uint64_t size,
                        void **base, int *fd)

#: Where the dynamic linker finds the system's library.
DEFAULT_LIBRARY = "libcdsprpc.so"
#: The heap that suits an NPU with an IOMMU, and cached memory.
SYSTEM_HEAP = QB_RPCMEM_SYSTEM_HEAP
CACHED = QB_RPCMEM_CACHED
#: The most that a library without rpcmem_alloc2 gives at a time, in bytes.
OLD_MAX_BYTES = QB_RPCMEM_OLD_MAX

cdef size_t PAGE = os.sysconf("SC_PAGESIZE")


cdef class RpcMem:
    """The allocator of a libcdsprpc.so. The library stays loaded.

    Threads: any. Fork: memory made here belongs to the process that made it.

    Args:
        path: of the library; a bare name is looked up as the linker does.
        heap: the heap's number.
        flags: 1 for cached memory, 0 for uncached; others are the library's business.

    Raises:
        FileNotFoundError: it cannot be loaded, with the linker's words.
        OSError: ELIBBAD, it lacks a function.
    """

    cdef const qb_rpcmem *native
    cdef readonly int heap
    cdef readonly uint32_t flags

    def __cinit__(self, path=DEFAULT_LIBRARY, *, int heap=SYSTEM_HEAP, uint32_t flags=CACHED):
        cdef char[512] why
        why[0] = 0
        encoded = os.fsencode(path)
        self.native = qb_rpcmem_open(encoded, why, sizeof(why))
        if self.native is NULL:
            text = (<char *>why).decode("utf-8", "replace")
            number = _errno.ELIBBAD if "lacks" in text else _errno.ENOENT
            raise OSError(number, text)
        self.heap, self.flags = heap, flags

    @property
    def path(self):
        """As it was given."""
        return os.fsdecode(self.native.path)

    @property
    def has_alloc2(self):
        """Whether allocations of 2 GiB and more are possible."""
        return self.native.alloc2 is not NULL

    def create(self, size_bytes):
        """New memory as a Region. Its fd is the one that the library knows, and goes with it.

        Args:
            size_bytes: rounded up to whole pages.

        Raises:
            ValueError: `size_bytes` is 0, negative or absurd.
            OSError: EFBIG, 2 GiB and more from an old library; ENOMEM, it has no more; EBADF, it
                gave memory without an fd.
        """
        cdef uint64_t size = whole(size_bytes, "the size of a region")
        cdef void *base = NULL
        cdef int fd = -1, error
        cdef Mapping mapping
        cdef Region region
        if size == 0:
            raise ValueError("the size of a region must be at least 1 byte, not 0")
        size = (size + PAGE - 1) // PAGE * PAGE
        with nogil:
            error = qb_rpcmem_alloc(self.native, self.heap, self.flags, size, &base, &fd)
        if error == _errno.EFBIG:
            raise OSError(
                error,
                f"rpcmem_alloc gives at most {OLD_MAX_BYTES} bytes at a time, {size} were asked "
                f"for; {self.path} has no rpcmem_alloc2",
            )
        if error:
            raise OSError(error, f"{size} bytes of rpcmem: {os.strerror(error)}")
        mapping = Mapping.__new__(Mapping)
        mapping.free_base = <void (*)(void *) noexcept nogil>self.native.free
        mapping.base = base
        mapping.data = <unsigned char *>base
        mapping.mapped_bytes = <size_t>size
        mapping.size = <Py_ssize_t>size
        mapping.fd = fd
        mapping.can_write = True
        qb_count(QB_COUNT_REGION, 1)
        qb_count(QB_COUNT_RPCMEM, 1)
        region = Region.__new__(Region)
        region._take(mapping)
        return region

    def __repr__(self):
        return f"<RpcMem {self.path}, heap {self.heap}, flags {self.flags:#x}>"
