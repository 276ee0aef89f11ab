# SPDX-License-Identifier: Apache-2.0
"""Submission: one run that is under way."""

import threading
import time
from typing import TYPE_CHECKING

from qnnbroker.protos.errors import DeadlineExpired

from .hotpath import HotPath, nanoseconds
from .timing import Timing

if TYPE_CHECKING:
    from .bindings import Binding


class Submission:
    """A run of a binding that `Binding.submit` started.

    The arrays of the binding belong to the run until it is done: neither write its inputs nor read
    its outputs before. A submission that nobody keeps is let go; it may still run.

    Threads: any. Fork: not usable in the child.
    """

    def __init__(self, hot: HotPath, binding: "Binding", ticket: int) -> None:
        self._hot = hot
        self._binding = binding  # keeps its memory while this is under way
        self._ticket = ticket
        self._lock = threading.Lock()
        self._done: tuple[int, int, int, int] | None = None

    @property
    def ticket(self) -> int:
        """The number that pairs it with its completion."""
        return self._ticket

    @property
    def done(self) -> bool:
        """Whether it is over; never waits."""
        return self.wait_done(0.0)

    def wait_done(self, timeout: float | None = None) -> bool:
        """Waits until it is over, one way or another; False when `timeout` seconds passed first.

        Raises:
            BrokerLost, SessionClosed: nothing more will come. InvalidRequest: not a timeout.
        """
        if self._done is not None:
            return True
        self._binding.graph.session.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        # One thread waits at the ring, the others for it.
        if not self._lock.acquire(timeout=-1 if timeout is None else _lock_seconds(timeout)):
            return False
        try:
            if self._done is None:
                left = None if deadline is None else deadline - time.monotonic()
                done = self._hot.wait(self._ticket, left)
                if done is not None:
                    self._binding.take_back()
                self._done = done
        finally:
            self._lock.release()
        return self._done is not None

    def result(self, timeout: float | None = None) -> Timing:
        """Waits and tells what the run took; the outputs are in the binding's arrays.

        Raises:
            DeadlineExpired: not over within `timeout` seconds (it goes on), or it came too late.
            SubmissionCancelled: `cancel` was in time.
            BrokerLost, SessionClosed, BrokerError: what happened instead.
        """
        if not self.wait_done(timeout):
            raise DeadlineExpired(
                f"submission {self._ticket} is not over after {timeout:g} s", reason="RUNNING"
            )
        assert self._done is not None
        status, queue_ns, execute_ns, copied_bytes = self._done
        if status:
            raise self._hot.failure(status, self._binding.binding_id)
        return Timing(queue_ns, execute_ns, copied_bytes)

    def cancel(self) -> bool:
        """Asks the broker not to run it. `result` then says whether that was in time.

        False when it is over already, or the ring has no room for the wish.
        """
        return self._done is None and self._hot.ring.cancel(self._ticket)

    def __del__(self) -> None:
        if getattr(self, "_done", 0) is None:
            self._hot.ring.abandon(self._ticket)

    def __repr__(self) -> str:
        state = "under way" if self._done is None else "over"
        return f"<Submission {self._ticket} of {self._binding!r}, {state}>"


def _lock_seconds(timeout: float) -> float:
    """`timeout` as a lock takes it."""
    return min(nanoseconds(timeout) / 1e9, threading.TIMEOUT_MAX)
