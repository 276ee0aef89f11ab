# SPDX-License-Identifier: Apache-2.0
"""Shared buffers of one session: allocated, sealed, counted, given back."""

import asyncio
from dataclasses import dataclass

from qnnbroker.native.region import Region
from qnnbroker.protos.errors import InvalidRequest, LimitExceeded

from .config import BrokerConfig
from .ids import IdTable


@dataclass(eq=False)
class SharedBuffer:
    """A region the broker made and lent to one session.

    Released, it refuses new bindings; the memory goes with the last binding that uses it.
    """

    buffer_id: int
    region: Region

    @property
    def size_bytes(self) -> int:
        return self.region.size_bytes


class BufferTable:
    """The buffers of one session."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
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

    async def allocate(self, size_bytes: int) -> SharedBuffer:
        """A new buffer of at least `size_bytes`, really there (no page fault will fail).

        Raises:
            InvalidRequest: no size.
            LimitExceeded: reason BUFFER_BYTES, BUFFERS or MEMORY.
        """
        config = self._config
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
            region = await asyncio.to_thread(Region.create, size_bytes)
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
        buffer = self._ids.add(lambda id: SharedBuffer(id, region))
        self._bytes += region.size_bytes
        return buffer

    def get(self, buffer_id: int) -> SharedBuffer:
        """The buffer; NotFound or LeaseRevoked otherwise."""
        return self._ids.get(buffer_id)

    def release(self, buffer_id: int) -> None:
        """Gives it back; bindings over it keep the memory until they go."""
        buffer = self._ids.remove(buffer_id)
        self._bytes -= buffer.size_bytes
        buffer.region.release()

    def close(self) -> None:
        """Gives all back. Idempotent."""
        self._closed = True
        for buffer in list(self._ids):
            self.release(buffer.buffer_id)
