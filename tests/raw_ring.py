# SPDX-License-Identifier: Apache-2.0
"""A client without manners at its rings: slots and indexes as the test wants them."""

import contextlib
import mmap
import os
import select
import struct
from pathlib import Path
from typing import Any

from tests.raw_peer import RawPeer
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.protos.attach import CAPABILITY_RING
from qnnbroker.v1 import attach_pb2, control_pb2_grpc

HEADER_BYTES, SUBMISSION_BYTES, COMPLETION_BYTES = 256, 32, 64
#: Where the indexes and flags lie: in the client's file, and in the broker's.
SQ_TAIL, CLIENT_CORE, CQ_HEAD, CLIENT_SLEEPS = 0, 4, 64, 128
CQ_TAIL, BROKER_CORE, SQ_HEAD, BROKER_SLEEPS = 64, 68, 128, 192

#: ticket, status, queue ns, execute ns, copied bytes
Completion = tuple[int, int, int, int, int]


class RawRing(RawPeer):
    """An attached client with its rings in the open."""

    def __init__(self, path: Path, stub: control_pb2_grpc.ControlServiceStub) -> None:
        self.ring_fds: list[int] = []
        super().__init__(path, stub)
        client, broker, self.doorbell, self.bell = self.ring_fds
        self.mine = mmap.mmap(client, os.fstat(client).st_size)
        self.theirs = mmap.mmap(broker, os.fstat(broker).st_size, prot=mmap.PROT_READ)
        magic, abi, self.sq_slots, self.cq_slots = struct.unpack_from("<4I", self.theirs)
        assert (magic, abi) == (0x474E5251, 1)
        self.tickets = 0
        self.set(CLIENT_SLEEPS, 1)

    def hello(self, **changes: Any) -> attach_pb2.HelloResponse:
        answer = super().hello(**{"capabilities": CAPABILITY_RING, **changes})
        assert answer.capabilities & CAPABILITY_RING
        self.ring_fds = self.fds[:]
        self.fds.clear()
        return answer

    def set(self, offset: int, value: int) -> None:
        """An index or flag of ours."""
        struct.pack_into("<I", self.mine, offset, value % 2**32)

    def get(self, offset: int) -> int:
        return int(struct.unpack_from("<I", self.mine, offset)[0])

    def seen(self, offset: int) -> int:
        """An index or flag of the broker's."""
        return int(struct.unpack_from("<I", self.theirs, offset)[0])

    def write_slot(
        self, binding: int, *, deadline_ns: int = 0, flags: int = 0, reserved: int = 0
    ) -> int:
        """Fills the next slot and moves the tail; its ticket."""
        self.tickets += 1
        tail = self.get(SQ_TAIL)
        at = HEADER_BYTES + tail % self.sq_slots * SUBMISSION_BYTES
        struct.pack_into(
            "<QQQII", self.mine, at, binding, self.tickets, deadline_ns, flags, reserved
        )
        self.set(SQ_TAIL, tail + 1)
        return self.tickets

    def ring(self) -> None:
        """Rings, needed or not."""
        with contextlib.suppress(BlockingIOError):
            os.write(self.doorbell, (1).to_bytes(8, "little"))

    def submit(self, binding: int, **options: int) -> int:
        ticket = self.write_slot(binding, **options)
        self.ring()
        return ticket

    def cancel(self, ticket: int) -> None:
        mine = self.tickets
        self.tickets = ticket - 1
        self.submit(0, flags=1)
        self.tickets = mine

    def take(self, count: int = 1) -> list[Completion]:
        """The next completions, taken; waits on the bell for them."""
        taken: list[Completion] = []
        poll = select.poll()
        poll.register(self.bell, select.POLLIN)

        def some() -> bool:
            while (head := self.get(CQ_HEAD)) != self.seen(CQ_TAIL) and len(taken) < count:
                at = HEADER_BYTES + head % self.cq_slots * COMPLETION_BYTES
                ticket, status, _, *times = struct.unpack_from("<QIIQQQ", self.theirs, at)
                taken.append((ticket, status, *times))
                self.set(CQ_HEAD, head + 1)
            if len(taken) == count:
                return True
            if poll.poll(PATIENCE_SECONDS * 1000):
                os.read(self.bell, 512)
            return False

        wait_until(some, f"{count} completions", pause=0)
        return taken

    def close(self) -> None:
        super().close()
        for memory in (self.mine, self.theirs):
            memory.close()
        while self.ring_fds:
            with contextlib.suppress(OSError):
                os.close(self.ring_fds.pop())
