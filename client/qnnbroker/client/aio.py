# SPDX-License-Identifier: Apache-2.0
"""Runs of bindings for asyncio: `await run(binding)`, through the completion doorbell.

The rest of a session (connect, load, bind) blocks for a moment; call it with `asyncio.to_thread`.
"""

import asyncio
import contextlib
import time
import weakref

from qnnbroker.native.ring import RingLost
from qnnbroker.protos.errors import (
    BrokerError,
    DeadlineExpired,
    InvalidRequest,
    SessionClosed,
    WouldBlock,
)

from .bindings import Binding
from .hotpath import HotPath, broker_lost, nanoseconds
from .timing import Timing

#: Pause before another try when as much is in flight as the session may have.
_RETRY_SECONDS = 0.0005

_watchers: "weakref.WeakKeyDictionary[HotPath, _Watcher]" = weakref.WeakKeyDictionary()


async def run(binding: Binding, *, timeout: float | None = None) -> Timing:
    """Runs `binding` once; other tasks go on meanwhile. Many may be awaited at once.

    Cancelling the task cancels the run if it is still queued; one that runs ends by itself, so
    leave the arrays alone for a while then.

    Args:
        timeout: seconds until the broker gives up on starting it; None: the session's call_timeout.

    Raises:
        DeadlineExpired, BrokerLost, SessionClosed, BrokerError: what happened instead.
    """
    binding.check()
    hot = binding.graph.session.hot_path()
    seconds = binding.graph.session.call_timeout if timeout is None else timeout
    deadline_ns = time.monotonic_ns() + nanoseconds(seconds)
    watcher = _watcher(hot)
    while True:
        try:
            binding.hand_over()
            try:
                return await watcher.run(binding.binding_id, deadline_ns)
            finally:
                binding.take_back()
        except WouldBlock as error:
            if time.monotonic_ns() >= deadline_ns:
                raise DeadlineExpired(
                    "no room for a submission in time", reason="QUEUED"
                ) from error
        await asyncio.sleep(_RETRY_SECONDS)


def _watcher(hot: HotPath) -> "_Watcher":
    loop = asyncio.get_running_loop()
    watcher = _watchers.get(hot)
    if watcher is None or watcher.loop.is_closed():
        watcher = _watchers[hot] = _Watcher(hot, loop)
    elif watcher.loop is not loop:
        raise InvalidRequest("the runs of one session are awaited in one event loop")
    return watcher


class _Watcher:
    """Hears the doorbell for one loop while something is awaited."""

    def __init__(self, hot: HotPath, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ring = hot.ring
        self._hot = weakref.ref(hot)
        self._futures: dict[int, asyncio.Future[Timing]] = {}
        self._bindings: dict[int, int] = {}
        self._listening = False

    async def run(self, binding_id: int, deadline_ns: int) -> Timing:
        hot = self._hot()
        if hot is None:
            raise SessionClosed("the session is closed")
        ticket = hot.submit(binding_id, deadline_ns, watched=True)
        future: asyncio.Future[Timing] = self.loop.create_future()
        self._futures[ticket] = future
        self._bindings[ticket] = binding_id
        if not self._listening:
            self._listening = True
            self.loop.add_reader(self._ring.fileno(), self._on_doorbell)
            self._ring.watch(self._pass_on)
        self._on_doorbell()  # arms it, and sees what was quicker
        try:
            return await future
        except asyncio.CancelledError:
            if ticket in self._futures:
                self._ring.cancel(ticket)
                self._ring.abandon(ticket)
                self._forget(ticket)
            raise

    def _forget(self, ticket: int) -> "asyncio.Future[Timing] | None":
        self._bindings.pop(ticket, None)
        future = self._futures.pop(ticket, None)
        if not self._futures and self._listening:
            self._listening = False
            self.loop.remove_reader(self._ring.fileno())
            self._ring.watch(None)  # which may close that fd
        return future

    def _pass_on(self) -> None:
        """From any thread: something came for this loop."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self._on_doorbell)

    def _on_doorbell(self) -> None:
        if not self._futures:
            return  # told twice
        try:
            completions = self._ring.take_watched()
        except (RingLost, ValueError) as error:
            self._fail_all(
                broker_lost() if isinstance(error, RingLost) else SessionClosed("it was closed")
            )
            return
        for ticket, status, queue_ns, execute_ns, copied_bytes in completions:
            binding_id = self._bindings.get(ticket, 0)
            future = self._forget(ticket)
            if future is None or future.done():
                continue
            if status:
                hot = self._hot()
                future.set_exception(
                    hot.failure(status, binding_id) if hot else SessionClosed("it was closed")
                )
            else:
                future.set_result(Timing(queue_ns, execute_ns, copied_bytes))

    def _fail_all(self, error: BrokerError) -> None:
        for ticket in list(self._futures):
            future = self._forget(ticket)
            if future is not None and not future.done():
                future.set_exception(error)
