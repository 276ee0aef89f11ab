# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

from qnnbroker.native.qnn_library cimport qb_handle, qb_qnn

cdef bint finalizing() noexcept

cdef class QnnHandle:
    cdef const qb_qnn *qnn
    cdef qb_handle handle      # 0 once closed
    cdef QnnHandle parent      # kept alive; must be closed after us
    cdef int children          # live objects that need this one
    cdef int busy              # calls under way that use it without the GIL
    cdef bint forgotten        # to be closed when the last child and call is gone
    cdef str free_operation    # the QNN function that frees it
    cdef long pid              # the process it belongs to
    cdef object __weakref__

    cdef int ensure_alive(self) except -1
    cdef void adopt(self, qb_handle handle, QnnHandle parent)
    cdef uint64_t free_native(self, qb_handle handle) noexcept
    cdef void add_child(self) noexcept
    cdef void drop_child(self) noexcept
    cdef void end_call(self) noexcept  # instead of busy -= 1
    cdef uint64_t release(self) noexcept
