# SPDX-License-Identifier: Apache-2.0
"""The event loop's view of the native executor: futures out, events in."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from qnnbroker.native.executor import Executor, ExecutorBinding, ExecutorSession
from qnnbroker.native.qnn_error import name_of
from qnnbroker.protos.errors import BrokerError
from qnnbroker.protos.status import completion_advice, completion_text, from_completion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one execute: nanoseconds from submit to start, and inside the backend."""

    queue_ns: int
    execute_ns: int


class Bound(Protocol):
    """Who owns a binding's runnable."""

    def on_idle(self) -> None:
        """Nothing uses the runnable: the binding is parked, or released and gone."""

    def on_wanted(self) -> None:
        """A submission waits for the parked binding."""


class LoopExecutor:
    """Owns the native executor and resolves futures from its events.

    Belongs to one running event loop; every method is called on its thread.
    """

    def __init__(
        self,
        workers: tuple[int, int, int] = (1, 1, 1),
        priorities: tuple[int, int, int] = (0, 100, 200),
        *,
        spin_ns: int = 10_000,
        spin_limit_ns: int = 50_000,
        ageing_ns: int = 1_000_000_000,
        ageing_slice_ns: int = 40_000_000,
    ) -> None:
        self._native = Executor(
            workers,
            priorities,
            spin_ns=spin_ns,
            spin_limit_ns=spin_limit_ns,
            ageing_ns=ageing_ns,
            ageing_slice_ns=ageing_slice_ns,
        )
        self._loop = asyncio.get_running_loop()
        self._tickets = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Timing]] = {}
        self._bound: dict[ExecutorBinding, Bound] = {}
        self._broken: dict[ExecutorSession, Callable[[], None]] = {}
        self._session_idle: dict[ExecutorSession, Callable[[], None]] = {}
        self._next: asyncio.Future[None] | None = None
        self._active: asyncio.Future[None] | None = None
        self._native.start()
        self._fd = self._native.fileno()
        self._loop.add_reader(self._fd, self._on_events)

    @property
    def in_flight(self) -> int:
        """Submissions made here that have not completed."""
        return len(self._futures)

    @property
    def held(self) -> int:
        """Released bindings and closed sessions whose end was not told yet."""
        return sum(b.released for b in self._bound) + len(self._session_idle)

    async def wait_event(self) -> None:
        """Until the next events were handled."""
        if self._next is None:
            self._next = self._loop.create_future()
        await asyncio.shield(self._next)

    def next_submission(self) -> asyncio.Future[None]:
        """Done with the next submission of any session, by ring or by call; one for all who ask."""
        if self._active is None or self._active.done():
            self._active = self._loop.create_future()
            self._native.tell_next()
        return self._active

    def session(self, session_id: int, *, max_in_flight: int, weight: int = 1) -> ExecutorSession:
        """A native session for one client."""
        return self._native.session(session_id, max_in_flight=max_in_flight, weight=weight)

    async def run(self, binding: ExecutorBinding, *, deadline_ns: int = 0) -> Timing:
        """Executes `binding` once.

        Cancelling the task cancels the submission when it is still queued; a running one ends by
        itself and its result is dropped.

        Raises:
            BrokerError: by the completion's code.
        """
        ticket = next(self._tickets)
        future: asyncio.Future[Timing] = self._loop.create_future()
        self._futures[ticket] = future
        if code := binding.submit(ticket, deadline_ns):
            del self._futures[ticket]
            raise completion_error(code, 0)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda f: f.cancelled() or f.exception())
            binding.session.cancel(ticket)
            raise

    def watch(self, binding: ExecutorBinding, bound: Bound) -> None:
        """Tells `bound` what happens to `binding` until it is released and idle."""
        self._bound[binding] = bound

    def watch_ring(self, session: ExecutorSession, when_broken: Callable[[], None]) -> None:
        """Runs `when_broken` on the loop when the session's ring makes no sense."""
        self._broken[session] = when_broken

    def close_session(self, session: ExecutorSession, when_idle: Callable[[], None]) -> None:
        """Closes `session`; `when_idle` runs once its bindings are gone and nothing runs."""
        self._session_idle[session] = when_idle
        self._broken.pop(session, None)
        session.close()

    async def stop(self) -> None:
        """Fails what is queued, waits for what runs. Events still arrive afterwards."""
        await self._loop.run_in_executor(None, self._native.stop)
        self._on_events()

    def close(self) -> None:
        """Frees the native part; every session must be gone. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._fd = -1
            self._native.close()

    def _on_events(self) -> None:
        for event in self._native.drain():
            if event[0] == "completed":
                _, _, ticket, status, qnn_code, queue_ns, execute_ns = event
                future = self._futures.pop(ticket, None)
                if future is None or future.done():
                    continue
                if status:
                    future.set_exception(completion_error(status, qnn_code))
                else:
                    future.set_result(Timing(queue_ns, execute_ns))
            elif event[0] == "binding_idle":
                bound = self._bound.get(event[1])
                if event[1].released:
                    self._bound.pop(event[1], None)
                call(bound.on_idle if bound else None)
            elif event[0] == "binding_wanted":
                bound = self._bound.get(event[1])
                call(bound.on_wanted if bound else None)
            elif event[0] == "session_idle":
                call(self._session_idle.pop(event[1], None))
            elif event[0] == "active":
                if self._active is not None and not self._active.done():
                    self._active.set_result(None)
            else:
                call(self._broken.pop(event[1], None))
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None


def call(then: Callable[[], None] | None) -> None:
    """Runs a callback; its failure must not lose the events behind it."""
    try:
        if then is not None:
            then()
    except Exception:
        log.exception("giving something back failed")


def completion_error(status: int, qnn_code: int) -> BrokerError:
    """The exception for a completion that failed, with the QNN code when there is one."""
    text = completion_text(status)
    if qnn_code:
        text = f"the QNN execute failed with code {qnn_code} ({name_of(qnn_code)})"
        text += completion_advice(status)
    error = from_completion(status, text)
    if qnn_code:
        error.ids = {**error.ids, "qnn_code": str(qnn_code), "operation": "graphExecute"}
    return error
