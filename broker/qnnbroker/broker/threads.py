# SPDX-License-Identifier: Apache-2.0
"""Threads for calls into the QNN library that take long: one for each call, gone when it is done.

A library keeps memory for every thread that ever called it, until the thread ends: libQnnHtp of the
emulation 5.3 MiB each. A pool's threads never end, so each of them would hold that for good.

The C library holds it a little longer: it keeps the stack of a thread that has ended, with all
that hangs on it, until a new thread takes the stack over; of what is freed then it gives only
large blocks (`heap.keep_below`) and the end of a heap back to the system. Hence `tidy`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, Protocol, TypeVar

#: How long there must be no call before `tidy` is called: the last thread has ended by then.
REST_SECONDS = 1.0
#: Threads of others that may have ended meanwhile, whose stacks are taken over first.
_OTHERS = 2

P = ParamSpec("P")
R = TypeVar("R")


class Closable(Protocol):
    """Something that has to be given back."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable | None)

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


async def made_on_thread(threads: Executor | None, make: Callable[[], C]) -> C:
    """What `make` makes on a thread; closed when the caller gives up meanwhile.

    Args:
        threads: None for those of the event loop.
    """
    making = asyncio.get_running_loop().run_in_executor(threads, make)

    def close(done: "asyncio.Future[C]") -> None:
        if (
            not done.cancelled()
            and done.exception() is None
            and (made := done.result()) is not None
        ):
            made.close()

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(close)
        raise


class FreshThreads(Executor):
    """Runs every call on a thread of its own, `limit` of them at a time; others wait in order.

    Any thread may use it. Do not fork while calls run.

    Args:
        limit: how many calls run at a time, at least 1.
        name: of the threads, followed by a number.
        tidy: called on another thread when there has been no call for `rest_seconds` after one, and
            what the C library kept of the threads that ended is free; must not raise.
    """

    def __init__(
        self,
        limit: int,
        name: str,
        *,
        tidy: Callable[[], object] | None = None,
        rest_seconds: float = REST_SECONDS,
    ) -> None:
        if limit < 1:
            raise ValueError(f"at least 1 thread wanted, found {limit}")
        self._limit = limit
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running = 0
        self._started = 0
        self._closed = False
        self._tidy = tidy
        self._rest_seconds = rest_seconds
        self._resting: threading.Thread | None = None  # waits for the time to tidy
        self._rests_since = 0.0
        self._most = 0  # calls at a time since it was last tidied

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """See `concurrent.futures.Executor.submit`.

        Raises:
            RuntimeError: after `shutdown`.
        """
        future: Future[R] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("no calls after shutdown")
            self._waiting.append((future, fn, args, kwargs))
            self._start_next()
        return future

    def _start_next(self) -> None:
        """As many as may run; the lock is held."""
        while self._waiting and self._running < self._limit:
            job = self._waiting.popleft()
            if not job[0].set_running_or_notify_cancel():
                continue
            self._started += 1
            thread = threading.Thread(
                target=self._run, args=(job,), name=f"{self._name}-{self._started}"
            )
            self._running += 1
            self._most = max(self._most, self._running)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more to give
                self._running -= 1
                job[0].set_exception(error)

    def _run(self, job: _Job) -> None:
        future, fn, args, kwargs = job
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            # Its memory must not wait for the next one's end, nor the result for this thread's.
            del job, future, fn, args, kwargs
            with self._changed:
                self._running -= 1
                self._start_next()
                if not self._running:
                    self._rest()
                self._changed.notify_all()

    def _rest(self) -> None:
        """The last call is over; the lock is held."""
        self._rests_since = time.monotonic()
        if self._tidy is None or self._resting is not None or self._closed:
            return
        self._resting = threading.Thread(target=self._wait_and_tidy, name=f"{self._name}-tidy")
        try:
            self._resting.start()
        except RuntimeError:  # there is none to be had; after the next call, then
            self._resting = None

    def _wait_and_tidy(self) -> None:
        with self._changed:
            while not self._closed:
                left = self._rests_since + self._rest_seconds - time.monotonic()
                if not self._running and left <= 0:
                    break
                self._changed.wait(None if self._running else left)
            self._resting = None
            most, self._most = self._most, 0
            closed = self._closed
        if not closed:
            self._tidy_below(most + _OTHERS)

    def _tidy_below(self, depth: int) -> None:
        """Tidies below so many threads that are alive at the same time: each takes over a stack."""
        assert self._tidy is not None
        if depth:
            thread = threading.Thread(
                target=self._tidy_below, args=(depth - 1,), name=f"{self._name}-tidy-{depth}"
            )
            try:
                thread.start()
            except RuntimeError:  # no more to be had: those that there are must do
                depth = 0
            else:
                thread.join()
        if not depth:
            self._tidy()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more calls; `wait` for those under way and those that wait, unless cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            dropped = list(self._waiting) if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
            if wait:
                self._changed.wait_for(lambda: not self._running and not self._waiting)
        for job in dropped:
            job[0].cancel()
