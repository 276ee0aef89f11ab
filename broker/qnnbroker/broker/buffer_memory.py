# SPDX-License-Identifier: Apache-2.0
"""BufferMemory: what shared buffers are made of, rpcmem where the machine has it, else memfds."""

import errno
import logging
from collections.abc import Callable

from qnnbroker.native.dmabuf import READ, WRITE, begin_access, end_access, is_dma_buf
from qnnbroker.native.region import Region
from qnnbroker.native.rpcmem import DEFAULT_LIBRARY, RpcMem
from qnnbroker.protos.errors import BrokerUnavailable, Unsupported
from qnnbroker.v1 import attach_pb2

from .config import BrokerConfig

log = logging.getLogger(__name__)

MEMFD, RPCMEM = attach_pb2.BUFFER_KIND_MEMFD, attach_pb2.BUFFER_KIND_RPCMEM
#: Small memory to ask a device with.
PROBE_BYTES = 4096


class BufferMemory:
    """Makes the memory of buffers. Threads: any.

    Args:
        config: `buffer_memory` and the `rpcmem_*` options.

    Raises:
        BrokerUnavailable: `buffer_memory` is rpcmem and there is none.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self._rpcmem: RpcMem | None = None
        path = config.rpcmem_library or DEFAULT_LIBRARY
        try:
            self._rpcmem = RpcMem(path, heap=config.rpcmem_heap, flags=config.rpcmem_flags)
            self.detail = f"rpcmem of {path}, heap {config.rpcmem_heap}"
            if not self._rpcmem.has_alloc2:
                self.detail += ", without rpcmem_alloc2: less than 2 GiB at a time"
        except OSError as error:
            self.detail = f"no rpcmem: {error.strerror}"
            if config.buffer_memory == "rpcmem":
                raise BrokerUnavailable(
                    f"buffer_memory is rpcmem, but there is none: {error.strerror}",
                    reason="NPU_LOST",
                ) from error
        use = config.buffer_memory != "memfd" and self._rpcmem is not None
        self.default_kind = RPCMEM if use else MEMFD
        log.info("buffers are %s (%s)", "rpcmem" if use else "memfds", self.detail)

    def kind_of(self, asked: int) -> int:
        """The kind that an ALLOC gets.

        Raises:
            Unsupported: reason BACKEND_LACKS; there is no rpcmem here, or an unknown kind.
        """
        if asked == attach_pb2.BUFFER_KIND_UNSPECIFIED:
            return self.default_kind
        if asked == MEMFD:
            return MEMFD
        if asked != RPCMEM:
            raise Unsupported(f"this broker has no buffers of kind {asked}")
        if self._rpcmem is None:
            raise Unsupported(f"an rpcmem buffer was asked for; {self.detail}")
        return RPCMEM

    def maker(self, kind: int) -> Callable[[int], Region]:
        """What makes memory of that kind, all of it there and zeroed; blocks while it does.

        Raises (the maker): OSError: there is not enough.
        """
        return Region.create if kind == MEMFD else self._create_rpcmem

    def _create_rpcmem(self, size_bytes: int) -> Region:
        if self._rpcmem is None:
            raise OSError(errno.ENODEV, self.detail)
        region = self._rpcmem.create(size_bytes)
        try:
            zero(region)
        except BaseException:
            region.release()
            raise
        return region

    def probe_region(self) -> Region:
        """A little of what buffers are made of by default."""
        return self.maker(self.default_kind)(PROBE_BYTES)


def zero(region: Region) -> None:
    """Nothing says that rpcmem is zeroed, and it may have been another client's."""
    fd = region.fileno()
    synchronise = is_dma_buf(fd)
    if synchronise:
        begin_access(fd, READ | WRITE)
    step = memoryview(bytes(1 << 20))
    with memoryview(region) as view:
        for start in range(0, region.size_bytes, len(step)):
            end = min(start + len(step), region.size_bytes)
            view[start:end] = step[: end - start]
    if synchronise:
        end_access(fd, READ | WRITE)
