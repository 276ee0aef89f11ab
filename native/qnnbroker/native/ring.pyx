# SPDX-License-Identifier: Apache-2.0
"""The two ends of a session's rings. The layout is csrc/qb_ring.h, described in WIRE.md."""

import errno
import os
import time

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from posix.unistd cimport close as close_fd
from posix.unistd cimport getpid

from qnnbroker.native.doorbell import eventfd as new_eventfd
from qnnbroker.native.doorbell import bell as new_bell

RING_ABI = QB_RING_ABI


class RingLost(ConnectionResetError):
    """The broker closed the ring, or wrote into it what makes no sense."""


cdef uint32_t _power_of_two(uint32_t n):
    cdef uint32_t p = 1
    while p < n:
        p *= 2
    return p


cdef class BrokerRing:
    """The broker's end: both files, the doorbell it watches and the bell it rings.

    Args:
        limit: submissions in flight. The submission ring has twice as many slots, for cancels.

    Raises:
        ValueError: a limit out of range. OSError: no memory or no fds.
    """

    def __cinit__(self, uint32_t limit):
        self.doorbell = self.bell = self.client_bell = -1
        if not 1 <= limit <= QB_RING_MAX_SLOTS // 2:
            raise ValueError(f"a limit of 1 to {QB_RING_MAX_SLOTS // 2} wanted, found {limit}")
        self.cq_slots = _power_of_two(limit)
        self.sq_slots = 2 * self.cq_slots
        self.client_file = Region.create(
            qb_client_file_bytes(self.sq_slots), "qnnbroker-submissions"
        )
        # Sealed after our own mapping: nobody else can ever map it writable.
        self.broker_file = Region.create(
            qb_broker_file_bytes(self.cq_slots), "qnnbroker-completions", others_write=False
        )
        self.doorbell = new_eventfd()
        self.client_bell, self.bell = new_bell()

    def __dealloc__(self):
        # Closed before, but for one that was only half made.
        for fd in (self.doorbell, self.bell, self.client_bell):
            if fd >= 0:
                os.close(fd)
        for region in (self.client_file, self.broker_file):
            if region is not None:
                region.release()

    def client_fds(self):
        """What HELLO sends, in this order: client file, broker file, doorbell, bell."""
        return [
            self.client_file.fileno(), self.broker_file.fileno(), self.doorbell, self.client_bell,
        ]

    def drop_client_end(self):
        """Closes our copy of what only the client needs, once it was sent. Idempotent."""
        if self.client_bell >= 0:
            os.close(self.client_bell)
            self.client_bell = -1

    def hang_up(self):
        """Closes the bell: a client that waits learns that nothing more comes. Idempotent.

        Only when the executor uses the ring no more."""
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1

    def close(self):
        """Unmaps and closes everything. Idempotent; only when the executor uses it no more."""
        self.drop_client_end()
        self.hang_up()
        if self.doorbell >= 0:
            os.close(self.doorbell)
            self.doorbell = -1
        for region in (self.client_file, self.broker_file):
            if region is not None:
                region.close()


cdef class ClientRing:
    """The client's end; takes the four fds over, on failure too.

    Threads: any number may use it at once; waiting releases the GIL. Fork: a child must not use it
    (it would take the parent's rings); call `abandon_all` there, and let it go.

    Args:
        client_file, broker_file, doorbell, bell: the fds that came with HELLO.
        limit: submissions in flight at most.
        spin_ns: how long a wait looks at the ring before it sleeps.
        spin_limit_ns: no spinning when the median execute is longer.

    Raises:
        OSError: EPROTO, the broker's file has another layout; else by mapping.
        ValueError: an fd that is no sealed memory of the right size.
    """

    def __cinit__(
        self, int client_file, int broker_file, int doorbell, int bell, *,
        uint32_t limit, uint64_t spin_ns=10_000, uint64_t spin_limit_ns=50_000,
    ):
        self.doorbell, self.bell = doorbell, bell
        self.owner = getpid()
        try:
            self._hold(client_file, True)
            self._hold(broker_file, False)
        finally:
            os.close(client_file)
            os.close(broker_file)
        self.ptr = qb_client_new(
            self.views[0].buf, self.views[0].len, self.views[1].buf, self.views[1].len,
            doorbell, bell, limit, spin_ns, spin_limit_ns,
        )
        if self.ptr is NULL:
            raise OSError(errno.EPROTO, f"the broker's ring is not of layout {QB_RING_ABI}")

    def __dealloc__(self):
        self._free()

    cdef _hold(self, int fd, bint writable):
        """Maps a file; the mapping lives as long as our view of it."""
        region = Region.from_fd(fd, writable=writable)
        try:
            PyObject_GetBuffer(
                region, &self.views[self.held], PyBUF_WRITABLE if writable else PyBUF_SIMPLE
            )
            self.held += 1
        finally:
            region.release()

    cdef void _free(self) noexcept:
        # In the child of a fork another thread of the parent may hold its lock, for ever.
        if self.ptr is not NULL and self.owner == getpid():
            qb_client_free(self.ptr)
        self.ptr = NULL
        while self.held:
            self.held -= 1
            PyBuffer_Release(&self.views[self.held])
        if self.doorbell >= 0:
            close_fd(self.doorbell)
        if self.bell >= 0:
            close_fd(self.bell)
        self.doorbell = self.bell = -1

    cdef int _enter(self) except -1:
        if self.ptr is NULL or self.closing:
            raise ValueError("the ring is closed")
        self.users += 1
        return 0

    cdef void _leave(self) noexcept:
        self.users -= 1
        self._free_if_over()

    cdef void _free_if_over(self) noexcept:
        # A closed ring goes with the last call inside; with an event loop's fd only when it lets go.
        if self.closing and not self.users and self.on_watched is None:
            self._free()

    cdef _tell_watcher(self):
        if self.on_watched is not None and self.ptr.watched_done:
            self.on_watched()

    @property
    def closed(self):
        return self.ptr is NULL or self.closing

    @property
    def lost(self):
        """The broker is gone, as far as the ring knows."""
        return self.ptr is NULL or self.owner != getpid() or qb_client_lost(self.ptr)

    @property
    def in_flight(self):
        """Submissions whose result nobody has taken yet."""
        if self.ptr is NULL or self.owner != getpid():
            return 0
        return qb_client_in_flight(self.ptr)

    def fileno(self):
        """The bell: readable when completions came, once `take_watched` was called."""
        return self.bell

    def set_spin(self, uint64_t spin_ns):
        """How long a wait looks at the ring before it sleeps; 0 for never."""
        self._enter()
        self.ptr.spin_ns = spin_ns
        self._leave()

    def submit(self, uint64_t binding, uint64_t deadline_ns=0, *, bint watched=False):
        """Submits one execute of a binding: its ticket, or -1 when there is no room now.

        Raises:
            RingLost: the broker is gone. ValueError: the ring is closed.
        """
        cdef uint64_t ticket = 0
        self._enter()
        cdef int result = qb_client_submit(self.ptr, binding, deadline_ns, watched, &ticket)
        self._leave()
        if result == QB_CLIENT_LOST:
            raise RingLost("the broker closed the ring")
        return -1 if result else ticket

    cdef _take(self, uint64_t ticket, int64_t timeout_ns):
        cdef qb_cq_slot slot
        cdef int result
        cdef int64_t left = timeout_ns
        cdef int64_t end = time.monotonic_ns() + timeout_ns if timeout_ns >= 0 else 0
        while True:
            with nogil:
                result = qb_client_wait(self.ptr, ticket, left, &slot)
            self._tell_watcher()
            if result == 0:
                return (slot.status, slot.queue_ns, slot.execute_ns, slot.copied_bytes)
            if self.closing or result == QB_CLIENT_CLOSED:
                raise ValueError("the ring was closed")
            if result == QB_CLIENT_LOST:
                raise RingLost("the broker closed the ring")
            if result == QB_CLIENT_TIMED_OUT:
                return None
            if result != QB_CLIENT_INTERRUPTED:
                raise ValueError(f"nothing in flight has the ticket {ticket}")
            _check_signals()
            if timeout_ns >= 0:
                left = max(0, end - time.monotonic_ns())

    def wait(self, uint64_t ticket, int64_t timeout_ns=-1):
        """The completion of `ticket`, taken: (status, queue_ns, execute_ns, copied_bytes); None when
        time is up. Releases the GIL. Signals are handled; a handler's exception leaves the ticket
        as it is.

        Raises:
            RingLost: the broker is gone. ValueError: no such ticket, or the ring is closed.
        """
        self._enter()
        try:
            return self._take(ticket, timeout_ns)
        finally:
            self._leave()

    def run(self, uint64_t binding, int64_t timeout_ns=-1, uint64_t deadline_ns=0):
        """Submits and waits, in one call: the completion, None when time was up, -1 when there is
        no room now. When time is up or a signal's handler raises, the submission is cancelled (if it
        is still queued) and its result dropped.

        Raises:
            RingLost: the broker is gone. ValueError: the ring is closed.
        """
        cdef uint64_t ticket = 0
        cdef int result
        done = None
        self._enter()
        try:
            result = qb_client_submit(self.ptr, binding, deadline_ns, False, &ticket)
            if result == QB_CLIENT_LOST:
                raise RingLost("the broker closed the ring")
            if result:
                return -1
            try:
                done = self._take(ticket, timeout_ns)
                return done
            finally:
                if done is None:
                    qb_client_cancel(self.ptr, ticket)
                    qb_client_abandon(self.ptr, ticket)
        finally:
            self._leave()

    def wait_room(self, int64_t timeout_ns=-1):
        """Waits until a submission may fit again: True, or False when time is up. It may have been
        taken by somebody else by then. Releases the GIL.

        Raises:
            RingLost: the broker is gone. ValueError: the ring is closed.
        """
        cdef int result
        cdef int64_t left = timeout_ns
        cdef int64_t end = time.monotonic_ns() + timeout_ns if timeout_ns >= 0 else 0
        self._enter()
        try:
            while True:
                with nogil:
                    result = qb_client_wait_room(self.ptr, left)
                self._tell_watcher()
                if self.closing or result == QB_CLIENT_CLOSED:
                    raise ValueError("the ring was closed")
                if result == 0:
                    return True
                if result == QB_CLIENT_LOST:
                    raise RingLost("the broker closed the ring")
                if result == QB_CLIENT_TIMED_OUT:
                    return False
                _check_signals()
                if timeout_ns >= 0:
                    left = max(0, end - time.monotonic_ns())
        finally:
            self._leave()

    def cancel(self, uint64_t ticket):
        """Asks the broker not to run a queued submission; its completion says what happened. False
        when it is over already, or the ring is full."""
        self._enter()
        cdef int result = qb_client_cancel(self.ptr, ticket)
        self._leave()
        return result == 0

    def abandon(self, uint64_t ticket):
        """Says that nobody will wait for `ticket`; its place is free once it is over. Idempotent."""
        if self.ptr is not NULL and self.owner == getpid():
            qb_client_abandon(self.ptr, ticket)

    def watch(self, on_watched):
        """Calls `on_watched` when another thread's wait took in what an event loop watches; None for
        nobody. It is called on that thread and must only pass the news on."""
        self.on_watched = on_watched
        if on_watched is None and self.ptr is not NULL and self.owner == getpid():
            qb_client_unwatch(self.ptr)
        self._free_if_over()

    def take_watched(self):
        """For an event loop: the completions of watched tickets that have come, and rings the bell
        for the next. A list of (ticket, status, queue_ns, execute_ns, copied_bytes); never sleeps.

        Raises:
            RingLost: the broker is gone and nothing is left. ValueError: the ring is closed.
        """
        cdef qb_cq_slot slots[64]
        cdef int n, i
        out = []
        self._enter()
        try:
            while True:
                n = qb_client_take_watched(self.ptr, slots, 64)
                if n == QB_CLIENT_LOST:
                    if out:
                        return out
                    raise RingLost("the broker closed the ring")
                for i in range(n):
                    out.append((
                        slots[i].ticket, slots[i].status, slots[i].queue_ns,
                        slots[i].execute_ns, slots[i].copied_bytes,
                    ))
                if n < 64:
                    return out
        finally:
            self._leave()

    def close(self):
        """Refuses further use. Threads that wait end with ValueError at once, whatever the broker
        does; the memory goes with the last of them. Idempotent."""
        if self.closing or self.owner != getpid():
            return
        self.closing = True
        if self.ptr is not NULL:
            qb_client_close(self.ptr)
        if self.on_watched is not None:
            self.on_watched()
        self._free_if_over()

    def abandon_all(self):
        """For the child of a fork: refuses further use and touches nothing. Idempotent."""
        self.closing = True


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1

cdef int _check_signals() except -1:
    return PyErr_CheckSignals()
