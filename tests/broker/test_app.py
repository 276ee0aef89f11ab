# SPDX-License-Identifier: Apache-2.0
"""The broker as an object: started, stopped and started again inside one process."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest
from tests.broker.inside import alive, attached, bound, go, running, until
from tests.fake_models import MakeModel

from qnnbroker.broker.app import Broker
from qnnbroker.broker.config import BrokerConfig
from qnnbroker.native.fake import control_loaded
from qnnbroker.protos.errors import AlreadyExists, BrokerError
from qnnbroker.protos.paths import LOCK_FILE
from qnnbroker.v1 import control_pb2 as pb


@pytest.fixture
def before() -> dict[str, int]:
    return alive()


def test_it_starts_and_stops_again_and_again(make_model: MakeModel, before: dict[str, int]) -> None:
    path = make_model()

    async def work() -> None:
        for _ in range(3):
            async with running() as service:
                session = attached(service)
                assert await service.execute(session, await bound(service, session, path), None)
            assert alive() == before

    go(work)


def test_what_it_held_is_freed_in_order_when_it_stops(
    make_model: MakeModel, before: dict[str, int]
) -> None:
    """Sessions, bindings, buffers, models of sessions and of nobody: all still there."""
    path = make_model()

    async def work() -> None:
        async with running() as service:
            for _ in range(3):
                session = attached(service)
                for _ in range(2):
                    await bound(service, session, path)
            request = pb.LoadModelRequest(path=str(path), keep_alive_seconds=-1)
            await service.load(None, request, lambda stage, done, total: None)
            held = alive()
            for kind in ("contexts", "runnables", "bindings", "sessions", "regions"):
                assert held[kind] > before[kind], kind
        assert alive() == before

    go(work)


def test_a_broker_that_never_started_can_be_stopped(runtime_dir: Path) -> None:
    async def work() -> None:
        broker = Broker(BrokerConfig(runtime_dir=str(runtime_dir), backend="fake"))
        await broker.stop()
        await broker.stop()

    go(work)
    assert os.listdir(runtime_dir) == []


def test_two_in_one_process_need_two_directories(runtime_dir: Path) -> None:
    async def work() -> None:
        async with running() as service:
            config = BrokerConfig(runtime_dir=service.config.runtime_dir, backend="fake")
            second = Broker(config)
            with pytest.raises(AlreadyExists):
                await second.start()
            assert Path(service.config.runtime_dir, "attach.sock").exists()
            async with running() as other:
                assert other.server_info().pid == service.server_info().pid

    go(work)


@pytest.mark.parametrize("call", ["backendCreate", "deviceCreate"])
def test_a_start_that_fails_leaves_nothing(
    runtime_dir: Path, call: str, before: dict[str, int]
) -> None:
    async def work() -> None:
        control_loaded(f"fail={call}:1:1100")
        broker = Broker(BrokerConfig(runtime_dir=str(runtime_dir), backend="fake"))
        with pytest.raises(BrokerError):
            await broker.start()
        control_loaded("clear")
        assert os.listdir(runtime_dir) == [LOCK_FILE]
        assert alive() == before
        await broker.start()  # the same object, once the cause is gone
        await broker.stop()

    go(work)


def test_a_stop_that_is_asked_for_is_waited_for(runtime_dir: Path) -> None:
    async def work() -> None:
        broker = Broker(BrokerConfig(runtime_dir=str(runtime_dir), backend="fake"))
        await broker.start()
        waiting = asyncio.create_task(broker.wait_stopped())
        await asyncio.sleep(0)
        assert not waiting.done()
        broker.request_stop("test")
        broker.request_stop("again")
        await waiting
        await broker.stop()

    go(work)


def watched() -> set[int]:
    """Numbers of the fds that epolls of this process watch, closed ones among them."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            found |= {int(x.split()[1]) for x in lines if x.startswith("tfd:")}
    return found


def test_a_listener_that_others_hold_is_not_watched_any_more(runtime_dir: Path) -> None:
    """Closing our fd would not be enough: clients that come for the next broker would keep waking
    this one while it stops."""

    async def work() -> None:
        path = runtime_dir / "attach.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
            owner.bind(str(path))
            owner.listen()
            ours = os.dup(owner.fileno())
            broker = Broker(
                BrokerConfig(runtime_dir=str(runtime_dir), backend="fake", attach_fd=ours)
            )
            await broker.start()
            await until(lambda: ours in watched(), "it accepts")
            await broker.stop()
            assert ours not in watched()
            assert path.exists()

    go(work)
