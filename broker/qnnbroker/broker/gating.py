# SPDX-License-Identifier: Apache-2.0
"""Gate: whether contexts may be created at this moment, and what is under way with the library.

A reset shuts it. Loads wait in front of it then: whoever would have met the device that goes gets
the one that comes.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from qnnbroker.protos.errors import LeaseRevoked

if TYPE_CHECKING:
    from .contexts import Context


class Gate:
    """Open unless somebody shut it. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside: dict[object, str] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def closing_count(self) -> int:
        """Contexts being freed now."""
        return len(self._closing)

    def under_way(self) -> list[str]:
        """What the library does with contexts, in words."""
        freed = [f"{self.closing_count} being freed"] if self._closing else []
        return [*self._inside.values(), *freed]

    def shut(self) -> None:
        """Nobody passes until `open`; who is inside goes on."""
        self._open.clear()

    def open(self) -> None:
        """Who waits goes on."""
        self._open.set()

    async def passed(self) -> None:
        """Until it is open. What was known before may not hold afterwards."""
        while not self._open.is_set():  # it may be shut again before we are woken
            await self._open.wait()

    @contextlib.asynccontextmanager
    async def creating(self, what: str) -> AsyncIterator[None]:
        """Waits until it is open, and is inside for the block. Leaving does not suspend."""
        await self.passed()
        with self.inside(what):
            yield

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Is inside for the block, without a wait: for who has just `passed`."""
        key = object()
        self._inside[key] = what
        self._empty.clear()
        try:
            yield
        finally:
            del self._inside[key]
            if not self._inside:
                self._empty.set()

    def add_closing(self, task: "asyncio.Task[None]") -> None:
        """A context is being freed. That waits for nobody: what is freed is out of the way."""
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def wait_closed(self) -> None:
        """Until no context is being freed."""
        while self._closing:
            await asyncio.wait(self._closing)

    async def wait_quiet(self) -> None:
        """Until none is created or freed; that lasts until the next await, when it is shut."""
        while self._inside or self._closing:
            await self._empty.wait()
            await self.wait_closed()


def check_usable(context: "Context") -> None:
    """Whether its graphs can be bound.

    Raises:
        LeaseRevoked: it is lost.
    """
    if context.lost is not None:
        raise LeaseRevoked(
            f"context {context.context_id} is lost: {context.lost}; load its model again, or reset "
            "the backend (once more)",
            context_id=context.context_id,
            lost=context.lost.reason,
        )
