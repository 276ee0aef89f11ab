# SPDX-License-Identifier: Apache-2.0
"""Looks after files that contexts go on reading: who would write one waits, and not for ever.

A page that is gone below a reader is a SIGBUS, which no process survives. So the context is moved
to a copy, on a thread that no load and no hash can occupy; if there is no room for one, it is tried
again for half the time that the kernel gives us, and then the context is lost, not the broker.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from qnnbroker.protos.errors import InvalidRequest

from .backends.base import BackendContext
from .leases import break_seconds
from .threads import FreshThreads

if TYPE_CHECKING:
    from .contexts import Context

log = logging.getLogger(__name__)

#: How often a file is looked at; who would write it waits so long.
WATCH_SECONDS = 1.0
#: Files that are copied at a time.
_RESCUES = 16


class BinaryWatch:
    """Belongs to the event loop's thread.

    Args:
        lose: called when a context's file goes, and why no copy could be made of it.
    """

    def __init__(self, lose: Callable[["Context", BaseException], None]) -> None:
        self._lose = lose
        self._threads = FreshThreads(_RESCUES, "qnnbroker-rescue")
        self._threatened: dict[Context, float] = {}
        self._closed = False

    def add(self, context: "Context") -> None:
        """Looks after its file as long as its native part lives."""
        loop = asyncio.get_running_loop()
        loop.call_later(WATCH_SECONDS, self._look, context, context.native)

    def _look(self, context: "Context", native: BackendContext | None) -> None:
        if self._closed or native is None or context.native is not native:
            self._threatened.pop(context, None)
            return
        if context.file.safe:
            self._threatened.pop(context, None)
            return self.add(context)
        loop = asyncio.get_running_loop()
        self._threatened.setdefault(context, loop.time())
        file = context.file.share()  # the context may be freed meanwhile

        def move() -> None:
            try:
                file.ensure(context.content_hash, then=native.move_binary)
            finally:
                file.close()

        moving = loop.run_in_executor(self._threads, move)
        moving.add_done_callback(lambda done: self._moved(context, native, done.exception()))

    def _moved(
        self, context: "Context", native: BackendContext, error: BaseException | None
    ) -> None:
        if self._closed or context.native is not native:
            self._threatened.pop(context, None)
        elif error is None:
            log.info("context %d reads a copy now: its file changes", context.context_id)
            self.add(context)
        elif isinstance(error, InvalidRequest) or self._is_late(context):
            self._threatened.pop(context, None)
            self._lose(context, error)
        else:
            log.warning(
                "context %d reads a file that somebody waits to write, and cannot be moved yet: %s",
                context.context_id,
                error,
            )
            self.add(context)

    def _is_late(self, context: "Context") -> bool:
        """Whether half the time is over that the kernel holds a writer back; 0 means for ever."""
        waited = asyncio.get_running_loop().time() - self._threatened[context]
        return 0 < break_seconds() / 2 < waited

    def close(self) -> None:
        """Waits for the copies under way: blocks. Nothing is looked after any more."""
        self._closed = True
        self._threads.shutdown()
