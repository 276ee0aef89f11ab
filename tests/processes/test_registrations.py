# SPDX-License-Identifier: Apache-2.0
"""Bindings over registered memory and by plain address: the same results, and nothing left over."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.broker_process import BrokerProcess, all_stopped, spawn_broker
from tests.fake_models import MakeModel, adder, mixed, model_maker, numbers, quantised
from tests.waiting import wait_until

from qnnbroker.client import Binding, InvalidRequest, LimitExceeded, Session, Unsupported, connect
from qnnbroker.native.fake import FakeGraph, FakeTensor, read_record
from qnnbroker.v1 import control_pb2 as pb

#: What a context says of registered memory -> how a binding then works.
DEVICES = {
    "registered": ("mem_register=on",),
    "raw": (),
    "refused": ("mem_register=on", "mem_custom=off", "mem_ion=off"),
}


@pytest.fixture(scope="module", params=DEVICES)
def device_broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    folder = tmp_path_factory.mktemp("broker")
    words = (*DEVICES[request.param], f"record={folder / 'calls'}")
    with tempfile.TemporaryDirectory(prefix="qb") as directory:
        broker = spawn_broker(Path(directory), folder, switch_words=words)
        with all_stopped([broker]):
            with connect(broker.runtime_dir) as warm_up:  # opens the record in both libraries
                warm_up.load(model_maker(folder)("warm")).graph.bind().run()
            broker.wait_counters(contexts=0, contexts_closing=0, sessions_closing=0)
            yield broker
        errors = [c.arguments["what"] for c in read_record(folder / "calls") if c.name == "error"]
        assert errors == []


@pytest.fixture
def memory(device_broker: BrokerProcess) -> str:
    """How bindings of this broker get at their tensors."""
    return (
        "registered" if device_broker.log_path.parent and is_registering(device_broker) else "raw"
    )


def is_registering(broker: BrokerProcess) -> bool:
    environment = Path(f"/proc/{broker.pid}/environ").read_bytes()
    return b"mem_register=on" in environment and b"mem_custom=off" not in environment


@pytest.fixture
def session(device_broker: BrokerProcess) -> Iterator[Session]:
    before = device_broker.gauges()
    with connect(device_broker.runtime_dir) as session:
        yield session
    device_broker.wait_gauges(before)
    assert device_broker.counters()["registrations"] == 0


def live(broker: BrokerProcess) -> int:
    counters = wait_until(
        lambda: counters_that_agree(broker), "as many registrations as the library has"
    )
    assert counters is not None
    return counters["registrations"]


def counters_that_agree(broker: BrokerProcess) -> dict[str, int] | None:
    counters = broker.counters()
    agree = counters["registrations"] == counters["native_registrations"]
    return counters if agree else None


def test_a_binding_says_how_it_works_and_runs(
    session: Session, make_model: MakeModel, memory: str, device_broker: BrokerProcess
) -> None:
    graph = session.load(make_model()).graph
    before = device_broker.counters()
    with graph.bind() as binding:
        assert binding.memory == memory
        assert ("memRegister" in binding.memory_detail) == (memory == "raw")
        for seed in range(3):
            a, b = numbers(seed)
            binding.inputs["a"][:], binding.inputs["b"][:] = a, b
            assert binding.run().copied_bytes == 0
            assert np.array_equal(binding.outputs["y"], a + b)
        assert live(device_broker) == (3 if memory == "registered" else 0)
    after = device_broker.counters()
    grown = {k: after[k] - before[k] for k in after if k.endswith("_total")}
    assert grown[f"{memory}_executes_total"] == 3
    assert grown["copied_bytes_total"] == 0
    assert grown["raw_bindings_total"] == (memory == "raw")


def test_tensors_of_every_width_and_of_quantised_types(
    session: Session, make_model: MakeModel, memory: str
) -> None:
    model = session.load(make_model("types", mixed(), quantised()))
    with model.graphs["mixed"].bind() as binding:
        assert binding.memory == memory
        binding.inputs["x"][:] = [1, 2, 3]
        binding.inputs["l"][:] = [40, 2]
        binding.run()
        assert binding.outputs["z"].tolist() == [1, 2, 3]
        assert binding.outputs["s"].tolist() == [42]
    with model.graphs["quantised"].bind() as binding:
        binding.inputs["q"][:] = [10, 12, 20, 30, 40, 50]
        binding.run()
        assert binding.outputs["r"].tolist() == [10, 14, 30, 50, 70, 90]


def test_tensors_without_dimensions(
    session: Session, make_model: MakeModel, memory: str, device_broker: BrokerProcess
) -> None:
    tensors = [FakeTensor(n, "float32", ()) for n in "xyz"]
    path = make_model(
        "scalar", FakeGraph("scalar", (tensors[0], tensors[1]), (tensors[2],), ("add",))
    )
    model = session.load(path)
    assert [spec.shape for spec in model.graph.inputs.values()] == [(), ()]
    with model.graph.bind() as binding:
        assert binding.memory == memory
        assert live(device_broker) == (3 if memory == "registered" else 0)
        assert binding.inputs["x"].shape == ()
        binding.inputs["x"][...], binding.inputs["y"][...] = 40, 2
        assert binding.run().copied_bytes == 0
        assert binding.outputs["z"] == 42


def test_bindings_that_agree_share_their_registrations(
    session: Session, make_model: MakeModel, memory: str, device_broker: BrokerProcess
) -> None:
    graph = session.load(make_model()).graph
    hits = device_broker.counters()["registration_hits_total"]
    with session.alloc(4096) as buffer:
        bindings = [
            graph.bind({"a": buffer, "b": (buffer, 512)}, {"y": (buffer, 1024)}) for _ in range(4)
        ]
        known = 3 if memory == "registered" else 0
        assert live(device_broker) == known
        assert device_broker.counters()["registration_hits_total"] - hits == 3 * known
        for seed, binding in enumerate(bindings):
            a, b = numbers(seed)
            binding.inputs["a"][:], binding.inputs["b"][:] = a, b
            binding.run()
            assert np.array_equal(binding.outputs["y"], a + b)
            assert live(device_broker) == known
            binding.close()
        device_broker.wait_counters(registrations=0)


def test_one_buffer_in_several_contexts_and_from_graph_to_graph(
    session: Session, make_model: MakeModel, memory: str
) -> None:
    """The output of one graph is the input of another, which is another context's."""
    first = session.load(make_model("first")).graph
    second = session.load(make_model("second", adder("other"))).graph
    with session.alloc(4096) as buffer:
        there = first.bind(outputs={"y": buffer})
        back = second.bind(inputs={"a": buffer})
        with there, back:
            assert {there.memory, back.memory} == {memory}
            there.inputs["a"][:], there.inputs["b"][:] = 1, 2
            back.inputs["b"][:] = 10
            there.run()
            back.run()
            assert (back.outputs["y"] == 13).all()


@pytest.mark.parametrize("order", ["buffer", "model", "binding"])
def test_every_order_of_giving_back_is_safe(
    session: Session, make_model: MakeModel, device_broker: BrokerProcess, order: str
) -> None:
    model = session.load(make_model())
    buffer = session.alloc(4096)
    binding = model.graph.bind({"a": buffer, "b": (buffer, 512)}, {"y": (buffer, 1024)})
    if order == "buffer":
        buffer.drop()  # the binding keeps the memory
        binding.run()
        binding.close()
    elif order == "model":
        model.unload()  # closes the binding
    else:
        binding.close()
    device_broker.wait_counters(registrations=0, bindings=0)
    model.unload()
    buffer.drop()


def test_parked_bindings_give_their_registrations_back_and_get_them_again(
    session: Session, make_model: MakeModel, memory: str, device_broker: BrokerProcess
) -> None:
    from qnnbroker.v1 import control_pb2 as pb

    graph = session.load(make_model()).graph
    buffer = session.alloc(4096)
    binding = graph.bind({"a": buffer, "b": (buffer, 512)}, {"y": (buffer, 1024)})
    known = live(device_broker)
    for seed in range(3):
        device_broker.stub.ParkBindings(pb.ParkBindingsRequest())
        device_broker.wait_counters(registrations=0, native_runnables=0)
        a, b = numbers(seed)
        binding.inputs["a"][:], binding.inputs["b"][:] = a, b
        assert np.array_equal((binding.run(), binding.outputs["y"])[1], a + b)
        assert live(device_broker) == known
    device_broker.stub.ParkBindings(pb.ParkBindingsRequest())
    device_broker.wait_counters(registrations=0, native_runnables=0)
    buffer.drop()  # while parked: the memory stays for the binding
    binding.run()
    assert binding.memory == memory
    binding.close()


def test_zero_copy_off_never_registers(
    session: Session, make_model: MakeModel, device_broker: BrokerProcess
) -> None:
    graph = session.load(make_model()).graph
    with graph.bind(zero_copy="off") as binding:
        assert (binding.memory, binding.memory_detail) == ("raw", "zero_copy is off")
        assert live(device_broker) == 0
        binding.run()


def test_zero_copy_required_is_kept_or_refused_saying_what_is_missing(
    session: Session, make_model: MakeModel, memory: str
) -> None:
    graph = session.load(make_model()).graph
    if memory == "registered":
        with graph.bind(zero_copy="require") as binding:
            assert binding.memory == "registered"
        return
    with pytest.raises(Unsupported, match=r"required.*memRegister -> ") as refused:
        graph.bind(zero_copy="require")
    assert refused.value.reason == "BACKEND_LACKS"
    assert session.arena.statistics().used_bytes == 0


def test_an_output_over_another_tensor_is_refused(session: Session, make_model: MakeModel) -> None:
    graph = session.load(make_model()).graph
    with session.alloc(4096) as buffer:
        with pytest.raises(InvalidRequest) as refused:
            graph.bind({"a": buffer}, {"y": buffer})
        assert refused.value.reason == "OVERLAP"
        with pytest.raises(InvalidRequest):
            graph.bind({"a": buffer}, {"y": (buffer, 64)})
        with graph.bind({"a": buffer, "b": buffer}) as twice:  # inputs may share
            twice.inputs["a"][:] = 4
            twice.run()
            assert (twice.outputs["y"] == 8).all()


def test_a_client_that_dies_leaves_no_registration(
    session: Session, make_model: MakeModel, device_broker: BrokerProcess
) -> None:
    path = make_model()
    with connect(device_broker.runtime_dir) as other:
        graph = other.load(path).graph
        for _ in range(5):
            graph.bind().run()
        assert device_broker.counters()["bindings"] == 5
    device_broker.wait_counters(bindings=0, registrations=0, native_runnables=0)


@pytest.mark.parametrize("code", [8003, 1002])
def test_memory_that_the_device_does_not_take_is_used_by_address(
    start_broker: "object", make_model: MakeModel, runtime_dir: Path, code: int
) -> None:
    broker = start_broker(switch_words=["mem_register=on"])  # type: ignore[operator]
    with connect(runtime_dir) as session:
        graph = session.load(make_model()).graph
        with graph.bind() as first:
            assert first.memory == "registered"
        broker.set_faults(f"fail=memRegister:2:{code}")
        with graph.bind() as binding:
            assert binding.memory == "raw"
            assert f"'b': memRegister failed with QNN code {code}" in binding.memory_detail
            binding.inputs["a"][:], binding.inputs["b"][:] = 1, 2
            binding.run()
            assert (binding.outputs["y"] == 3).all()
        broker.set_faults(f"fail=memRegister:1:{code}")
        with pytest.raises(Unsupported, match=f"code {code}"):
            graph.bind(zero_copy="require")
        assert broker.counters()["registrations_refused_total"] == 2
    broker.wait_counters(registrations=0, native_registrations=0)


def test_a_binding_that_comes_back_in_another_way_says_so(
    start_broker: "object", make_model: MakeModel, runtime_dir: Path
) -> None:
    broker = start_broker(switch_words=["mem_register=on"])  # type: ignore[operator]
    with connect(runtime_dir) as session, session.load(make_model()).graph.bind() as binding:
        assert (binding.memory, binding.memory_detail) == ("registered", "")
        broker.stub.ParkBindings(pb.ParkBindingsRequest(), timeout=20)
        assert binding.memory == "registered"
        broker.set_faults("fail=memRegister:1:8003", mem_register=True)
        binding.run()
        assert "8003" in binding.memory_detail
        broker.set_faults(mem_register=True)
        broker.stub.ParkBindings(pb.ParkBindingsRequest(), timeout=20)
        binding.run()
        assert binding.memory == "registered"
    assert binding.memory == "registered"  # closed: what was known last


def test_whole_buffers_only_where_the_device_takes_only_those(
    start_broker: "object", make_model: MakeModel, runtime_dir: Path
) -> None:
    start_broker(switch_words=["mem_register=on", "mem_custom=off"])  # type: ignore[operator]
    with connect(runtime_dir) as session:
        graph = session.load(make_model()).graph
        with graph.bind() as packed:
            assert packed.memory == "raw"
            assert "lies inside a buffer" in packed.memory_detail
        buffers = [session.alloc(4096) for _ in range(3)]
        a, b, y = buffers
        with graph.bind({"a": a, "b": b}, {"y": y}) as binding:
            assert binding.memory == "registered"
            binding.inputs["a"][:], binding.inputs["b"][:] = 1, 2
            binding.run()
            assert (binding.outputs["y"] == 3).all()


def test_a_session_that_may_hold_no_more_is_told_so(
    start_broker: "object", make_model: MakeModel, runtime_dir: Path
) -> None:
    start_broker(  # type: ignore[operator]
        switch_words=["mem_register=on"], max_session_bytes=1 << 18, max_buffers=2
    )
    with connect(runtime_dir) as session:
        graph = session.load(make_model()).graph
        bindings: list[Binding] = []

        def bind_for_ever() -> None:
            while True:
                bindings.append(graph.bind())

        with pytest.raises(LimitExceeded):
            bind_for_ever()
        statistics = session.arena.statistics()
        assert statistics.spans == len(bindings)
        assert statistics.total_bytes <= 1 << 18
        for binding in bindings:
            binding.run()
