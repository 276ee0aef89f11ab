# SPDX-License-Identifier: Apache-2.0
"""Buffer: shared memory of the broker, leased by this session and mapped here."""

import contextlib
import math
import operator
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from qnnbroker.native.dmabuf import READ, WRITE, begin_access, end_access, is_dma_buf
from qnnbroker.native.region import Region, span_ok
from qnnbroker.protos import attach as frames
from qnnbroker.protos.errors import InvalidRequest, LeaseRevoked, ProtocolError
from qnnbroker.protos.tensors import dtype_number
from qnnbroker.v1 import attach_pb2

from .attach import AttachConnection, parse

if TYPE_CHECKING:
    from .session import Session


#: What `cpu_access` gives where caches need no care.
NOTHING_TO_DO: "contextlib.AbstractContextManager[None]" = contextlib.nullcontext()
KINDS = {
    None: attach_pb2.BUFFER_KIND_UNSPECIFIED,
    "memfd": attach_pb2.BUFFER_KIND_MEMFD,
    "rpcmem": attach_pb2.BUFFER_KIND_RPCMEM,
}


class CpuAccess:
    """A bracket around CPU access to a DMA buffer. Not to be nested with others of the buffer."""

    def __init__(self, fd: int, access: int) -> None:
        self._fd = fd
        self._access = access

    def __enter__(self) -> None:
        begin_access(self._fd, self._access)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_access(self._fd, self._access)


def to_device(buffers: "Iterable[Buffer]") -> None:
    """What the CPU wrote is for the device now: before a run."""
    for buffer in buffers:
        end_access(buffer.region.fileno(), READ | WRITE)


def to_cpu(buffers: "Iterable[Buffer]") -> None:
    """What the device wrote is for the CPU now: after a run."""
    for buffer in buffers:
        begin_access(buffer.region.fileno(), READ | WRITE)


class Buffer:
    """Shared memory that the NPU reads and writes in place. Made by `Session.alloc`.

    `memoryview(buffer.region)` and `numpy()` give the bytes without a copy. A view keeps the memory
    mapped for as long as it lives, also after the session has ended; then only nobody else looks.

    Threads: any; who writes where is for its users to agree on.
    Fork: a child sees the memory in its old views; it may not call anything here.
    """

    def __init__(
        self, session: "Session", buffer_id: int, region: Region, kind: str = "memfd"
    ) -> None:
        self._session = session
        self._region = region
        self._buffer_id = buffer_id
        self._released = False
        self._kind = kind
        self._needs_sync = is_dma_buf(region.fileno())
        if self._needs_sync:
            begin_access(region.fileno(), READ | WRITE)

    @property
    def kind(self) -> str:
        """What it is made of: "memfd" or "rpcmem"."""
        return self._kind

    @property
    def needs_sync(self) -> bool:
        """Whether CPU access has to be bracketed; `run` and `submit` do that themselves."""
        return self._needs_sync

    def cpu_access(
        self, *, read: bool = True, write: bool = True
    ) -> "contextlib.AbstractContextManager[None]":
        """Brackets what the CPU does with the memory, for who runs with `run(sync=False)`.

        Entering makes what the device wrote visible here, leaving what was written here visible to
        the device. On a memfd both cost nothing.
        """
        if not self._needs_sync:
            return NOTHING_TO_DO
        return CpuAccess(self._region.fileno(), (READ if read else 0) | (WRITE if write else 0))

    @property
    def buffer_id(self) -> int:
        return self._buffer_id

    @property
    def size_bytes(self) -> int:
        """What was asked for, rounded up to whole pages."""
        return self._region.size_bytes

    @property
    def session(self) -> "Session":
        return self._session

    @property
    def region(self) -> Region:
        """The mapping; has the buffer protocol."""
        return self._region

    @property
    def released(self) -> bool:
        return self._released

    def numpy(
        self,
        dtype: npt.DTypeLike,
        shape: SupportsIndex | Sequence[SupportsIndex],
        offset: int = 0,
    ) -> npt.NDArray[Any]:
        """A writable array over the bytes from `offset`, in C order.

        Raises:
            InvalidRequest: reason BAD_OFFSET (the array leaves the buffer) or BAD_ALIGNMENT.
            Unsupported: a dtype that no tensor has.
            LeaseRevoked: the buffer is released.
            SessionClosed: the session is.
        """
        kind = np.dtype(dtype)
        dtype_number(kind)
        dims = tuple(
            operator.index(d) for d in ([shape] if isinstance(shape, SupportsIndex) else shape)
        )
        if any(d < 0 for d in dims):
            raise InvalidRequest(f"the shape {dims} has a negative dimension")
        return self.array(kind, dims, offset)

    def array(
        self, dtype: "np.dtype[Any]", shape: tuple[int, ...], offset: int, *, writable: bool = True
    ) -> npt.NDArray[Any]:
        """`numpy` for arguments that are known to be good, but for the place."""
        self._session.check()
        size = math.prod(shape) * dtype.itemsize
        if not span_ok(self.size_bytes, offset, size):
            raise InvalidRequest(
                f"{size} bytes from offset {offset} leave buffer {self._buffer_id}, which has "
                f"{self.size_bytes}",
                reason="BAD_OFFSET",
                buffer_id=self._buffer_id,
            )
        if offset % dtype.itemsize:
            raise InvalidRequest(
                f"offset {offset} in buffer {self._buffer_id} is not a multiple of "
                f"{dtype.itemsize}, the size of {dtype}",
                reason="BAD_ALIGNMENT",
                buffer_id=self._buffer_id,
            )
        try:
            view = self._region.view(offset, size)
        except ValueError as exc:
            raise LeaseRevoked(
                f"buffer {self._buffer_id} is released", buffer_id=self._buffer_id
            ) from exc
        return np.ndarray(shape, dtype, buffer=view if writable else view.toreadonly())

    def release(self) -> None:
        """Gives the buffer back. Does nothing when released or when the session has ended.

        Raises:
            BufferError: views of it are alive, here or in an open binding; nothing is changed.
        """
        if not self._released:
            self._region.close()
            self._give_back()

    def drop(self) -> None:
        """Gives the buffer back although views may be alive: they keep only the memory."""
        if not self._released:
            self._region.release()
            self._give_back()

    def forget(self) -> None:
        """Lets the memory go with its last view, without a word to the broker (which knows)."""
        self._released = True
        self._region.release()

    def _give_back(self) -> None:
        self._released = True
        self._session.release_buffer(self._buffer_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A view may live in the traceback of `error`; refusing to go would hide that error.
        if error is None:
            self.release()
        else:
            self.drop()

    def __repr__(self) -> str:
        state = ", released" if self._released else ""
        return f"<Buffer {self._buffer_id}, {self.size_bytes} bytes{state}>"


def allocate(
    session: "Session",
    attach: AttachConnection,
    size_bytes: SupportsIndex,
    kind: str | None,
    timeout: float,
) -> Buffer:
    """Asks the broker for a buffer and maps it; see `Session.alloc`."""
    size = operator.index(size_bytes)
    if not 1 <= size < 2**64:
        raise InvalidRequest(f"a buffer of {size} bytes; at least 1 is wanted")
    if kind not in KINDS:
        raise InvalidRequest(f"a buffer of memfd or rpcmem wanted, found {kind!r}")
    request = attach_pb2.AllocRequest(size_bytes=size, buffer_kind=KINDS[kind])
    body, (fd,) = attach.request(
        frames.Kind.ALLOC, request.SerializeToString(), timeout, fd_count=1
    )
    try:
        answer = parse(attach_pb2.AllocResponse, body)
        least = max(size, answer.size_bytes)
        rpcmem = answer.buffer_kind == attach_pb2.BUFFER_KIND_RPCMEM
        if rpcmem and is_dma_buf(fd):
            region = Region.from_dma_buf(fd, size_bytes=least)
        else:
            region = Region.from_fd(fd, size_bytes=least)
    except ValueError as exc:
        raise ProtocolError(f"the broker sent no good buffer: {exc}") from exc
    finally:
        os.close(fd)
    return Buffer(session, answer.buffer_id, region, "rpcmem" if rpcmem else "memfd")
