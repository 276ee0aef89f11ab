# SPDX-License-Identifier: Apache-2.0
"""Threads for calls into the QNN library that take long: one for each call, gone when it is done.

A library keeps memory for every thread that ever called it, until the thread ends: libQnnHtp of the
emulation 5.3 MiB each. A pool's threads never end, so each of them would hold that for good.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, Protocol, TypeVar

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
    """

    def __init__(self, limit: int, name: str) -> None:
        if limit < 1:
            raise ValueError(f"at least 1 thread wanted, found {limit}")
        self._limit = limit
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._running = 0
        self._started = 0
        self._closed = False

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
                self._changed.notify_all()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more calls; `wait` for those under way and those that wait, unless cancelled."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting) if cancel_futures else []
            if cancel_futures:
                self._waiting.clear()
            if wait:
                self._changed.wait_for(lambda: not self._running and not self._waiting)
        for job in dropped:
            job[0].cancel()
