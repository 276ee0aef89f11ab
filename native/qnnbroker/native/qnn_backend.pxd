# SPDX-License-Identifier: Apache-2.0
from qnnbroker.native.qnn_handle cimport QnnHandle
from qnnbroker.native.qnn_library cimport QnnLibrary, qb_handle, qb_platform

cdef class QnnBackend(QnnHandle):
    cdef readonly QnnLibrary library
    cdef qb_handle logger  # freed after the backend; 0 when the library has none

cdef class QnnDevice(QnnHandle):
    cdef readonly QnnBackend backend
    cdef qb_platform platform
