# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t

cdef extern from "qb_counters.h" nogil:
    enum qb_counter:
        QB_COUNT_REGION
        QB_COUNT_LIBRARY
        QB_COUNT_BACKEND
        QB_COUNT_DEVICE
        QB_COUNT_CONTEXT
        QB_COUNT_GRAPH
        QB_COUNT_RUNNABLE
        QB_COUNT_SESSION
        QB_COUNT_BINDING
        QB_COUNT_SUBMISSION
        QB_COUNT_RING
        QB_COUNT_REGISTRATION
        QB_COUNT_RPCMEM
        QB_COUNTERS
    void qb_count(qb_counter which, int delta)
    int64_t qb_counter_value(qb_counter which)
