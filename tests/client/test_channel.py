# SPDX-License-Identifier: Apache-2.0
"""The channel of a client: there for calls, gone while nobody calls."""

import gc
import os
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from tests.client.conftest import BrokerProcess, MakeModel
from tests.waiting import wait_until

from qnnbroker.client import SessionClosed, connect
from qnnbroker.client import channel as channels
from qnnbroker.client.channel import RestingChannel
from qnnbroker.protos.paths import GRPC_SOCKET
from qnnbroker.v1 import control_pb2 as pb

REST = 0.05


@pytest.fixture
def resting(broker: BrokerProcess) -> Iterator[RestingChannel]:
    made = RestingChannel(str(broker.runtime_dir / GRPC_SOCKET), -1, rest_seconds=REST)
    yield made
    made.close()


def ask(resting: RestingChannel) -> int:
    """One call: the broker's pid."""
    with resting.stub() as stub:
        return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).pid


def watchers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "qnnbroker-channel"]


def test_it_opens_with_a_call_and_closes_when_none_follows(
    broker: BrokerProcess, resting: RestingChannel
) -> None:
    assert resting.held is None
    for _ in range(3):
        assert ask(resting) == broker.process.pid
        assert resting.held is not None
        wait_until(lambda: resting.held is None, "the channel is closed")
        wait_until(lambda: not watchers(), "its thread has ended")


def test_calls_that_follow_one_another_share_a_channel_and_its_thread(
    broker: BrokerProcess,
) -> None:
    resting = RestingChannel(str(broker.runtime_dir / GRPC_SOCKET), -1, rest_seconds=600)
    ask(resting)
    first = resting.held
    for _ in range(5):
        ask(resting)
        assert resting.held is first
        assert len(watchers()) == 1
    resting.close()
    assert resting.held is None
    wait_until(lambda: not watchers(), "its thread has ended")


def test_a_call_that_takes_long_keeps_it(resting: RestingChannel) -> None:
    ask(resting)
    with resting.stub() as stub:
        held = resting.held
        ask(resting)  # another one begins and ends
        end = time.monotonic() + 4 * REST
        wait_until(lambda: time.monotonic() > end, "it would have been closed")
        assert resting.held is held
        stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
    wait_until(lambda: resting.held is None, "the channel is closed")


def test_threads_that_call_now_and_then_never_meet_a_closed_channel(
    broker: BrokerProcess, resting: RestingChannel
) -> None:
    wrong: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            for n in range(15):
                assert ask(resting) == broker.process.pid
                # Around the moment at which it is closed.
                threading.Event().wait(REST * (0.9 + (seed + n) % 5 * 0.05))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


def test_a_closed_one_refuses_calls_and_ends_those_under_way(resting: RestingChannel) -> None:
    ask(resting)
    with resting.stub() as stub:
        resting.close()
        with pytest.raises((grpc.RpcError, ValueError)):
            stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
    with pytest.raises(ValueError, match="closed"), resting.stub():
        pass
    wait_until(lambda: not watchers(), "its thread has ended")


def test_one_that_is_forgotten_leaves_no_thread(broker: BrokerProcess) -> None:
    forgotten = RestingChannel(str(broker.runtime_dir / GRPC_SOCKET), -1, rest_seconds=REST)
    ask(forgotten)
    assert watchers()
    del forgotten
    gc.collect()
    wait_until(lambda: not watchers(), "its thread has ended")


def test_without_a_thread_to_be_had_the_channel_stays(
    resting: RestingChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with resting.stub():
            held = resting.held
    assert resting.held is held is not None
    ask(resting)
    wait_until(lambda: resting.held is None, "the next call has it closed")


def test_a_session_that_only_runs_is_without(
    broker: BrokerProcess, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "REST_SECONDS", REST)
    before = len(os.listdir("/proc/self/task"))
    with connect(broker.runtime_dir) as session, session.load(make_model()) as model:
        with model.graph.bind() as binding:
            wait_until(lambda: session._control.channel() is None, "the channel is closed")
            for _ in range(10):
                binding.run()
            assert session._control.channel() is None
            assert len(os.listdir("/proc/self/task")) <= before
            assert session.statistics().counters["sessions"] >= 1  # and there it is again
    with pytest.raises(SessionClosed):
        session.statistics()
