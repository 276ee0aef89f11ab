# SPDX-License-Identifier: Apache-2.0
"""Region: a mapping of one fd into this process; it cannot be unmapped while a view lives."""

import errno as _errno
import operator
import os
import warnings
import weakref

from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
)
from cpython.object cimport PyObject
from libc.errno cimport EINTR, errno
from libc.stdint cimport uint64_t

from qnnbroker.native.counters cimport QB_COUNT_REGION, qb_count


cdef extern from "<sys/types.h>" nogil:
    ctypedef long off_t

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
    int munmap(void *address, size_t length)
    int memfd_create(const char *name, unsigned int flags)
    void *MAP_FAILED
    int PROT_READ, PROT_WRITE, MAP_SHARED
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
    long sysconf(int name)
    int _SC_PAGESIZE, _SC_PHYS_PAGES

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject *value)

cdef extern from *:
    """
    #include <linux/magic.h>
    #ifndef F_SEAL_FUTURE_WRITE
    #define F_SEAL_FUTURE_WRITE 0x0010
    #endif
    static char qb_unsigned_byte[] = "B";
    """
    char *UNSIGNED_BYTE "qb_unsigned_byte"
    const int F_SEAL_FUTURE_WRITE
    const long HUGETLBFS_MAGIC

#: Nobody means a region larger than this.
MAX_REGION_BYTES = 1 << 40

cdef uint64_t PAGE = <uint64_t>sysconf(_SC_PAGESIZE)


def span_ok(total, offset, length):
    """True when the span [offset, offset + length) lies within `total` bytes; any ints, any thread."""
    cdef uint64_t t, o, n
    try:
        t, o, n = total, offset, length
    except OverflowError:  # negative, or 2**64 and more
        return False
    return qb_span_ok(t, o, n)


cdef uint64_t _whole(object value, str what) except? 0:
    """A count of bytes from Python, 0 to MAX_REGION_BYTES."""
    number = operator.index(value)
    if not 0 <= number <= MAX_REGION_BYTES:
        raise ValueError(f"{what} must be from 0 to {MAX_REGION_BYTES}, not {number}")
    return number


cdef object _os_error(int code, str what):
    return OSError(code, f"{what}: {os.strerror(code)}")


cdef Mapping _own(int fd):
    cdef Mapping mapping = Mapping.__new__(Mapping)
    mapping.fd = fcntl(fd, F_DUPFD_CLOEXEC, 3)
    if mapping.fd < 0:
        raise _os_error(errno, f"fd {fd} cannot be duplicated")
    return mapping


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

    def __init__(self):
        raise TypeError("a Mapping is made by a Region")

    def __dealloc__(self):
        if self.base is not NULL:
            munmap(self.base, self.mapped_bytes)
            qb_count(QB_COUNT_REGION, -1)
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


cdef class Region:
    """A MAP_SHARED mapping of one fd, and the fd.

    Three ways to one: `create` (new sealed memory), `from_fd` (somebody's sealed memory),
    `map_file` (a read-only range of a file). The buffer protocol gives the bytes: `memoryview(r)`,
    `np.frombuffer(r, dtype)`. Whatever is made over them keeps them mapped, so no view can outlive
    the mapping: `close` refuses with BufferError while there are views, `release` lets the last
    view unmap.

    Close it, or use it as a context manager; a forgotten one warns with ResourceWarning.

    Threads: any, under the GIL. Who writes where in the memory is for its users to agree on.
    Fork: a child inherits the mapping of the same memory; closing it there does not concern the
    parent.
    """

    def __init__(self):
        raise TypeError("a Region is made by Region.create, Region.from_fd or Region.map_file")

    def __del__(self):
        if self.mapping is not None:
            try:
                warnings.warn(f"never closed: {self!r}", ResourceWarning, source=self)
            finally:
                self.release()  # whoever kept the warning's `source` would be told once more

    @classmethod
    def create(cls, size_bytes, name="qnnbroker", *, others_write=True):
        """New shared memory, all of it allocated, that can neither shrink nor grow.

        Args:
            size_bytes: rounded up to whole pages.
            name: shown by /proc, for people.
            others_write: False seals the memory so that only this mapping writes; mappings made
                later, by anybody, are read-only.

        Raises:
            ValueError: `size_bytes` is 0, negative or absurd.
            OSError: ENOSPC when the machine has not the memory, or what the kernel says.
        """
        cdef uint64_t size = _whole(size_bytes, "the size of a region")
        cdef int fd, failed, seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
        cdef Mapping mapping = Mapping.__new__(Mapping)
        cdef Region self = Region.__new__(cls)
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
        self._take(mapping)
        return self

    @classmethod
    def from_fd(cls, fd, *, size_bytes=None, writable=True):
        """Maps the whole of sealed shared memory that came from somewhere else.

        Takes its own duplicate of `fd`; the caller keeps `fd`. Nothing is believed: the seals come
        first, because without them the memory could shrink under the mapping.

        Args:
            fd: a memfd sealed against shrinking and growing.
            size_bytes: the least it must have; None takes it as it is.
            writable: False maps it read-only.

        Raises:
            ValueError: not such memory, or too small.
            OSError: a bad fd, or what the kernel says.
        """
        cdef uint64_t wanted = 0 if size_bytes is None else _whole(size_bytes, "size_bytes")
        cdef int seals, write_seals = F_SEAL_WRITE | F_SEAL_FUTURE_WRITE
        cdef stat_t info
        cdef statfs_t filesystem
        cdef Region self = Region.__new__(cls)
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
        _whole(info.st_size, f"the size of fd {fd}")
        mapping.map(<size_t>info.st_size, 0, writable)
        self._take(mapping)
        return self

    @classmethod
    def map_file(cls, fd, offset=0, size_bytes=None):
        """A read-only mapping of a range of a regular file, shared with the page cache.

        Takes its own duplicate of `fd`. Any offset will do. A file that somebody truncates later
        takes its pages along (SIGBUS on touch): map only files that are replaced, not rewritten.

        Args:
            fd: open for reading.
            offset: where the range starts, in bytes.
            size_bytes: length of the range; None means up to the end.

        Raises:
            ValueError: not a regular file, an empty range, or one that leaves the file.
            OSError: a bad fd, or what the kernel says.
        """
        cdef uint64_t start = _whole(offset, "offset")
        cdef uint64_t length, below
        cdef stat_t info
        cdef Region self = Region.__new__(cls)
        cdef Mapping mapping = _own(fd)
        if fstat(mapping.fd, &info) != 0:
            raise _os_error(errno, f"fd {fd}")
        if not S_ISREG(info.st_mode):
            raise ValueError(f"fd {fd} is not a regular file (mode {info.st_mode:#o})")
        if size_bytes is None:
            length = <uint64_t>info.st_size - start if start <= <uint64_t>info.st_size else 0
        else:
            length = _whole(size_bytes, "size_bytes")
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
        self._take(mapping)
        return self

    cdef int _take(self, Mapping mapping) except -1:
        self.mapping = mapping
        self.size = mapping.size
        self.can_write = mapping.can_write
        return 0

    cdef Mapping _open(self):
        if self.mapping is not None:
            return self.mapping
        if self.closed:
            raise ValueError("the region is closed")
        raise ValueError("the region is released; only views that exist are still good")

    @property
    def size_bytes(self):
        """Bytes of the mapping; stays readable after close."""
        return self.size

    @property
    def writable(self):
        """True when this mapping may be written."""
        return self.can_write

    @property
    def closed(self):
        """True when the memory is no longer mapped here."""
        return self.mapping is None and (self.last is None or self.last() is None)

    @property
    def address(self):
        """Where the bytes are in this process. Good only while the region is open.

        Raises:
            ValueError: closed or released.
        """
        return <size_t>self._open().data

    @property
    def exports(self):
        """What still needs the memory (views, each with all that was made from it)."""
        if self.mapping is not None:
            return Py_REFCNT(<PyObject *>self.mapping) - 1
        mapping = None if self.last is None else self.last()
        return 0 if mapping is None else Py_REFCNT(<PyObject *>mapping) - 1

    def fileno(self):
        """The fd, which the region owns.

        Raises:
            ValueError: closed or released.
        """
        return self._open().fd

    def view(self, offset, length):
        """The bytes [offset, offset + length) as a memoryview.

        Raises:
            ValueError: the span leaves the region; closed or released.
        """
        self._open()
        if not span_ok(self.size, offset, length):
            raise ValueError(
                f"{length} bytes from offset {offset} leave a region of {self.size} bytes"
            )
        return memoryview(self)[offset : offset + length]

    def close(self):
        """Unmaps and closes the fd. Does nothing when closed.

        Raises:
            BufferError: views are still alive.
        """
        if self.closed:
            return
        if self.exports > 0:
            raise BufferError(f"a region of {self.size} bytes has {self.exports} live view(s)")
        self.release()

    def release(self):
        """Closes as soon as the last view is gone; from now on there are no new ones."""
        if self.mapping is not None:
            self.last = weakref.ref(self.mapping)
            self.mapping = None

    def __enter__(self):
        self._open()
        return self

    def __exit__(self, kind, error, trace):
        # A view may live in the traceback of `error`; refusing to close would hide that error.
        if error is None:
            self.close()
        else:
            self.release()

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef Mapping mapping = self._open()
        if flags & PyBUF_WRITABLE == PyBUF_WRITABLE and not self.can_write:
            raise BufferError("the region is mapped read-only")
        if flags & PyBUF_ANY_CONTIGUOUS == PyBUF_ANY_CONTIGUOUS and not flags & PyBUF_FORMAT:
            # Asked by np.ndarray(buffer=...), which lets the view go and keeps the bare address.
            raise BufferError("np.ndarray must be given a view: memoryview(region)")
        buffer.buf = mapping.data
        buffer.obj = mapping
        buffer.len = mapping.size
        buffer.itemsize = 1
        buffer.readonly = not self.can_write
        buffer.ndim = 1
        buffer.format = NULL
        buffer.shape = NULL
        buffer.strides = NULL
        if flags & PyBUF_FORMAT == PyBUF_FORMAT:
            buffer.format = UNSIGNED_BYTE
        if flags & PyBUF_ND == PyBUF_ND:
            buffer.shape = &mapping.size
        if flags & PyBUF_STRIDES == PyBUF_STRIDES:
            buffer.strides = &mapping.stride
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __releasebuffer__(self, Py_buffer *buffer):
        # Never called: views belong to the Mapping. That it exists tells np.frombuffer to keep a
        # view, where it would otherwise keep this object and the bare address.
        pass

    def __reduce__(self):
        raise TypeError("a Region belongs to its process and cannot be pickled")

    def __repr__(self):
        if self.closed:
            return f"<Region {self.size} bytes, closed>"
        access = "read-write" if self.can_write else "read-only"
        state = "released" if self.mapping is None else f"fd {self.mapping.fd}"
        return f"<Region {self.size} bytes, {access}, {state}>"
