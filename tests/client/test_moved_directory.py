# SPDX-License-Identifier: Apache-2.0
"""A runtime directory that is moved, removed or replaced below an attached client."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.client.conftest import (
    BrokerProcess,
    MakeModel,
    copier,
    running_broker,
    short_directory,
)
from tests.waiting import wait_until

from qnnbroker.client import BrokerLost, BrokerUnavailable, Session, connect
from qnnbroker.client import channel as channels
from qnnbroker.protos.paths import GRPC_SOCKET


@pytest.fixture(autouse=True)
def rest_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "REST_SECONDS", 0.02)


@pytest.fixture
def moved_broker() -> Iterator[BrokerProcess]:
    """A broker whose directory tests may do with as they like."""
    with short_directory() as parent:
        directory = parent / "r"
        directory.mkdir(mode=0o700)
        with running_broker(directory) as running:
            yield running
            with contextlib.suppress(OSError):
                directory.rmdir()


def move(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def remove_the_sockets(directory: Path) -> None:
    for name in directory.glob("*.sock"):
        name.unlink()


AWAY: list[Callable[[Path], object]] = [move, shutil.rmtree, remove_the_sockets]


def rest(session: Session) -> None:
    """Until a call needs a channel of its own."""
    wait_until(lambda: session._control.channel() is None, "the channel is closed")


@pytest.mark.parametrize("take_away", AWAY)
def test_calls_and_runs_go_on(
    moved_broker: BrokerProcess, make_model: MakeModel, take_away: Callable[[Path], object]
) -> None:
    with connect(moved_broker.runtime_dir) as session, session.load(make_model()) as model:
        with model.graph.bind() as binding:
            rest(session)
            take_away(moved_broker.runtime_dir)
            binding.run()
            assert session.server_info().pid == moved_broker.process.pid
            rest(session)
            with session.load(make_model("other", copier("g"))) as other:
                other.graph.bind().run()
            binding.run()
        moved_broker.kill()
        with pytest.raises(BrokerLost):
            session.statistics()


def test_another_broker_in_its_place_is_not_asked(
    moved_broker: BrokerProcess, make_model: MakeModel
) -> None:
    directory = moved_broker.runtime_dir
    with connect(directory) as session:
        rest(session)
        move(directory)
        directory.mkdir(mode=0o700)
        with running_broker(directory) as stranger:
            with connect(directory) as other:
                assert other.server_info().pid == stranger.process.pid
                assert session.server_info().pid == moved_broker.process.pid
                assert session.statistics().counters["sessions"] == 1
                session.load(make_model()).unload()
        shutil.rmtree(directory)


def test_a_client_that_comes_when_the_socket_is_gone_is_told_so(
    moved_broker: BrokerProcess,
) -> None:
    path = moved_broker.runtime_dir / GRPC_SOCKET
    path.unlink()
    with connect(moved_broker.runtime_dir) as session:
        with pytest.raises(BrokerUnavailable) as failed:
            session.statistics()
    assert str(failed.value) == (
        f"the broker of this session lives, and runs go on, but its socket {str(path)!r} is gone: "
        "its runtime directory was removed or replaced. Restart that broker"
    )


def test_the_socket_that_was_kept_goes_with_the_session(moved_broker: BrokerProcess) -> None:
    def kept() -> list[str]:
        found = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [name for name in found if name.endswith(GRPC_SOCKET)]

    for calls in (0, 1):
        session = connect(moved_broker.runtime_dir)
        assert len(kept()) == 1
        for _ in range(calls):
            session.statistics()
        session.close()
        assert kept() == []
