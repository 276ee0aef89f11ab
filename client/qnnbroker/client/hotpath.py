# SPDX-License-Identifier: Apache-2.0
"""HotPath: runs over a session's rings. No gRPC, no Python in the broker, no GIL while waiting."""

import contextlib
import time
from collections.abc import Callable

from qnnbroker.native.ring import ClientRing, RingLost
from qnnbroker.protos.errors import (
    BrokerError,
    BrokerLost,
    DeadlineExpired,
    InvalidRequest,
    SessionClosed,
    WouldBlock,
)
from qnnbroker.protos.status import completion_advice, completion_text, from_completion

from .timing import Timing

#: How long a wait looks at the ring before it sleeps, and for graphs up to which median execute.
SPIN_NS = 10_000
SPIN_LIMIT_NS = 50_000
#: Completion codes behind which there is a QNN code.
WITH_QNN_CODE = frozenset({6, 11, 13, 14, 15, 17})
#: What stands for "as long as it takes" when somebody asks for more: 36 years.
_LONGEST_NS = 1 << 60


def nanoseconds(seconds: float) -> int:
    """A timeout in whole nanoseconds, not below 0.

    Raises:
        InvalidRequest: not a number.
    """
    if not seconds < _LONGEST_NS / 1e9:
        if seconds != seconds:
            raise InvalidRequest("a timeout in seconds wanted, found nan")
        return _LONGEST_NS
    return max(0, int(seconds * 1e9))


class HotPath:
    """The client's end of the rings, with our exceptions.

    Threads: any; whoever waits reads completions for all. Fork: not usable in the child.

    Args:
        ring: the native end.
        limit: submissions in flight at most.
        last_error: asks the broker for QNN code and name of a binding's last failed execute.
    """

    def __init__(
        self, ring: ClientRing, limit: int, last_error: Callable[[int], tuple[int, str]]
    ) -> None:
        self.ring = ring
        self.limit = limit
        self._last_error = last_error

    def failure(self, status: int, binding_id: int) -> BrokerError:
        """The exception for a completion that failed; asks the broker for the QNN code, for which
        a completion has no room."""
        error = from_completion(status, f"binding {binding_id}: {completion_text(status)}")
        error.ids = {**error.ids, "binding_id": str(binding_id)}
        if status not in WITH_QNN_CODE:
            return error
        with contextlib.suppress(BrokerError):
            code, name = self._last_error(binding_id)
            if code:
                ids = {**error.ids, "qnn_code": str(code), "operation": "graphExecute"}
                error = from_completion(
                    status,
                    f"binding {binding_id}: the QNN execute failed with code {code} ({name})"
                    f"{completion_advice(status)}",
                )
                error.ids = ids
        return error

    def run(self, binding_id: int, timeout: float) -> Timing:
        """Submits and waits; with the ring full, waits for room first.

        Raises:
            DeadlineExpired: not done within `timeout` seconds; cancelled if it was still queued.
            BrokerLost, SessionClosed, BrokerError: what happened instead.
        """
        timeout_ns = nanoseconds(timeout)
        deadline_ns = time.monotonic_ns() + timeout_ns
        try:
            done = self.ring.run(binding_id, timeout_ns, deadline_ns)
            while done == -1:
                self.wait_room(deadline_ns)
                left = max(0, deadline_ns - time.monotonic_ns())
                done = self.ring.run(binding_id, left, deadline_ns)
        except RingLost as error:
            raise broker_lost() from error
        except ValueError as error:
            raise SessionClosed("the session was closed during the run") from error
        if done is None:
            raise DeadlineExpired(
                f"the run was not done after {timeout:g} s", reason="RUNNING", binding_id=binding_id
            )
        status, queue_ns, execute_ns, copied_bytes = done  # type: ignore[misc]
        if status:
            raise self.failure(status, binding_id)
        return Timing(queue_ns, execute_ns, copied_bytes)

    def submit(self, binding_id: int, deadline_ns: int, *, watched: bool = False) -> int:
        """A ticket, without ever waiting.

        Raises:
            WouldBlock: as much in flight as the session may have.
            BrokerLost, SessionClosed: there is nobody to submit to.
        """
        try:
            ticket = self.ring.submit(binding_id, deadline_ns, watched=watched)
        except RingLost as error:
            raise broker_lost() from error
        except ValueError as error:
            raise SessionClosed("the session is closed") from error
        if ticket < 0:
            raise WouldBlock(
                f"{self.ring.in_flight} submissions are in flight or not taken yet; "
                f"the session may have {self.limit}"
            )
        return ticket

    def wait_room(self, deadline_ns: int) -> None:
        """Waits until a submission may fit.

        Raises:
            DeadlineExpired: reason QUEUED. BrokerLost, SessionClosed.
        """
        try:
            left = -1 if not deadline_ns else max(0, deadline_ns - time.monotonic_ns())
            if not self.ring.wait_room(left):
                raise DeadlineExpired("no room for a submission in time", reason="QUEUED")
        except RingLost as error:
            raise broker_lost() from error
        except ValueError as error:
            raise SessionClosed("the session is closed") from error

    def wait(self, ticket: int, timeout: float | None) -> tuple[int, int, int, int] | None:
        """The completion of a ticket, taken; None when `timeout` seconds are over."""
        try:
            return self.ring.wait(ticket, -1 if timeout is None else nanoseconds(timeout))
        except RingLost as error:
            raise broker_lost() from error
        except ValueError as error:
            raise SessionClosed("the session was closed") from error


def broker_lost() -> BrokerLost:
    return BrokerLost("the broker went away; what was in flight has an unknown outcome")
