# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint64_t

cdef extern from "qb_log.h" nogil:
    const char *qb_log_last_error()

cdef int check(uint64_t code, str operation) except -1
