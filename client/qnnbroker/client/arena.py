# SPDX-License-Identifier: Apache-2.0
"""Arena: a few buffers of a session that hold the tensors of many bindings.

A binding takes one span for all its tensors. Buffers are added as needed, small ones first, each
the larger the more there are; a binding that fits into no such step gets a buffer of its own size.
Spans are reused lowest first, neighbours that are free become one, and a buffer that no open
binding has a part of goes back to the broker.

A span comes back when three things are true: its binding is closed, the broker has said that no run
writes into it any more, and no array over it is alive. So an array that somebody kept stays what it
was, and a late run of a closed binding harms nobody.
"""

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from qnnbroker.protos.errors import LimitExceeded

from .buffers import Buffer

#: Where spans, and the tensors in them, start.
ALIGNMENT_BYTES = 128
#: The first buffer, the step up to which they grow fast, and the largest step.
FIRST_BYTES = 1 << 16
FAST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 28


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """What a session's arena holds, in bytes and counts.

    `used_bytes` of `total_bytes` are in spans, `held_back` of which wait for arrays or late runs;
    `largest_free_bytes` against `free_bytes` says how fragmented it is.
    """

    buffers: int
    spans: int
    held_back: int
    total_bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int


class Chunk:
    """One buffer and which parts of it are free: (offset, size), by offset, none touching."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.free = [(0, buffer.size_bytes)]
        self.used_bytes = 0
        self.open_spans = 0  # of bindings that are not closed

    def take(self, size: int) -> int | None:
        """The offset of the first hole that is large enough, now used."""
        for i, (offset, room) in enumerate(self.free):
            if room >= size:
                self.free[i : i + 1] = [(offset + size, room - size)] if room > size else []
                self.used_bytes += size
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Frees a span and joins it with its neighbours."""
        i = 0
        while i < len(self.free) and self.free[i][0] < offset:
            i += 1
        start, end = offset, offset + size
        if i < len(self.free) and self.free[i][0] == end:
            end += self.free.pop(i)[1]
        if i > 0 and sum(self.free[i - 1]) == start:
            i -= 1
            start = self.free.pop(i)[0]
        self.free.insert(i, (start, end - start))
        self.used_bytes -= size


class ArrayRef(weakref.ref["npt.NDArray[Any]"]):
    """Watches one array for its span, without keeping either."""

    __slots__ = ("span",)

    span: "weakref.ref[Span]"


def array_gone(reference: "weakref.ref[npt.NDArray[Any]]") -> None:
    """From the garbage collector, on any thread, at any point: no lock may be taken here."""
    assert isinstance(reference, ArrayRef)
    span = reference.span()
    if span is not None:
        span.forget(reference)


class Span:
    """A part of a buffer for the tensors of one binding."""

    def __init__(self, arena: "Arena", chunk: Chunk, offset: int, size: int) -> None:
        self._arena = arena
        self.chunk = chunk
        self.offset = offset
        self.size = size
        self.arrays: dict[int, ArrayRef] = {}
        self.closed = False

    @property
    def buffer(self) -> Buffer:
        return self.chunk.buffer

    def track(self, array: npt.NDArray[Any]) -> None:
        """Keeps the span for as long as `array`, or a view of it, is alive."""
        # A view refers to the array that it was made from, so the array itself is all to watch.
        reference = ArrayRef(array, array_gone)
        reference.span = weakref.ref(self)
        self.arrays[id(reference)] = reference

    def forget(self, reference: "ArrayRef") -> None:
        """One of the arrays is gone."""
        self.arrays.pop(id(reference), None)
        self._arena.wake(self)

    @property
    def idle(self) -> bool:
        return self.closed and not self.arrays

    def close(self, running_binding: int = 0) -> None:
        """The binding is gone; a run of it may still write here when its id is given."""
        self._arena.close_span(self, running_binding)


class Owner(Protocol):
    """The session. It is passed to each call, since keeping it would be a cycle."""

    def alloc(self, size_bytes: int) -> Buffer: ...

    def release_binding(self, binding_id: int) -> bool: ...


class Arena:
    """The arena of one session. Threads: any.

    Args:
        max_buffer_bytes: the most that one buffer may have; 0 for no limit.
    """

    def __init__(self, max_buffer_bytes: int) -> None:
        self._most = min(LARGEST_BYTES, max_buffer_bytes or LARGEST_BYTES)
        self._lock = threading.Lock()
        self._chunks: list[Chunk] = []
        self._live: set[Span] = set()
        self._waiting: list[tuple[Span, int]] = []
        self._woken: deque[Span] = deque()

    def take(self, owner: Owner, size: int) -> Span:
        """A span of `size` bytes, aligned; what is in it is left over from earlier ones.

        Raises:
            LimitExceeded: the session may have, or the machine has, no more.
        """
        size = aligned(max(size, 1))
        self._ask_waiting(owner)
        with self._lock:
            self._reclaim()
            for chunk in self._chunks:
                if (offset := chunk.take(size)) is not None:
                    return self._add(chunk, offset, size)
            chunk = Chunk(self._grow(owner, size))
            self._chunks.append(chunk)
            offset = chunk.take(size)
            assert offset is not None
            return self._add(chunk, offset, size)

    def _add(self, chunk: Chunk, offset: int, size: int) -> Span:
        span = Span(self, chunk, offset, size)
        chunk.open_spans += 1
        self._live.add(span)
        return span

    def _grow(self, owner: Owner, size: int) -> Buffer:
        total = sum(c.buffer.size_bytes for c in self._chunks)
        step = FIRST_BYTES if not total else total * (3 if total < FAST_BYTES else 1)
        wanted = min(step, self._most)
        if size < wanted:
            try:
                return owner.alloc(wanted)
            except LimitExceeded:
                pass  # not in steps, then
        return owner.alloc(size)

    def wake(self, span: Span) -> None:
        """An array over a span is gone. Safe anywhere."""
        if span.closed:
            self._woken.append(span)

    def close_span(self, span: Span, running_binding: int) -> None:
        """See Span.close."""
        with self._lock:
            if span not in self._live:
                return
            span.chunk.open_spans -= 1
            span.closed = not running_binding
            if span.closed:
                self._woken.append(span)
            elif span.chunk.open_spans:
                self._waiting.append((span, running_binding))
            self._reclaim()
            spare = self._spare()
        for buffer in spare:
            buffer.drop()

    def _ask_waiting(self, owner: Owner) -> None:
        """Asks the broker again about bindings that were still running when they were released."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for span, binding_id in waiting:
            over = owner.release_binding(binding_id)
            with self._lock:
                if not over:
                    self._waiting.append((span, binding_id))
                elif span in self._live:
                    span.closed = True
                    self._woken.append(span)

    def _reclaim(self) -> None:
        """Takes back the spans that nobody needs."""
        while self._woken:
            span = self._woken.popleft()
            if span.idle and span in self._live:
                self._live.discard(span)
                span.chunk.give_back(span.offset, span.size)

    def _spare(self) -> list[Buffer]:
        """The buffers without open bindings, which are no longer ours. Arrays that are still held,
        and late runs, keep their memory."""
        spare = [c for c in self._chunks if not c.open_spans]
        for chunk in spare:
            self._chunks.remove(chunk)
        self._live = {s for s in self._live if s.chunk.open_spans}
        self._waiting = [w for w in self._waiting if w[0].chunk.open_spans]
        return [c.buffer for c in spare]

    def statistics(self) -> ArenaStatistics:
        """A snapshot."""
        with self._lock:
            free = [size for c in self._chunks for _, size in c.free]
            return ArenaStatistics(
                buffers=len(self._chunks),
                spans=len(self._live),
                held_back=sum(s.closed for s in self._live) + len(self._waiting),
                total_bytes=sum(c.buffer.size_bytes for c in self._chunks),
                used_bytes=sum(c.used_bytes for c in self._chunks),
                free_bytes=sum(free),
                largest_free_bytes=max(free, default=0),
            )
