# SPDX-License-Identifier: Apache-2.0
"""Registrar: makes and takes back registrations on a thread of its own, one after the other.

A call into the library may be slow, or never return: then bindings wait, but neither clients that
attach, nor calls, nor a stop.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Registrar:
    """Belongs to the event loop's thread. Its own thread is there from the first call on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "qnnbroker-memory")
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Something of `start` is under way."""
        return bool(self._tasks)

    async def call(self, work: Callable[[], T]) -> T:
        """`work` on the thread, after what was given to it before. Not to be cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Runs `work`, whoever waits for it, and is busy until it has ended."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_idle(self) -> None:
        """Until nothing is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Ends the thread, which must be idle."""
        self._thread.shutdown()
