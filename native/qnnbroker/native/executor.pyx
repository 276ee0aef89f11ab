# SPDX-License-Identifier: Apache-2.0
"""The native executor as Python sees it: sessions, bindings, submissions, and the events that come
back. No Python runs between submit and completion.

Threads: everything here holds the GIL except the waits; `drain` is meant for one thread (the event
loop). Fork: do not fork a process that has an executor.
"""

import os

BAND_LOW, BAND_NORMAL, BAND_HIGH = range(3)

_SESSION_STATS = (
    "in_flight", "run_count", "error_count", "device_ns", "queue_p50_ns", "queue_p99_ns",
    "execute_p50_ns", "execute_p99_ns", "total_p50_ns", "total_p99_ns",
)


cdef class Executor:
    """Owns the worker threads.

    Args:
        workers: executes at a time in the low, normal and high band.
        priorities: QNN priority of each band's executes.
        spin_ns: how long a worker looks for more before it sleeps; 0 for never.
        spin_limit_ns: no spinning after graphs whose median execute is longer.
        ageing_ns: a band that higher ones keep from the device this long ...
        ageing_slice_ns: ... gets it to itself this long; 0 for no ageing.
    """

    def __cinit__(
        self, workers=(1, 1, 1), priorities=(0, 100, 200), *,
        uint64_t spin_ns=10_000, uint64_t spin_limit_ns=50_000,
        uint64_t ageing_ns=1_000_000_000, uint64_t ageing_slice_ns=40_000_000,
    ):
        cdef qb_executor_config config
        if len(workers) != QB_BANDS or len(priorities) != QB_BANDS:
            raise ValueError(f"{QB_BANDS} bands wanted, found {workers!r} and {priorities!r}")
        for i in range(QB_BANDS):
            if not 1 <= workers[i] <= 64:
                raise ValueError(f"1 to 64 workers per band wanted, found {workers[i]}")
            config.workers[i] = workers[i]
            config.priority[i] = priorities[i]
        config.spin_ns = spin_ns
        config.spin_limit_ns = spin_limit_ns
        config.ageing_ns = ageing_ns
        config.ageing_slice_ns = ageing_slice_ns
        self.sessions = {}
        self.bindings = {}
        self.next_cookie = 1
        self.ex = qb_executor_new(&config)
        if self.ex is NULL:
            raise MemoryError("the executor")

    def __dealloc__(self):
        # Sessions and bindings refer to us and are kept by our own dicts: none is left here unless
        # the interpreter is going down, and then the native parts are left to the process's end.
        if self.ex is not NULL:
            with nogil:
                qb_executor_stop(self.ex)
            if not self.sessions and not self.bindings:
                qb_executor_free(self.ex)
            self.ex = NULL

    cdef int _alive(self) except -1:
        if self.ex is NULL:
            raise ValueError("the executor is closed")
        return 0

    def start(self):
        """Starts the threads.

        Raises:
            OSError: the system has none to give.
        """
        self._alive()
        cdef int error = qb_executor_start(self.ex)
        if error:
            raise OSError(error, os.strerror(error))

    def stop(self):
        """Fails what is queued, waits for what runs, ends the threads. Idempotent. Blocks for the
        longest execute under way, without the GIL. Events stay to be drained."""
        if self.ex is not NULL:
            with nogil:
                qb_executor_stop(self.ex)

    def close(self):
        """Stops and frees. Idempotent.

        Raises:
            BufferError: sessions or bindings are still there; release them and drain first.
        """
        if self.ex is NULL:
            return
        self.stop()
        if self.sessions or self.bindings:
            raise BufferError(
                f"the executor still has {len(self.sessions)} sessions "
                f"and {len(self.bindings)} bindings"
            )
        qb_executor_free(self.ex)
        self.ex = NULL

    def fileno(self):
        """An fd that is readable while events wait for `drain`."""
        self._alive()
        return qb_executor_event_fd(self.ex)

    def tell_next(self):
        """Puts ("active",) among the events with the next submission of any session, once."""
        self._alive()
        qb_executor_tell_next(self.ex)

    def session(self, uint64_t session_id, *, uint32_t weight=1, uint32_t max_in_flight=64):
        """A session; `max_in_flight` 0 means no limit."""
        self._alive()
        cdef ExecutorSession s = ExecutorSession.__new__(ExecutorSession)
        s.executor = self
        s.session_id = session_id
        s.cookie = self.next_cookie
        self.next_cookie += 1
        s.ptr = qb_session_new(self.ex, session_id, s.cookie, weight, max_in_flight)
        if s.ptr is NULL:
            raise MemoryError("an executor session")
        self.sessions[s.cookie] = s
        return s

    def drain(self):
        """What happened since: a list of tuples

            ("completed", session_id, ticket, status, qnn_code, queue_ns, execute_ns)
            ("binding_idle", ExecutorBinding)    its runnable is unused and may be closed
            ("binding_wanted", ExecutorBinding)  a submission waits for it to be revived
            ("session_broken", ExecutorSession)  its ring makes no sense: end it
            ("session_idle", ExecutorSession)    nothing of it is left; its ring is closed
            ("active",)                          the submission that `tell_next` asked for

        Never blocks.
        """
        self._alive()
        cdef qb_event events[64]
        cdef size_t n, i
        cdef ExecutorBinding b
        cdef ExecutorSession s
        out = []
        while True:
            n = qb_executor_drain(self.ex, events, 64)
            for i in range(n):
                kind = events[i].kind
                if kind == QB_EVENT_COMPLETED:
                    out.append((
                        "completed", events[i].session, events[i].ticket, events[i].status,
                        events[i].qnn_code, events[i].queue_ns, events[i].execute_ns,
                    ))
                elif kind == QB_EVENT_ACTIVE:
                    out.append(("active",))
                elif kind == QB_EVENT_SESSION_IDLE:
                    s = self.sessions.pop(events[i].cookie, None)
                    if s is not None:
                        qb_session_free(s.ptr)
                        s.ptr = NULL
                        if s.ring is not None:
                            s.ring.close()
                        out.append(("session_idle", s))
                elif kind == QB_EVENT_SESSION_BROKEN:
                    s = self.sessions.get(events[i].cookie)
                    if s is not None:
                        out.append(("session_broken", s))
                else:
                    b = self.bindings.get(events[i].cookie)
                    if b is None or b.ptr is NULL:
                        continue
                    if kind == QB_EVENT_BINDING_PARKED_WANTED:
                        out.append(("binding_wanted", b))
                    elif qb_binding_is_idle(b.ptr):
                        if b.released:
                            del self.bindings[b.cookie]
                            qb_binding_free(b.ptr)
                            b.ptr = NULL
                        out.append(("binding_idle", b))
            if n < 64:
                return out


cdef class ExecutorSession:
    """One client's share of the executor. Made by `Executor.session`."""

    def __init__(self):
        raise TypeError("made by Executor.session()")

    def open_ring(self, BrokerRing ring not None):
        """Takes submissions from `ring` from now on; the session closes it when it is idle.

        Raises:
            OSError: the system refused. ValueError: the session is closed, or has a ring.
        """
        if self.ptr is NULL or self.ring is not None:
            raise ValueError("the executor session is closed, or has a ring already")
        cdef size_t mine = ring.broker_file.address, theirs = ring.client_file.address
        cdef int error = qb_session_open_ring(
            self.ptr, <const void *>theirs, <void *>mine, ring.sq_slots, ring.cq_slots,
            ring.doorbell, ring.bell,
        )
        if error:
            raise OSError(error, os.strerror(error))
        self.ring = ring

    def bind(self, Runnable runnable not None, *, uint32_t band=BAND_NORMAL):
        """A binding that executes `runnable`, which is kept alive until it is idle.

        Raises:
            ValueError: the session or the runnable is closed.
        """
        if self.ptr is NULL or self.closing:
            raise ValueError("the executor session is closed")
        if runnable.ptr is NULL:
            raise ValueError("the runnable is closed")
        cdef ExecutorBinding b = ExecutorBinding.__new__(ExecutorBinding)
        b.session = self
        b.runnable = runnable
        b.cookie = self.executor.next_cookie
        self.executor.next_cookie += 1
        b.ptr = qb_binding_new(self.ptr, runnable.ptr, band, b.cookie)
        if b.ptr is NULL:
            raise MemoryError("an executor binding")
        self.executor.bindings[b.cookie] = b
        return b

    def cancel(self, uint64_t ticket):
        """Cancels a queued submission: True when it will complete as cancelled."""
        return self.ptr is not NULL and qb_cancel(self.ptr, ticket)

    def statistics(self):
        """What the session did so far: a dict of counts, and of nanoseconds for what ends in _ns."""
        cdef qb_session_stats stats
        if self.ptr is NULL:
            return dict.fromkeys(_SESSION_STATS, 0)
        qb_session_get_stats(self.ptr, &stats)
        return stats

    def close(self):
        """Cancels what is queued; `session_idle` follows once all its bindings were released and
        what ran has ended. Idempotent."""
        self.closing = True
        if self.ptr is not NULL:
            qb_session_close(self.ptr)


cdef class ExecutorBinding:
    """A runnable of one session, live, parked or dying. Made by `ExecutorSession.bind`."""

    def __init__(self):
        raise TypeError("made by ExecutorSession.bind()")

    def publish(self, uint64_t id):
        """Lets the session's ring name this binding `id`, (generation << 32) | (index + 1).

        Raises:
            OSError: no memory, or an impossible id. ValueError: the binding is gone.
        """
        if self.ptr is NULL:
            raise ValueError("the binding is released")
        cdef int error = qb_binding_publish(self.ptr, id)
        if error:
            raise OSError(error, os.strerror(error))

    @property
    def wanted(self):
        """It is parked and a submission waits for it: what `binding_wanted` said may be over."""
        return self.ptr is not NULL and bool(qb_binding_is_wanted(self.ptr))

    @property
    def last_error(self):
        """The QNN code of its last execute that failed; 0 when none did, or it is gone."""
        return 0 if self.ptr is NULL else qb_binding_last_error(self.ptr)

    def submit(self, uint64_t ticket, uint64_t deadline_ns=0):
        """Queues one execute; 0 and a `completed` event later, or a completion code at once."""
        if self.ptr is NULL:
            return 4  # LEASE_REVOKED
        return qb_submit(self.ptr, ticket, deadline_ns)

    def release(self):
        """Refuses further submissions, fails the queued ones; `binding_idle` follows. Idempotent."""
        if self.ptr is not NULL and not self.released:
            self.released = True
            qb_binding_release(self.ptr)

    def park(self):
        """Makes submissions wait; `binding_idle` follows when nothing runs, and the first waiting
        submission brings `binding_wanted`. False when it was not live."""
        return self.ptr is not NULL and qb_binding_park(self.ptr)

    def drop_runnable(self):
        """Lets go of the runnable after `binding_idle`; returns it for the owner to close.

        Raises:
            BufferError: it is in use.
        """
        if self.ptr is not NULL and not qb_binding_is_idle(self.ptr):
            raise BufferError("the binding's runnable is in use")
        runnable, self.runnable = self.runnable, None
        return runnable

    def revive(self, Runnable runnable not None):
        """Makes a parked binding live again. False when it is not parked or still runs."""
        if self.ptr is NULL or runnable.ptr is NULL:
            return False
        if not qb_binding_revive(self.ptr, runnable.ptr):
            return False
        self.runnable = runnable
        return True

    def fail_waiting(self, uint32_t status, uint64_t qnn_code=0):
        """Completes the submissions that wait for a parked binding with `status`."""
        if self.ptr is not NULL:
            qb_binding_fail_waiting(self.ptr, status, qnn_code)
