# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport int64_t, uint32_t, uint64_t

from qnnbroker.native.region cimport Region

cdef extern from "qb_client.h" nogil:
    const uint32_t QB_RING_ABI
    const uint32_t QB_RING_MAX_SLOTS
    const int QB_CLIENT_WOULD_BLOCK
    const int QB_CLIENT_TIMED_OUT
    const int QB_CLIENT_INTERRUPTED
    const int QB_CLIENT_LOST
    const int QB_CLIENT_UNKNOWN
    const int QB_CLIENT_CLOSED
    ctypedef struct qb_cq_slot:
        uint64_t ticket
        uint32_t status
        uint64_t queue_ns
        uint64_t execute_ns
        uint64_t copied_bytes
    ctypedef struct qb_client:
        uint64_t spin_ns
        uint32_t watched_done
    uint64_t qb_client_file_bytes(uint32_t sq_slots)
    uint64_t qb_broker_file_bytes(uint32_t cq_slots)
    qb_client *qb_client_new(void *client_file, uint64_t client_bytes, const void *broker_file,
                             uint64_t broker_bytes, int doorbell, int bell, uint32_t limit,
                             uint64_t spin_ns, uint64_t spin_limit_ns)
    void qb_client_free(qb_client *c)
    void qb_client_close(qb_client *c)
    void qb_client_unwatch(qb_client *c)
    int qb_client_submit(qb_client *c, uint64_t binding, uint64_t deadline_ns, bint watched,
                         uint64_t *ticket)
    int qb_client_wait(qb_client *c, uint64_t ticket, int64_t timeout_ns, qb_cq_slot *out)
    int qb_client_wait_room(qb_client *c, int64_t timeout_ns)
    int qb_client_cancel(qb_client *c, uint64_t ticket)
    void qb_client_abandon(qb_client *c, uint64_t ticket)
    int qb_client_take_watched(qb_client *c, qb_cq_slot *out, uint32_t n)
    uint32_t qb_client_in_flight(qb_client *c)
    bint qb_client_lost(qb_client *c)

cdef class BrokerRing:
    cdef readonly Region client_file
    cdef readonly Region broker_file
    cdef readonly uint32_t sq_slots
    cdef readonly uint32_t cq_slots
    cdef int doorbell
    cdef int bell
    cdef int client_bell

cdef class ClientRing:
    cdef qb_client *ptr
    cdef Py_buffer views[2]  # what keeps the two mappings; the regions themselves are let go
    cdef int held
    cdef int doorbell
    cdef int bell
    cdef int users  # calls that are inside
    cdef int owner  # the process that made it
    cdef bint closing
    cdef object on_watched
    cdef int _enter(self) except -1
    cdef void _leave(self) noexcept
    cdef void _free_if_over(self) noexcept
    cdef _hold(self, int fd, bint writable)
    cdef void _free(self) noexcept
    cdef _tell_watcher(self)
    cdef _take(self, uint64_t ticket, int64_t timeout_ns)
