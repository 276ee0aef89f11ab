# SPDX-License-Identifier: Apache-2.0
from libc.stdint cimport uint32_t, uint64_t

from qnnbroker.native.ring cimport BrokerRing
from qnnbroker.native.runnable cimport Runnable, qb_runnable

cdef extern from "qb_executor.h" nogil:
    enum:
        QB_BANDS
        QB_EVENT_COMPLETED
        QB_EVENT_BINDING_IDLE
        QB_EVENT_BINDING_PARKED_WANTED
        QB_EVENT_SESSION_IDLE
        QB_EVENT_SESSION_BROKEN
        QB_EVENT_ACTIVE
    ctypedef struct qb_executor:
        pass
    ctypedef struct qb_session:
        pass
    ctypedef struct qb_binding:
        pass
    ctypedef struct qb_executor_config:
        uint32_t workers[3]
        uint32_t priority[3]
        uint64_t spin_ns
        uint64_t spin_limit_ns
        uint64_t ageing_ns
        uint64_t ageing_slice_ns
    ctypedef struct qb_event:
        uint32_t kind
        uint32_t status
        uint64_t cookie
        uint64_t ticket
        uint64_t session
        uint64_t qnn_code
        uint64_t queue_ns
        uint64_t execute_ns
    ctypedef struct qb_session_stats:
        uint32_t in_flight
        uint64_t run_count
        uint64_t error_count
        uint64_t device_ns
        uint64_t queue_p50_ns
        uint64_t queue_p99_ns
        uint64_t execute_p50_ns
        uint64_t execute_p99_ns
        uint64_t total_p50_ns
        uint64_t total_p99_ns
    qb_executor *qb_executor_new(const qb_executor_config *config)
    int qb_executor_start(qb_executor *ex)
    void qb_executor_stop(qb_executor *ex)
    void qb_executor_free(qb_executor *ex)
    int qb_executor_event_fd(qb_executor *ex)
    size_t qb_executor_drain(qb_executor *ex, qb_event *out, size_t n)
    void qb_executor_tell_next(qb_executor *ex)
    qb_session *qb_session_new(qb_executor *ex, uint64_t id, uint64_t cookie, uint32_t weight,
                               uint32_t max_in_flight)
    int qb_session_open_ring(qb_session *s, const void *client_file, void *broker_file,
                             uint32_t sq_slots, uint32_t cq_slots, int doorbell, int bell)
    void qb_session_close(qb_session *s)
    void qb_session_free(qb_session *s)
    void qb_session_get_stats(qb_session *s, qb_session_stats *out)
    qb_binding *qb_binding_new(qb_session *s, qb_runnable *runnable, uint32_t band,
                               uint64_t cookie)
    int qb_binding_publish(qb_binding *b, uint64_t id)
    void qb_binding_release(qb_binding *b)
    bint qb_binding_park(qb_binding *b)
    bint qb_binding_revive(qb_binding *b, qb_runnable *runnable)
    void qb_binding_fail_waiting(qb_binding *b, uint32_t status, uint64_t qnn_code)
    bint qb_binding_is_wanted(qb_binding *b)
    bint qb_binding_is_idle(qb_binding *b)
    uint64_t qb_binding_last_error(qb_binding *b)
    void qb_binding_free(qb_binding *b)
    uint32_t qb_submit(qb_binding *b, uint64_t ticket, uint64_t deadline_ns)
    bint qb_cancel(qb_session *s, uint64_t ticket)

cdef class Executor:
    cdef qb_executor *ex
    cdef dict sessions   # cookie -> ExecutorSession, while the native part lives
    cdef dict bindings   # cookie -> ExecutorBinding, the same
    cdef uint64_t next_cookie
    cdef int _alive(self) except -1

cdef class ExecutorSession:
    cdef qb_session *ptr
    cdef readonly Executor executor
    cdef readonly uint64_t session_id
    cdef readonly BrokerRing ring  # None without one; closed when idle
    cdef uint64_t cookie
    cdef bint closing  # no new bindings: the native part goes once those there are have gone

cdef class ExecutorBinding:
    cdef qb_binding *ptr
    cdef readonly ExecutorSession session
    cdef readonly Runnable runnable  # None while parked
    cdef uint64_t cookie
    cdef readonly bint released
