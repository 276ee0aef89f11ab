# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport qb_handle, qb_qnn

cdef extern from "qb_qnn_memory.h" nogil:
    enum qb_memory_kind:
        QB_MEMORY_ION
        QB_MEMORY_CUSTOM
    ctypedef struct qb_memory_spec:
        qb_memory_kind kind
        int fd
        uint64_t total_bytes, offset
        uint32_t dtype, rank
        const uint32_t *dims
    uint64_t qb_qnn_memory_register(const qb_qnn *q, qb_handle context,
                                    const qb_memory_spec *spec, qb_handle *out)
    uint64_t qb_qnn_memory_deregister(const qb_qnn *q, qb_handle memory)
    void qb_tensor_use_handle(void *record, qb_handle memory)
    uint64_t qb_qnn_executes_registered()
    uint64_t qb_qnn_executes_raw()

cdef class QnnRegistration(QnnHandle):
    cdef readonly object kind
    cdef readonly uint32_t dtype
    cdef readonly tuple shape
    cdef readonly object offset
    cdef readonly object size_bytes
