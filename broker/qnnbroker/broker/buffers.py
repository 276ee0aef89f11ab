# SPDX-License-Identifier: Apache-2.0
"""Shared buffers of one session: allocated, sealed, counted, given back."""

from dataclasses import dataclass

from qnnbroker.native.region import Region
from qnnbroker.protos.errors import InvalidRequest, LimitExceeded

from .buffer_memory import BufferMemory
from .config import BrokerConfig
from .ids import IdTable
from .threads import made_on_thread


@dataclass(eq=False)
class SharedBuffer:
    """A region the broker made and lent to one session.

    Released, it refuses new bindings; the memory goes with the last binding that uses it, be that
    live or parked.
    """

    buffer_id: int
    region: Region
    kind: int
    #: Bindings over it.
    users: int = 0
    released: bool = False

    @property
    def size_bytes(self) -> int:
        return self.region.size_bytes

    def release(self) -> None:
        """The session gives it back."""
        self.released = True
        if not self.users:
            self.region.release()

    def let_go(self) -> None:
        """A binding over it is gone."""
        self.users -= 1
        if self.released and not self.users:
            self.region.release()


class BufferTable:
    """The buffers of one session."""

    def __init__(self, config: BrokerConfig, memory: BufferMemory | None = None) -> None:
        self._config = config
        self._memory = memory or BufferMemory(config)
        self._ids: IdTable[SharedBuffer] = IdTable("buffer", "BUFFER_UNKNOWN")
        self._bytes = 0
        self._reserved = 0
        self._reserved_bytes = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def total_bytes(self) -> int:
        """Shared memory of this session."""
        return self._bytes

    def bytes_of(self, kind: int) -> int:
        """Shared memory of this session that is of one kind."""
        return sum(b.size_bytes for b in self._ids if b.kind == kind)

    async def allocate(self, size_bytes: int, asked_kind: int = 0) -> SharedBuffer:
        """A new buffer of at least `size_bytes`, really there (no page fault will fail).

        Args:
            asked_kind: a BufferKind; 0 leaves it to the broker.

        Raises:
            InvalidRequest: no size.
            LimitExceeded: reason BUFFER_BYTES, BUFFERS or MEMORY.
            Unsupported: a kind that is not to be had here.
        """
        config = self._config
        kind = self._memory.kind_of(asked_kind)
        if size_bytes < 1:
            raise InvalidRequest("a buffer of at least 1 byte wanted, found 0")
        if size_bytes > config.max_buffer_bytes:
            raise LimitExceeded(
                f"a buffer of {size_bytes} bytes asked for; at most {config.max_buffer_bytes} "
                "are allowed",
                reason="BUFFER_BYTES",
            )
        if self._bytes + self._reserved_bytes + size_bytes > config.max_session_bytes:
            raise LimitExceeded(
                f"the session holds {self._bytes} bytes of buffers; {size_bytes} more would pass "
                f"its limit of {config.max_session_bytes}",
                reason="BUFFER_BYTES",
            )
        if len(self._ids) + self._reserved >= config.max_buffers:
            raise LimitExceeded(
                f"the session holds {len(self._ids)} buffers, its limit", reason="BUFFERS"
            )
        self._reserved += 1
        self._reserved_bytes += size_bytes
        try:
            # Filling gigabytes with zero pages takes a while: not on the event loop.
            make = self._memory.maker(kind)
            region = await made_on_thread(None, lambda: make(size_bytes))
        except OSError as error:
            raise LimitExceeded(
                f"the system refused a buffer of {size_bytes} bytes: {error.strerror}",
                reason="MEMORY",
            ) from error
        finally:
            self._reserved -= 1
            self._reserved_bytes -= size_bytes
        if self._closed:
            region.close()
            raise InvalidRequest("the session ended while the buffer was allocated")
        buffer = self._ids.add(lambda id: SharedBuffer(id, region, kind))
        self._bytes += region.size_bytes
        return buffer

    def get(self, buffer_id: int) -> SharedBuffer:
        """The buffer; NotFound or LeaseRevoked otherwise."""
        return self._ids.get(buffer_id)

    def release(self, buffer_id: int) -> None:
        """Gives it back; bindings over it keep the memory until they go."""
        buffer = self._ids.remove(buffer_id)
        self._bytes -= buffer.size_bytes
        buffer.release()

    def close(self) -> None:
        """Gives all back. Idempotent."""
        self._closed = True
        for buffer in list(self._ids):
            self.release(buffer.buffer_id)
