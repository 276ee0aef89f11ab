# SPDX-License-Identifier: Apache-2.0
"""Region: a mapping of one fd into this process; it cannot be unmapped while a view lives."""

import warnings
import weakref

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
)
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from qnnbroker.native.mapping cimport (
    Mapping,
    map_dma_buf,
    map_new,
    map_range,
    map_sealed,
    move_range,
    qb_span_ok,
    whole,
)


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(PyObject *value)

cdef extern from *:
    """
    static char qb_unsigned_byte[] = "B";
    """
    char *UNSIGNED_BYTE "qb_unsigned_byte"


def span_ok(total, offset, length):
    """True when the span [offset, offset + length) lies within `total` bytes; any ints, any thread."""
    cdef uint64_t t, o, n
    try:
        t, o, n = total, offset, length
    except OverflowError:  # negative, or 2**64 and more
        return False
    return qb_span_ok(t, o, n)


# It is in no cycle of its own; outside the collector, it ends after the finalisers of who uses it.
@cython.no_gc
cdef class Region:
    """A MAP_SHARED mapping of one fd, and the fd.

    Ways to one: `create` (new sealed memory), `from_fd` (somebody's sealed memory), `from_dma_buf`,
    `map_file` (a read-only range of a file), `RpcMem.create`. The buffer protocol gives the bytes: `memoryview(r)`,
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
        cdef Region self = Region.__new__(cls)
        self._take(map_new(whole(size_bytes, "the size of a region"), name, others_write))
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
        cdef uint64_t wanted = 0 if size_bytes is None else whole(size_bytes, "size_bytes")
        cdef Region self = Region.__new__(cls)
        self._take(map_sealed(fd, wanted, writable))
        return self

    @classmethod
    def from_dma_buf(cls, fd, *, size_bytes=None):
        """Maps the whole of a DMA buffer, which cannot change its size.

        Takes its own duplicate of `fd`; the caller keeps `fd`. CPU access has to be bracketed, see
        `qnnbroker.native.dmabuf`.

        Raises:
            ValueError: not a DMA buffer, or smaller than `size_bytes`.
            OSError: a bad fd, or what the kernel says.
        """
        cdef uint64_t wanted = 0 if size_bytes is None else whole(size_bytes, "size_bytes")
        cdef Region self = Region.__new__(cls)
        self._take(map_dma_buf(fd, wanted))
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
        cdef Region self = Region.__new__(cls)
        self._take(map_range(fd, whole(offset, "offset"), size_bytes))
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

    def move_to(self, fd):
        """Maps another file in place of this one, at the same addresses; views see its bytes at once.

        For a file that is about to change: `fd` has the same bytes, and will not. Only a read-only
        mapping that starts at a page of its file can be moved.

        Raises:
            ValueError: it cannot be, or `fd` has fewer bytes; closed or released.
            OSError: what the kernel says.
        """
        move_range(self._open(), fd)

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
