# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

from qnnbroker.native.qnn_library cimport QnnLibrary

cdef object parse(QnnLibrary library, const void *data, uint64_t size)
cdef int check_size(object info, uint64_t size) except -1
