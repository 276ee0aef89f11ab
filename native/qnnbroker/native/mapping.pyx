# SPDX-License-Identifier: Apache-2.0
"""Mapping: the pages and the fd behind a Region; makes memory, and checks what others made."""

import errno as _errno
import operator
import os

from libc.errno cimport EINTR, errno
from libc.stdint cimport uint64_t

from qnnbroker.native.counters cimport QB_COUNT_REGION, QB_COUNT_RPCMEM, qb_count


cdef extern from "<sys/types.h>" nogil:
    ctypedef long off_t

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
    int munmap(void *address, size_t length)
    int memfd_create(const char *name, unsigned int flags)
    void *MAP_FAILED
    int PROT_READ, PROT_WRITE, MAP_SHARED, MAP_FIXED
    unsigned int MFD_CLOEXEC, MFD_ALLOW_SEALING

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int command, ...)
    int fallocate(int fd, int mode, off_t offset, off_t length)
    int F_DUPFD_CLOEXEC, F_ADD_SEALS, F_GET_SEALS
    int F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE

cdef extern from "<sys/vfs.h>" nogil:
    struct statfs_t "statfs":
        long f_type
    int fstatfs(int fd, statfs_t *info)

cdef extern from "<sys/stat.h>" nogil:
    struct stat_t "stat":
        unsigned int st_mode
        off_t st_size
    int fstat(int fd, stat_t *info)
    bint S_ISREG(unsigned int mode)

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    int ftruncate(int fd, off_t length)
    off_t lseek(int fd, off_t offset, int whence)
    int SEEK_END
    long sysconf(int name)
    int _SC_PAGESIZE, _SC_PHYS_PAGES

cdef extern from *:
    """
    #include <linux/magic.h>
    #ifndef F_SEAL_FUTURE_WRITE
    #define F_SEAL_FUTURE_WRITE 0x0010
    #endif
    """
    const int F_SEAL_FUTURE_WRITE
    const long HUGETLBFS_MAGIC

cdef extern from "qb_dmabuf.h" nogil:
    bint qb_dmabuf_is(int fd)

#: Nobody means a region larger than this.
MAX_REGION_BYTES = 1 << 40

cdef uint64_t PAGE = <uint64_t>sysconf(_SC_PAGESIZE)


cdef uint64_t whole(object value, str what) except? 0:
    """A count of bytes from Python, 0 to MAX_REGION_BYTES."""
    number = operator.index(value)
    if not 0 <= number <= MAX_REGION_BYTES:
        raise ValueError(f"{what} must be from 0 to {MAX_REGION_BYTES}, not {number}")
    return number


cdef object _os_error(int code, str what):
    return OSError(code, f"{what}: {os.strerror(code)}")


cdef class Mapping:
    """The pages and the fd behind a Region, for as long as anything refers to them.

    This is the `obj` of every view, so also who keeps only that (as `np.ndarray(buffer=view)` does)
    keeps the pages.
    """

    def __cinit__(self):
        self.base = NULL
        self.data = NULL
        self.fd = -1
        self.stride = 1
        self.free_base = NULL

    def __init__(self):
        raise TypeError("a Mapping is made by a Region")

    def __dealloc__(self):
        if self.base is not NULL:
            qb_count(QB_COUNT_REGION, -1)
        if self.free_base is not NULL:  # and the fd is the allocation's
            qb_count(QB_COUNT_RPCMEM, -1)
            self.free_base(self.base)
            return
        if self.base is not NULL:
            munmap(self.base, self.mapped_bytes)
        if self.fd >= 0:
            close(self.fd)

    cdef int map(self, size_t length, uint64_t offset, bint writable) except -1:
        cdef int protection = PROT_READ | PROT_WRITE if writable else PROT_READ
        cdef void *base = mmap(NULL, length, protection, MAP_SHARED, self.fd, <off_t>offset)
        if base is MAP_FAILED:
            raise _os_error(errno, f"mapping {length} bytes")
        self.base = base
        self.data = <unsigned char *>base
        self.mapped_bytes = length
        self.size = <Py_ssize_t>length
        self.can_write = writable
        qb_count(QB_COUNT_REGION, 1)
        return 0

    def __reduce__(self):
        raise TypeError("a Mapping belongs to its process and cannot be pickled")


cdef Mapping map_new(uint64_t size, object name, bint others_write):
    """See Region.create."""
    cdef int fd, failed, seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
    cdef Mapping mapping = Mapping.__new__(Mapping)
    if size == 0:
        raise ValueError("the size of a region must be at least 1 byte, not 0")
    size = (size + PAGE - 1) // PAGE * PAGE
    # A memfd has no quota: without this, allocating too much ends in the OOM killer.
    if size > <uint64_t>sysconf(_SC_PHYS_PAGES) * PAGE:
        raise OSError(
            _errno.ENOSPC,
            f"a region of {size} bytes; this machine has {sysconf(_SC_PHYS_PAGES) * PAGE}",
        )
    encoded = os.fsencode(name)
    fd = memfd_create(encoded, MFD_CLOEXEC | MFD_ALLOW_SEALING)
    if fd < 0:
        raise _os_error(errno, "memfd_create")
    mapping.fd = fd  # from here on, dropping `mapping` closes it
    if ftruncate(fd, <off_t>size) != 0:
        raise _os_error(errno, f"a region of {size} bytes")
    while True:
        with nogil:
            failed = errno if fallocate(fd, 0, 0, <off_t>size) != 0 else 0
        if failed == 0:
            break
        if failed != EINTR:
            raise _os_error(failed, f"allocating a region of {size} bytes")
    # Size first, then the mapping, then the seal that forbids further writable ones.
    if fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0:
        raise _os_error(errno, "sealing a region")
    mapping.map(size, 0, True)
    if not others_write:
        seals |= F_SEAL_FUTURE_WRITE
    if fcntl(fd, F_ADD_SEALS, seals) != 0:
        raise _os_error(errno, "sealing a region")
    return mapping


cdef Mapping map_sealed(int fd, uint64_t wanted, bint writable):
    """See Region.from_fd."""
    cdef int seals, write_seals = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE
    cdef stat_t info
    cdef statfs_t filesystem
    cdef Mapping mapping = _own(fd)
    seals = fcntl(mapping.fd, F_GET_SEALS)
    if seals < 0:
        raise ValueError(f"fd {fd} is not sealed shared memory: it knows no seals")
    if seals & (F_SEAL_SHRINK | F_SEAL_GROW) != F_SEAL_SHRINK | F_SEAL_GROW:
        raise ValueError(
            f"fd {fd} has the seals {seals:#x}; at least "
            f"{F_SEAL_SHRINK | F_SEAL_GROW:#x} (SHRINK and GROW) are wanted"
        )
    if writable and seals & write_seals:
        raise ValueError(f"fd {fd} is sealed against writing (seals {seals:#x})")
    if fstat(mapping.fd, &info) != 0 or fstatfs(mapping.fd, &filesystem) != 0:
        raise _os_error(errno, f"fd {fd}")
    if not S_ISREG(info.st_mode):
        raise ValueError(f"fd {fd} is not a regular file (mode {info.st_mode:#o})")
    if filesystem.f_type == HUGETLBFS_MAGIC:  # its pages may be missing when touched
        raise ValueError(f"fd {fd} is memory of huge pages; ordinary pages are wanted")
    if info.st_size <= 0 or info.st_size % PAGE != 0:
        raise ValueError(
            f"fd {fd} has {info.st_size} bytes; whole pages of {PAGE} bytes are wanted"
        )
    if <uint64_t>info.st_size < wanted:
        raise ValueError(f"fd {fd} has {info.st_size} bytes; {wanted} are wanted")
    whole(info.st_size, f"the size of fd {fd}")
    mapping.map(<size_t>info.st_size, 0, writable)
    return mapping


cdef Mapping map_dma_buf(int fd, uint64_t wanted):
    """See Region.from_dma_buf."""
    cdef off_t size
    cdef Mapping mapping = _own(fd)
    if not qb_dmabuf_is(mapping.fd):
        raise ValueError(f"fd {fd} is not a DMA buffer")
    size = lseek(mapping.fd, 0, SEEK_END)  # never changes
    if size < 0:
        raise _os_error(errno, f"the size of fd {fd}")
    if size == 0 or <uint64_t>size < wanted:
        raise ValueError(f"fd {fd} has {size} bytes; {wanted} are wanted")
    whole(size, f"the size of fd {fd}")
    mapping.map(<size_t>size, 0, True)
    return mapping


cdef Mapping map_range(int fd, uint64_t start, object size_bytes):
    """See Region.map_file."""
    cdef uint64_t length, below
    cdef stat_t info
    cdef Mapping mapping = _own(fd)
    if fstat(mapping.fd, &info) != 0:
        raise _os_error(errno, f"fd {fd}")
    if not S_ISREG(info.st_mode):
        raise ValueError(f"fd {fd} is not a regular file (mode {info.st_mode:#o})")
    if size_bytes is None:
        length = <uint64_t>info.st_size - start if start <= <uint64_t>info.st_size else 0
    else:
        length = whole(size_bytes, "size_bytes")
    if length == 0:
        raise ValueError(
            f"an empty range of fd {fd}: offset {start}, the file has {info.st_size} bytes"
        )
    if not qb_span_ok(<uint64_t>info.st_size, start, length):
        raise ValueError(
            f"{length} bytes from offset {start} leave fd {fd}, which has {info.st_size}"
        )
    below = start % PAGE
    mapping.map(length + below, start - below, False)
    mapping.data = <unsigned char *>mapping.base + below
    mapping.size = <Py_ssize_t>length
    return mapping


cdef int move_range(Mapping mapping, int fd) except -1:
    """See Region.move_to."""
    cdef stat_t info
    cdef void *base
    cdef Mapping other = _own(fd)
    if mapping.can_write or mapping.data != mapping.base:
        raise ValueError("only a read-only mapping that starts at a page can be moved")
    if fstat(other.fd, &info) != 0:
        raise _os_error(errno, f"fd {fd}")
    if not S_ISREG(info.st_mode) or info.st_size < mapping.size:
        raise ValueError(f"fd {fd} has {info.st_size} bytes; a file of {mapping.size} is wanted")
    # One call: nobody ever sees the addresses without a page behind them.
    base = mmap(mapping.base, mapping.mapped_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, other.fd, 0)
    if base is MAP_FAILED:
        raise _os_error(errno, f"mapping {mapping.mapped_bytes} bytes")
    mapping.fd, other.fd = other.fd, mapping.fd  # the old one closes with `other`
    return 0


cdef Mapping _own(int fd):
    cdef Mapping mapping = Mapping.__new__(Mapping)
    mapping.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3)
    if mapping.fd < 0:
        raise _os_error(errno, f"fd {fd} cannot be duplicated")
    return mapping
