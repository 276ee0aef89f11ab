# SPDX-License-Identifier: Apache-2.0
"""The broker as an object: started, stopped and started again inside one process."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from tests.broker.inside import alive, attached, bound, go, running
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


def test_a_listener_that_others_hold_does_not_keep_the_loop_busy(runtime_dir: Path) -> None:
    """After the stop the supervisor's listener gets clients; they must not wake a broker that is
    on its way out."""

    async def work() -> None:
        path = runtime_dir / "attach.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
            owner.bind(str(path))
            owner.listen()
            config = BrokerConfig(
                runtime_dir=str(runtime_dir), backend="fake", attach_fd=os.dup(owner.fileno())
            )
            broker = Broker(config)
            await broker.start()
            await broker.stop()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.connect(str(path))
                before = os.times()
                await asyncio.sleep(0.1)
                after = os.times()
            assert after.user + after.system - before.user - before.system < 0.08
            assert path.exists()

    go(work)
