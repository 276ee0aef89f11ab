# SPDX-License-Identifier: Apache-2.0
"""A broker inside the test's own process, for what cannot be seen from outside."""

import asyncio
import contextlib
import gc
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fake_models import TENSOR_BYTES
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.broker.app import Broker
from qnnbroker.broker.bindings import RegionRef
from qnnbroker.broker.config import BrokerConfig
from qnnbroker.broker.models import Model
from qnnbroker.broker.service import BrokerService
from qnnbroker.broker.sessions import Peer, Session
from qnnbroker.native.counters import live_counts
from qnnbroker.native.fake import control_loaded, read_ring
from qnnbroker.v1 import control_pb2 as pb


@contextlib.asynccontextmanager
async def running(**options: Any) -> AsyncIterator[BrokerService]:
    """A started broker over the fake QNN library; stopped, and gone, at the end."""
    with tempfile.TemporaryDirectory(prefix="qb") as directory:
        broker = Broker(BrokerConfig(runtime_dir=directory, backend="fake", **options))
        await broker.start()
        try:
            yield broker.service
        finally:
            control_loaded("clear", "unhang")
            for session in list(broker.service.sessions):  # those without a socket
                broker.service.sessions.close(session, "the test ends")
            await broker.stop()
            await broker.stop()


def attached(service: BrokerService, name: str = "inside") -> Session:
    """A session of this process without a socket."""
    return service.sessions.open(Peer(os.getpid(), os.getuid(), os.getgid()), name)


async def loaded(service: BrokerService, session: Session | None, path: Path) -> Model:
    """A model of the session's."""
    request = pb.LoadModelRequest(path=str(path))
    model, _ = await service.load(session, request, lambda stage, done, total: None)
    return model


@dataclass
class AdderPlaces:
    """Where the tensors of the adder lie in one buffer of a session."""

    buffer_id: int

    def places(self) -> tuple[list[tuple[str, RegionRef]], list[tuple[str, RegionRef]]]:
        refs = [
            (name, RegionRef(self.buffer_id, i * TENSOR_BYTES, TENSOR_BYTES))
            for i, name in enumerate("aby")
        ]
        return refs[:2], refs[2:]


async def bound(service: BrokerService, session: Session, path: Path) -> int:
    """The id of a binding of the adder at `path`."""
    model = await loaded(service, session, path)
    buffer = await session.buffers.allocate(4096)
    inputs, outputs = AdderPlaces(buffer.buffer_id).places()
    binding = await session.bindings.create(model.graphs[0], inputs, outputs, session.buffers)
    return binding.binding_id


async def until(condition: Callable[[], object], what: str) -> None:
    """Waits on the event loop."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def hanging() -> int:
    """Calls that a fault rule made hang so far."""
    return sum(c.name == "fault" and c.arguments["kind"] == "hang" for c in read_ring())


def go(work: Callable[[], Awaitable[None]]) -> None:
    """Runs a test on an event loop; what a callback fails with fails it."""
    failed: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, c: failed.append(c))
        await work()

    asyncio.run(main())
    assert failed == []


def alive() -> dict[str, int]:
    """Native objects of this process, those of earlier tests among them."""
    gc.collect()
    return {k: v for k, v in live_counts().items() if k not in ("libraries", "graphs")}
