# SPDX-License-Identifier: Apache-2.0
"""Both ends of a session's rings in one process, with an executor between them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.native.executor_stage import Stage

from qnnbroker.native.executor import ExecutorBinding, ExecutorSession
from qnnbroker.native.ring import BrokerRing, ClientRing

#: Kinds of completions as a client sees them.
Completion = tuple[int, int, int, int]


def client_of(ring: BrokerRing, limit: int, *, spin_ns: int = 0) -> ClientRing:
    """The client's end of `ring`, which keeps its own descriptors."""
    fds = [os.dup(fd) for fd in ring.client_fds()]
    ring.drop_client_end()
    return ClientRing(*fds, limit=limit, spin_ns=spin_ns)


@contextmanager
def bare_rings(limit: int = 4) -> Iterator[tuple[BrokerRing, ClientRing, memoryview]]:
    """Two ends with nobody behind them, and the broker's memory, where the test is the broker."""
    ring = BrokerRing(limit)
    with memoryview(ring.broker_file) as memory:
        header = (0x474E5251, 1, ring.sq_slots, ring.cq_slots)
        memory[:16] = b"".join(n.to_bytes(4, "little") for n in header)
        client = client_of(ring, limit)
        try:
            yield ring, client, memory
        finally:
            client.close()
    ring.close()


def complete(memory: memoryview, *tickets: int) -> None:
    """As a broker that writes its first completions."""
    for place, ticket in enumerate(tickets):
        at = 256 + 64 * place
        memory[at : at + 8] = ticket.to_bytes(8, "little")
    memory[64:68] = len(tickets).to_bytes(4, "little")


class RingStage:
    """A session of `stage` with a ring, and the client's end of it."""

    def __init__(self, stage: Stage, limit: int = 16, *, spin_ns: int = 0) -> None:
        self.stage = stage
        self.session: ExecutorSession = stage.session(max_in_flight=limit)
        ring = BrokerRing(limit)
        self.session.open_ring(ring)
        self.client = client_of(ring, limit, spin_ns=spin_ns)
        self._count = 0

    def bind(self, graph: str = "add", **options: int) -> tuple[ExecutorBinding, int]:
        """A binding of the session, and what the ring calls it."""
        binding = self.stage.bind(self.session, graph, **options)
        self._count += 1
        name = 1 << 32 | self._count
        binding.publish(name)
        return binding, name

    def submit(self, name: int, deadline_ns: int = 0) -> int:
        ticket = self.client.submit(name, deadline_ns)
        assert ticket >= 0
        return ticket

    def status(self, ticket: int) -> int:
        """Of a submission, once it is complete."""
        done = self.client.wait(ticket, 20_000_000_000)
        assert done is not None, f"ticket {ticket:#x} never completed"
        return done[0]
