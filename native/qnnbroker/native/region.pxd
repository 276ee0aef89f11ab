# SPDX-License-Identifier: Apache-2.0
from qnnbroker.native.mapping cimport Mapping

cdef class Region:
    cdef Mapping mapping         # None once closed or released
    cdef object last             # once released: a weak reference to what was `mapping`
    cdef Py_ssize_t size
    cdef bint can_write
    cdef object __weakref__

    cdef Mapping _open(self)     # ValueError when closed or released
    cdef int _take(self, Mapping mapping) except -1
