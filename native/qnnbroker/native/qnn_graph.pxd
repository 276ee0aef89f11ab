# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int32_t, uint32_t

from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport qb_handle, qb_qnn_graph, qb_qnn_runnable
from qnnbroker.native.runnable cimport Runnable

cdef extern from "qb_tensor.h" nogil:
    const size_t QB_TENSOR_BYTES
    ctypedef struct qb_tensor_spec:
        uint32_t id, type, dtype, rank
        const char *name
        const uint32_t *dims
        bint quantized
        uint32_t encoding, bits, pair_count
        int32_t axis
        const float *scales
        const int32_t *offsets
        const void *pairs
    void qb_tensor_build(void *record, const qb_tensor_spec *spec, void *data, uint32_t size)

cdef extern from "qb_qnn_memory.h" nogil:
    void qb_tensor_use_handle(void *record, qb_handle memory)

cdef class QnnGraph:
    cdef readonly QnnHandle context
    cdef readonly object info      # GraphInfo
    cdef qb_qnn_graph *native      # the context's; its handle is good while that is open
    cdef qb_tensor_spec *specs     # of the inputs, then of the outputs
    cdef list kept                 # the bytes objects that `specs` points into
    cdef object __weakref__

    cdef int describe(self, qb_tensor_spec *spec, object tensor) except -1

cdef class QnnRunnable(Runnable):
    cdef readonly QnnGraph graph
    cdef readonly tuple registrations  # of each tensor, or None; kept open
    cdef qb_qnn_runnable *native   # one block: this, the tensor records, the buffer views
    cdef Py_buffer *views
    cdef Py_ssize_t held           # how many of the views are exported to us
    cdef int busy                  # executes from Python under way
    cdef object __weakref__

    cdef int take(self, object span, object tensor, bint output) except -1
    cdef int use(self, void *record, QnnHandle memory, object span, Py_ssize_t i) except -1
    cdef bint executing(self) noexcept
    cdef void release(self) noexcept

cdef QnnGraph make_graph(QnnHandle context, object info, qb_qnn_graph *native)
