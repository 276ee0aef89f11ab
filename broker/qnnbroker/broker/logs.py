# SPDX-License-Identifier: Apache-2.0
"""The broker's log on stderr, by a thread of its own: a stderr that nobody reads stops nobody.

Lines wait in a queue. When it is full the newest are dropped, and counted in the next line that is
written.
"""

import logging
import queue
import sys
import threading
from logging.handlers import QueueHandler
from typing import TextIO

_MAX_LINES = 4096
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogWriter(QueueHandler):
    """A handler for the root logger. Threads: any; none ever waits in it."""

    def __init__(self, stream: TextIO | None = None, max_lines: int = _MAX_LINES) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(max_lines)
        super().__init__(self._lines)
        # Or logging.basicConfig would give it one that writes the heading, too.
        self.setFormatter(logging.Formatter("%(message)s"))
        self._out = logging.StreamHandler(stream or sys.stderr)
        self._out.setFormatter(logging.Formatter(_FORMAT))
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="qnnbroker-log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Puts it in the queue, or drops it."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            if dropped:
                record.msg = f"{record.msg} ({dropped} lines before this were lost)"
            self._out.handle(record)

    def finish(self, seconds: float) -> bool:
        """Writes what waits, for so long at most; whether all of it was written."""
        try:
            self._lines.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(seconds)
        return not self._thread.is_alive()
