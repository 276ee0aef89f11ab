# SPDX-License-Identifier: Apache-2.0
"""Registrar: makes and takes back registrations on a thread of its own, one after the other.

A call into the library may be slow, or never return: then bindings wait, but neither clients that
attach, nor calls, nor a stop.

What is to be done is a generator of steps: it runs on the event loop, and each call that it yields
runs on the thread and comes back as the value of the yield. A task that awaits a future of a thread
pool does the same over twice as many rounds of the loop, 0.1 ms in the making of a binding.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

#: How long `start` itself waits for the first call, if asked: twice what registering a graph's
#: memory takes. The event loop stands still meanwhile, and is spared waking up for it.
PATIENCE_SECONDS = 0.0002

#: Yields what the thread is to call, is sent what that returned or thrown what it raised.
Steps = Generator[Callable[[], Any], Any, T]


class Registrar:
    """Belongs to the event loop's thread. Its own thread is there from the first call on."""

    def __init__(self) -> None:
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Something of `start` is under way."""
        return self._under_way > 0

    def start(self, steps: Steps[T], *, wait: bool = False) -> "asyncio.Future[T]":
        """Runs the steps up to their first call now, and to their end whoever waits for it.

        Args:
            wait: for that call, too, PATIENCE_SECONDS at most, unless the thread is busy already.

        Returns:
            What they return or raise. Cancelling that stops nothing.
        """
        loop = asyncio.get_running_loop()
        self._under_way += 1
        self._idle.clear()
        call = _Call(self, loop, steps, loop.create_future())
        call.go_on(None, None, wait=wait and self._under_way == 1)
        return call.told

    def give(self, call: "_Call") -> None:
        """Work for the thread, after what was given to it before.

        Raises:
            RuntimeError: the system has no thread to give.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="qnnbroker-memory", daemon=True)
            thread.start()
            self._thread = thread
        self._calls.put(call)

    def ended(self) -> None:
        """Something of `start` has ended."""
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Until nothing is under way."""
        while self._under_way:
            await self._idle.wait()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call  # what it holds must not wait for the next one

    def close(self) -> None:
        """Ends the thread, which must be idle."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()


class _Call:
    """Steps, and where they are."""

    def __init__(
        self,
        registrar: Registrar,
        loop: asyncio.AbstractEventLoop,
        steps: Steps[Any],
        told: "asyncio.Future[Any]",
    ) -> None:
        self._registrar = registrar
        self._loop = loop
        self._steps = steps
        self._work: Callable[[], Any] | None = None
        self._lock = threading.Lock()  # for these two
        self._outcome: tuple[object, BaseException | None] | None = None
        self._awaited: threading.Event | None = None
        self.told = told

    def go_on(self, result: object, error: BaseException | None, *, wait: bool = False) -> None:
        """The next step, on the event loop."""
        steps = self._steps
        try:
            self._work = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as stop:
            if not self.told.done():
                self.told.set_result(stop.value)
        except BaseException as raised:
            if not self.told.done():
                self.told.set_exception(raised)
        else:
            self._outcome = None
            self._awaited = threading.Event() if wait else None
            try:
                self._registrar.give(self)
            except RuntimeError as none:
                self._loop.call_soon(self.go_on, None, none)
            else:
                if wait:
                    self._wait()
            return
        self._registrar.ended()

    def _wait(self) -> None:
        """Goes on here when the call is over soon; else that is left to `run`."""
        assert self._awaited is not None
        self._awaited.wait(PATIENCE_SECONDS)
        with self._lock:
            self._awaited = None
            outcome = self._outcome
        if outcome is not None:
            self.go_on(*outcome)

    def run(self) -> None:
        """The call, on the thread."""
        work, self._work = self._work, None
        assert work is not None
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._outcome = result, error
            awaited = self._awaited
        del error  # its traceback holds this frame
        if awaited is not None:
            awaited.set()
            return
        outcome, self._outcome = self._outcome, None
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the process ends
            self._loop.call_soon_threadsafe(self.go_on, *outcome)
