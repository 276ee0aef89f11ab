# SPDX-License-Identifier: Apache-2.0
"""How a broker ends: what runs is finished, what waits is told, and nothing is left behind."""

import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import TENSOR_BYTES, MakeModel, adder
from tests.memory_kinds import memory_words as memory_words
from tests.raw_peer import RawAttach, RawPeer
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.client import BrokerLost, BrokerUnavailable, connect
from qnnbroker.protos.errors import BrokerError
from qnnbroker.protos.paths import LOCK_FILE
from qnnbroker.protos.status import from_grpc
from qnnbroker.v1 import control_pb2 as pb


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


def bound(peer: RawPeer, model: Path, graph: str = "slow") -> pb.ExecuteRequest:
    """A request that executes the adder over a buffer of the peer's."""
    graphs = {g.name: g.graph_id for g in peer.load(model).model.graphs}
    buffer, memory = peer.alloc(4096)
    memory.close()
    places = [(n, buffer, i * TENSOR_BYTES, TENSOR_BYTES) for i, n in enumerate("aby")]
    return pb.ExecuteRequest(binding_id=peer.bind(graphs[graph], places[:2], places[2:]))


def error_of(future: Any) -> BrokerError:
    """What a call that fails failed with."""
    error = future.exception(PATIENCE_SECONDS)
    assert isinstance(error, grpc.Call)
    details = dict(error.trailing_metadata() or ())
    detail = details.get("qnnbroker-error-bin")
    assert isinstance(detail, bytes), (error.code(), error.details())
    return from_grpc(error.code().value[0], error.details() or "", detail)


@pytest.mark.parametrize("way", ["SIGTERM", "SIGINT", "StopServer"])
def test_a_broker_that_is_asked_to_stop_leaves_its_directory_clean(
    broker: BrokerProcess, make_model: MakeModel, way: str
) -> None:
    with connect(broker.runtime_dir) as session, session.load(make_model()) as model:
        model.graph.bind().run()
        broker.stub.LoadModel(pb.LoadModelRequest(path=str(make_model("other", adder("other")))))
        if way == "StopServer":
            broker.stub.StopServer(pb.StopServerRequest(), timeout=PATIENCE_SECONDS)
        else:
            broker.process.send_signal(getattr(signal, way))
        assert broker.wait_exit() == 0
    assert names(broker.runtime_dir) == {LOCK_FILE}
    assert "stopped" in broker.log()
    created, freed = broker.calls("contextCreateFromBinary"), broker.calls("contextFree")
    assert len(created) == len(freed) >= 1
    assert [c.result for c in (*freed, *broker.calls("deviceFree"))] == [0] * (len(freed) + 1)
    assert broker.calls("error") == []


def test_stop_finishes_what_runs_and_refuses_what_waits(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    model = make_model("slow", adder("slow"))
    broker.set_faults("hang=graphExecute@slow:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        request = bound(peer, model)
        running = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        waiting = [broker.stub.Execute.future(request, metadata=peer.metadata) for _ in range(3)]
        broker.wait_counters(in_flight=4)
        broker.process.send_signal(signal.SIGTERM)
        for future in waiting:
            error = error_of(future)
            assert (type(error).__name__, error.reason) == ("BrokerUnavailable", "STOPPING")
        late = broker.stub.Execute.future(request, metadata=peer.metadata)
        assert error_of(late).reason == "STOPPING"
        assert not running.done()
        broker.set_faults("unhang")
        assert running.result(PATIENCE_SECONDS).timing.execute_ns > 0
        assert broker.wait_exit() == 0
        assert peer.receive() is None
    assert names(broker.runtime_dir) == {LOCK_FILE}


def test_nobody_new_is_attached_while_it_stops(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    broker.set_faults("hang=graphExecute@slow:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        request = bound(peer, make_model("slow", adder("slow")))
        running = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        broker.stub.StopServer(pb.StopServerRequest(), timeout=PATIENCE_SECONDS)

        def closed() -> bool:
            try:
                RawAttach(broker.attach_path).close()
            except ConnectionRefusedError:
                return True
            return False

        wait_until(closed, "the attach socket takes nobody")
        with pytest.raises(BrokerUnavailable):
            connect(broker.runtime_dir)
        broker.set_faults("unhang")
        assert running.result(PATIENCE_SECONDS).timing.execute_ns > 0
        assert broker.wait_exit() == 0


def test_an_execute_that_never_ends_does_not_keep_it_for_ever(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(stop_timeout_seconds=0.5)
    broker.accidents_expected = True
    broker.set_faults("hang=graphExecute@slow:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        request = bound(peer, make_model("slow", adder("slow")))
        running = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        broker.process.send_signal(signal.SIGTERM)
        assert broker.wait_exit() == 1
        assert isinstance(running.exception(PATIENCE_SECONDS), grpc.RpcError)
    assert "leaving without it" in broker.log()
    assert names(broker.runtime_dir) == {LOCK_FILE}


def test_a_second_signal_means_at_once(broker: BrokerProcess, make_model: MakeModel) -> None:
    broker.set_faults("hang=graphExecute@slow:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        request = bound(peer, make_model("slow", adder("slow")))
        running = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        broker.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in broker.log(), "it stops")
        broker.process.send_signal(signal.SIGINT)
        assert broker.wait_exit() == 128 + signal.SIGINT
        assert isinstance(running.exception(PATIENCE_SECONDS), grpc.RpcError)


def test_stop_while_a_model_loads_frees_it_too(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    broker.set_faults("hang=contextCreateFromBinary:1")
    load = broker.stub.LoadModel(pb.LoadModelRequest(path=str(make_model())))
    broker.wait_hanging(1)
    broker.process.send_signal(signal.SIGTERM)
    with pytest.raises(grpc.RpcError):
        list(load)
    broker.set_faults("unhang")
    assert broker.wait_exit() == 0
    assert len(broker.calls("contextFree")) == 1


def test_stop_while_eight_clients_run_loses_and_invents_nothing(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    model = make_model("adder", adder("slow", execute_us=200))
    outcomes: list[BrokerError] = []
    runs = [0] * 8

    def work(number: int) -> None:
        with connect(broker.runtime_dir) as session, session.load(model) as loaded:
            with loaded.graph.bind() as binding:
                try:
                    while True:
                        binding.run()
                        runs[number] += 1
                except BrokerError as error:
                    outcomes.append(error)

    threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(runs) > 3, "everybody runs")
    broker.stub.StopServer(pb.StopServerRequest(), timeout=PATIENCE_SECONDS)
    for thread in threads:
        thread.join()
    assert {type(o) for o in outcomes} <= {BrokerLost, BrokerUnavailable}, outcomes
    assert len(outcomes) == 8
    assert broker.wait_exit() == 0
    executed = [c for c in broker.calls("graphExecute") if c.result == 0]
    assert sum(runs) <= len(executed) <= sum(runs) + 8
