# SPDX-License-Identifier: Apache-2.0
"""What became of models that are not resident: known ones, and loads that failed, for people."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qnnbroker.protos.errors import BrokerError

#: Lines kept; the oldest goes.
MAX_LINES = 64


class Key(Protocol):
    """What identifies a context."""

    @property
    def content_hash(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Line:
    """A model that is not resident. `state` is "known" (it was) or "failed"."""

    state: str
    content_hash: str
    names: tuple[str, ...]
    size_bytes: int
    reason: str = ""
    detail: str = ""
    since: float = field(default_factory=time.monotonic)
    run_count: int = 0  # while it was resident the last time
    idle_at: float | None = None  # when the last execute ended, on the monotonic clock; None: never

    def idle_seconds(self) -> float:
        """Since its last execute ended; -1 when there was none."""
        return -1.0 if self.idle_at is None else time.monotonic() - self.idle_at


class History:
    """The last few, by what they are. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._lines: dict[object, Line] = {}

    def failed(self, key: Key, names: Sequence[str], size_bytes: int, error: BaseException) -> None:
        """A load ended in an error."""
        reason = error.reason if isinstance(error, BrokerError) else type(error).__name__
        self._put(
            key, Line("failed", key.content_hash, tuple(names), size_bytes, reason, str(error))
        )

    def known(
        self,
        key: Key,
        names: Sequence[str],
        size_bytes: int,
        *,
        run_count: int,
        idle_seconds: float,
    ) -> None:
        """A context was freed, and could be loaded again.

        Args:
            idle_seconds: since its last execute ended; negative when there was none.
        """
        line = Line(
            "known",
            key.content_hash,
            tuple(names),
            size_bytes,
            run_count=run_count,
            idle_at=None if idle_seconds < 0 else time.monotonic() - idle_seconds,
        )
        self._put(key, line)

    def forget(self, key: Key) -> None:
        """It is resident."""
        self._lines.pop(key, None)

    def _put(self, key: Key, line: Line) -> None:
        self._lines.pop(key, None)
        if len(self._lines) >= MAX_LINES:
            del self._lines[next(iter(self._lines))]
        self._lines[key] = line

    def lines(self) -> list[Line]:
        """Oldest first."""
        return list(self._lines.values())
