# SPDX-License-Identifier: Apache-2.0
from qnnbroker.native.qnn_backend cimport QnnDevice
from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport qb_qnn_graph

cdef extern from "qb_qnn_mapped.h" nogil:
    ctypedef struct qb_file_source:
        pass

cdef class QnnContext(QnnHandle):
    cdef readonly QnnDevice device
    cdef readonly object info       # BinaryInfo
    cdef readonly int priority
    cdef object enabled             # names of the graphs that can execute
    cdef object graphs              # name -> QnnGraph, weakly
    cdef readonly bint keeps_binary # reads the binary's mapping for as long as it lives
    cdef qb_file_source *source     # what it reads from then; NULL otherwise
    cdef Py_buffer view             # of the binary, then
    cdef qb_qnn_graph *natives      # one per graph of `info`; filled in when first asked for

    cdef void end_source(self) noexcept
