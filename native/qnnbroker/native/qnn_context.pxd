# SPDX-License-Identifier: Apache-2.0
from qnnbroker.native.qnn_backend cimport QnnDevice
from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport qb_qnn_graph

cdef class QnnContext(QnnHandle):
    cdef readonly QnnDevice device
    cdef readonly object info       # BinaryInfo
    cdef readonly int priority
    cdef object enabled             # names of the graphs that can execute
    cdef object graphs              # name -> QnnGraph, weakly
    cdef qb_qnn_graph *natives      # one per graph of `info`; filled in when first asked for
