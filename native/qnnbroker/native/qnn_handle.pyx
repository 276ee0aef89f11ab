# SPDX-License-Identifier: Apache-2.0
"""QnnHandle: how every QNN object lives and dies, and in which order."""

import os
import sys
import warnings

from qnnbroker.native.qnn_error cimport check

cdef object _is_finalizing = sys.is_finalizing
cdef object _getpid = os.getpid
cdef object _warn = warnings.warn


cdef bint finalizing() noexcept:
    """True at interpreter exit, when nothing may be freed or said: threads may still execute."""
    return _is_finalizing()


cdef class QnnHandle:
    """A QNN object: closed once, by hand or as a context manager, and after all that needs it.

    A child keeps its parent alive, so forgetting objects frees them in the right order too, with a
    ResourceWarning. At interpreter exit nothing is freed: the process ends.

    Fork: in a child process the object is of no use; every call raises ValueError and close does
    nothing.
    """

    def __cinit__(self, *args, **kwargs):
        self.qnn = NULL
        self.handle = 0
        self.pid = _getpid()

    def __del__(self):
        if self.handle == 0 or self.forgotten or finalizing() or self.pid != _getpid():
            return
        try:
            _warn(f"never closed: {self!r}", ResourceWarning, source=self, stacklevel=2)
        finally:  # the warning may be an error
            if self.children > 0:
                self.forgotten = True
            else:
                self.release()

    cdef void adopt(self, qb_handle handle, QnnHandle parent):
        self.handle = handle
        self.parent = parent
        if parent is not None:
            parent.add_child()

    cdef uint64_t free_native(self, qb_handle handle) noexcept:
        """What a subclass does to free its handle, `free_operation`; a QNN code."""
        return 0

    cdef uint64_t release(self) noexcept:
        cdef qb_handle handle = self.handle
        cdef uint64_t code
        if handle == 0:
            return 0
        self.handle = 0
        code = self.free_native(handle)
        if self.parent is not None:
            self.parent.drop_child()
        return code

    cdef void add_child(self) noexcept:
        self.children += 1

    cdef void drop_child(self) noexcept:
        self.children -= 1
        if self.children == 0 and self.busy == 0 and self.forgotten:
            self.release()

    cdef void end_call(self) noexcept:
        self.busy -= 1
        if self.children == 0 and self.busy == 0 and self.forgotten:
            self.release()

    cdef int ensure_alive(self) except -1:
        if self.handle == 0:
            raise ValueError(f"{type(self).__name__} is closed")
        if self.pid != _getpid():
            raise ValueError(
                f"{type(self).__name__} belongs to process {self.pid}; this is process {_getpid()}"
            )
        return 0

    @property
    def closed(self):
        """True when the QNN object is gone."""
        return self.handle == 0

    def close(self):
        """Frees the QNN object. Does nothing when closed.

        Raises:
            BufferError: something that needs it is still open or under way.
            QnnError: the library refused; the object counts as closed all the same.
        """
        if self.handle == 0:
            return
        if self.pid != _getpid():
            self.handle = 0  # the parent process's
            return
        if self.children > 0:
            raise BufferError(f"{self!r} cannot be closed: {self.children} open object(s) need it")
        if self.busy > 0:
            raise BufferError(f"{self!r} cannot be closed: {self.busy} call(s) are under way")
        check(self.release(), self.free_operation)

    def __enter__(self):
        self.ensure_alive()
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            self.close()
        elif self.children > 0 or self.busy > 0:
            # Held by the traceback of `error`, maybe; refusing would hide that error.
            self.forgotten = True
        elif self.pid == _getpid():
            self.release()

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} belongs to its process and cannot be pickled")

    def __repr__(self):
        state = "closed" if self.handle == 0 else f"handle {self.handle:#x}"
        return f"<{type(self).__name__} {state}>"
