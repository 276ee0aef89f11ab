# SPDX-License-Identifier: Apache-2.0
"""Resetting the backend below attached clients: a pause, and nothing lost or left over."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import grpc
import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel, adder, numbers
from tests.waiting import wait_until

from qnnbroker.client import BrokerUnavailable, NpuRestarted, connect
from qnnbroker.native.fake import read_record
from qnnbroker.v1 import control_pb2 as pb

StartBroker = Callable[..., BrokerProcess]


def reset(broker: BrokerProcess) -> pb.ResetBackendResponse:
    return broker.stub.ResetBackend(pb.ResetBackendRequest(), timeout=20)


@pytest.mark.parametrize("memory", ["registered", "raw"])
def test_bindings_go_on_after_a_reset(
    start_broker: StartBroker, make_model: MakeModel, runtime_dir: Path, tmp_path: Path, memory: str
) -> None:
    record = tmp_path / "calls"
    words = [f"record={record}", *(["mem_register=on"] if memory == "registered" else [])]
    broker = start_broker(switch_words=words)
    with connect(runtime_dir) as session, connect(runtime_dir) as other:
        binding = session.load(make_model()).graph.bind()
        unloaded = other.load(make_model("second")).graph.bind()
        assert binding.memory == memory
        for seed in range(3):
            a, b = numbers(seed)
            binding.inputs["a"][:], binding.inputs["b"][:] = a, b
            binding.run()
            answer = reset(broker)
            assert (answer.parked_count, answer.context_count) == (2 if seed == 0 else 1, 1)
            assert broker.counters()["registrations"] == 0
            binding.run()
            assert np.array_equal(binding.outputs["y"], a + b)
        unloaded.run()
        assert broker.counters()["registrations"] == (6 if memory == "registered" else 0)
        with session.models[0].graph.bind() as fresh:  # the model's graphs lead to the new context
            fresh.run()
    broker.wait_counters(registrations=0, contexts=0, contexts_closing=0)
    assert broker.stop() == 0
    calls = read_record(record)
    assert [c.arguments["what"] for c in calls if c.name == "error"] == []
    assert sum(c.name == "backendFree" for c in calls) == 4


def test_a_run_under_way_ends_first_and_what_comes_meanwhile_waits(
    start_broker: StartBroker, make_model: MakeModel, runtime_dir: Path
) -> None:
    broker = start_broker(switch_words=["mem_register=on"])
    with connect(runtime_dir) as session:
        graph = session.load(make_model()).graph
        slow, waiting = graph.bind(), graph.bind()
        for binding in (slow, waiting):
            binding.inputs["a"][:], binding.inputs["b"][:] = 1, 2
        broker.set_faults("hang=graphExecute:1", mem_register=True)
        first = slow.submit()
        wait_until(lambda: broker.counters()["in_flight"] == 1, "the run is under way")
        thread = threading.Thread(target=reset, args=[broker])
        thread.start()
        wait_until(lambda: refused_as_resetting(broker), "the reset has begun")
        second = waiting.submit()
        broker.set_faults("unhang", mem_register=True)
        thread.join()
        for submission, binding in ((first, slow), (second, waiting)):
            submission.result(20)
            assert (binding.outputs["y"] == 3).all()


def refused_as_resetting(broker: BrokerProcess) -> bool:
    try:
        reset(broker)
    except grpc.RpcError as error:
        return isinstance(error, grpc.Call) and "being reset" in (error.details() or "")
    return False


def test_after_a_restart_of_the_npu_a_reset_makes_everything_work_again(
    start_broker: StartBroker, make_model: MakeModel, runtime_dir: Path
) -> None:
    broker = start_broker(switch_words=["mem_register=on"])
    broker.accidents_expected = True
    with connect(runtime_dir) as session:
        binding = session.load(make_model()).graph.bind()
        binding.inputs["a"][:], binding.inputs["b"][:] = 1, 2
        binding.run()
        other = session.models[0].graph.bind()
        broker.set_faults("fail=graphExecute:1:1007", mem_register=True)
        for one in (binding, binding, other):  # the first, and all who come later
            with pytest.raises(NpuRestarted, match="until the backend is reset.*qnnbroker reset"):
                one.run()
        with session.alloc(8192) as buffer, pytest.raises(NpuRestarted, match="qnnbroker reset"):
            session.models[0].graph.bind({"a": buffer})
        with pytest.raises(NpuRestarted, match="qnnbroker reset"):
            session.load(make_model("new", adder("new")))
        broker.set_faults(mem_register=True)
        other.close()
        reset(broker)
        binding.run()
        assert (binding.outputs["y"] == 3).all()
        counters = broker.counters()
        assert counters["registrations"] == counters["native_registrations"] == 3
        assert counters["registrations_lost_total"] == 6
    broker.wait_counters(registrations=0, native_registrations=0, contexts=0)


def busy_client(
    directory: Path, paths: list[Path], seed: int, over: threading.Event, wrong: list[str]
) -> None:
    """Comes, loads, binds, runs and goes, until it is `over`; being told to wait is fine."""
    random = Random(seed)
    try:
        while not over.is_set():
            with suppress(BrokerUnavailable), connect(directory) as session:
                for _ in range(random.randrange(1, 4)):
                    binding = session.load(random.choice(paths)).graph.bind()
                    for _ in range(random.randrange(1, 6)):
                        a, b = numbers(random.randrange(100))
                        binding.inputs["a"][:], binding.inputs["b"][:] = a, b
                        binding.run()
                        if not np.array_equal(binding.outputs["y"], a + b):
                            wrong.append("a wrong result")
                    if random.random() < 0.5:
                        session.models[-1].unload()
                    if random.random() < 0.3:
                        binding.close()
    except Exception as error:
        wrong.append(repr(error))


def executed(broker: BrokerProcess) -> int:
    counters = broker.counters()
    return counters["registered_executes_total"] + counters["raw_executes_total"]


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["registered", "raw"])
def test_resets_beside_clients_that_come_load_run_and_go(
    start_broker: StartBroker, make_model: MakeModel, runtime_dir: Path, memory: str
) -> None:
    words = ["mem_register=on"] if memory == "registered" else []
    broker = start_broker(switch_words=words)
    paths = [make_model(name, adder(name, execute_us=300)) for name in ("one", "two", "three")]
    with connect(runtime_dir) as warm_up:
        warm_up.load(paths[0]).graph.bind().run()
    broker.wait_counters(contexts=0, contexts_closing=0, sessions_closing=0)
    before = broker.gauges()
    over, wrong = threading.Event(), list[str]()
    clients = [
        threading.Thread(target=busy_client, args=(runtime_dir, paths, seed, over, wrong))
        for seed in range(4)
    ]
    for client in clients:
        client.start()
    try:
        for _ in range(40):
            seen = executed(broker)
            wait_until(lambda seen=seen: executed(broker) > seen + 3, "clients run")  # type: ignore[misc]
            assert list(reset(broker).lost) == []
    finally:
        over.set()
        for client in clients:
            client.join()
    assert wrong == []
    broker.wait_gauges(before)
    assert [c.arguments["what"] for c in broker.calls("error")] == []
