# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

cdef extern from "qb_runnable.h" nogil:
    ctypedef struct qb_hist:
        pass
    uint64_t qb_hist_quantile(const qb_hist *h, double q)
    ctypedef struct qb_graph:
        uint64_t (*set_priority)(qb_graph *self, uint32_t priority) noexcept nogil
        uint32_t priority
        uint32_t running
        uint64_t run_count
        uint64_t error_count
        uint64_t execute_ns_total
        uint64_t execute_ns_min
        uint64_t execute_ns_max
        uint64_t queue_ns_total
        uint64_t median_ns
        uint64_t last_end_ns
        qb_hist queue
        qb_hist execute
        qb_hist total
    ctypedef struct qb_runnable:
        qb_graph *graph
        uint64_t (*execute)(qb_runnable *self) noexcept nogil

cdef class Runnable:
    cdef qb_runnable *ptr  # owned by the subclass; NULL once closed
