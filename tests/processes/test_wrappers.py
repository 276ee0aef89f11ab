# SPDX-License-Identifier: Apache-2.0
"""EPContext wrappers and binaries of all kinds, as a client meets them through a broker."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tests.broker_process import BrokerProcess
from tests.fake_models import SHAPE, MakeModel, adder, mixed, numbers, quantised

from qnnbroker.client import Session, connect
from qnnbroker.native.fake import FakeGraph, FakeTensor, binary_bytes
from qnnbroker.protos.errors import BrokerError


def node(
    inputs: str = "a b", outputs: str = "y", graph: str = "add", **attributes: Any
) -> onnx.NodeProto:
    """One EPContext node; by default for the adder in adder.bin."""
    return helper.make_node(
        "EPContext",
        inputs.split(),
        outputs.split(),
        name=f"node {graph}",
        domain="com.microsoft",
        **{
            "embed_mode": 0,
            "main_context": 1,
            "source": "QNNExecutionProvider",
            "partition_name": graph,
            "ep_cache_context": "adder.bin",
            **attributes,
        },
    )


def write(path: Path, *nodes: onnx.NodeProto) -> Path:
    """An ONNX file of these nodes, over float32[4, 8] tensors."""
    ins = [i for n in nodes for i in n.input]
    outs = [o for n in nodes for o in n.output]
    values = [
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in names]
        for names in (ins, outs)
    ]
    model = helper.make_model(helper.make_graph(list(nodes), "g", *values))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def session(shared_broker: BrokerProcess) -> Iterator[Session]:
    with connect(shared_broker.runtime_dir) as made:
        yield made


def refused(session: Session, path: Path) -> tuple[str, str]:
    """Class and reason of the error that a load fails with."""
    with pytest.raises(BrokerError) as error:
        session.load(path)
    return type(error.value).__name__, error.value.reason


def test_a_wrapper_and_its_binary_are_one_context(
    session: Session, make_model: MakeModel, tmp_path: Path, shared_broker: BrokerProcess
) -> None:
    binary = make_model()
    beside = write(tmp_path / "beside_ctx.onnx", node())
    embedded = write(
        tmp_path / "embedded_ctx.onnx", node(embed_mode=1, ep_cache_context=binary.read_bytes())
    )
    a, b = numbers(3)
    hashes = set()
    for path in (binary, beside, embedded):
        model = session.load(path)
        hashes.add(model.content_hash)
        assert (model.graph.run({"a": a, "b": b})["y"] == a + b).all()
    assert len(hashes) == 1
    assert [m.name for m in session.models] == ["adder", "beside", "embedded"]
    assert shared_broker.counters()["contexts"] == 1


def test_a_wrapper_of_several_nodes_offers_their_graphs(
    session: Session, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model("adder", adder("add"), adder("again"), adder("hidden"))
    path = write(
        tmp_path / "two_ctx.onnx",
        node(),
        helper.make_node(
            "EPContext",
            ["a", "b"],
            ["y"],
            domain="com.microsoft",
            main_context=0,
            embed_mode=0,
            source="QNN",
            partition_name="again",
        ),
    )
    with session.load(path) as model:
        assert set(model.graphs) == {"add", "again"}
        a, b = numbers(8)
        for graph in model.graphs.values():
            assert (graph.run({"a": a, "b": b})["y"] == a + b).all()


@pytest.mark.parametrize(
    ("nodes", "kind", "reason"),
    [
        ([node(graph="absent")], "InvalidRequest", "BAD_FILE"),
        ([node(inputs="a c")], "InvalidRequest", "BAD_FILE"),
        ([node(inputs="a b", outputs="z")], "InvalidRequest", "BAD_FILE"),
        ([node(ep_cache_context="nowhere.bin")], "NotFound", "FILE_MISSING"),
        ([node(ep_cache_context="../adder.bin")], "InvalidRequest", "BAD_FILE"),
        ([node(ep_cache_context="/etc/passwd")], "InvalidRequest", "BAD_FILE"),
        ([node(ep_cache_context="")], "InvalidRequest", "BAD_FILE"),
        ([node(embed_mode=1, ep_cache_context=b"no binary" * 999)], "InvalidRequest", "BAD_FILE"),
        ([node(source="OpenVINO")], "Unsupported", "LAYOUT"),
        ([node(), node(graph="two", ep_cache_context="b.bin")], "Unsupported", "LAYOUT"),
        ([helper.make_node("Add", ["a", "b"], ["y"])], "Unsupported", "LAYOUT"),
        ([node(), helper.make_node("Relu", ["y"], ["z"])], "Unsupported", "LAYOUT"),
    ],
)
def test_a_wrapper_that_does_not_fit_is_refused(
    session: Session,
    make_model: MakeModel,
    tmp_path: Path,
    shared_broker: BrokerProcess,
    nodes: list[onnx.NodeProto],
    kind: str,
    reason: str,
) -> None:
    make_model()
    assert refused(session, write(tmp_path / "bad_ctx.onnx", *nodes)) == (kind, reason)
    shared_broker.wait_counters(contexts=0, models=0)


def test_binaries_of_two_classes_are_not_loaded_into_one_process(
    session: Session, make_model: MakeModel
) -> None:
    with session.load(make_model("with", adder("with"), soc=60, arch=73)) as model:
        assert refused(session, make_model("without", adder("x"), soc=0)) == (
            "VersionMismatch",
            "BINARY_CLASS",
        )
        session.load(make_model("more", adder("more"), soc=43, arch=73)).unload()
        model.graph.bind().run()


def test_graphs_that_share_weights_run_side_by_side(
    session: Session, make_model: MakeModel
) -> None:
    tensors = [FakeTensor(n, "float32", SHAPE) for n in "aby"]
    graphs = [
        FakeGraph(name, (tensors[0], tensors[1]), (tensors[2],), ("add",), shared_weight_bytes=4096)
        for name in ("one", "two")
    ]
    a, b = numbers(6)
    with session.load(make_model("shared", *graphs)) as model:
        for graph in model.graphs.values():
            assert (graph.run({"a": a, "b": b})["y"] == a + b).all()


def test_a_dtype_that_has_no_place_is_refused(session: Session, make_model: MakeModel) -> None:
    tensors = [FakeTensor(n, "ufixed4", (8,), scale=1.0, offset=0) for n in "ay"]
    path = make_model("nibbles", FakeGraph("g", (tensors[0],), (tensors[1],), ("null",)))
    assert refused(session, path) == ("Unsupported", "DTYPE")


def test_quantised_tensors_say_what_their_numbers_mean(
    session: Session, make_model: MakeModel
) -> None:
    with session.load(make_model("quantised", quantised())) as model:
        spec = model.graph.inputs["q"]
        assert spec.dtype == np.uint8
        assert spec.quantization is not None
        assert (spec.quantization.scales, spec.quantization.offsets) == ((0.5,), (-10,))
        q = np.array([10, 11, 12, 20, 30, 255], np.uint8)
        real = (q.astype(np.float64) - 10) * 0.5 * 2
        expected = np.clip(np.round(real / 0.5 + 10), 0, 255).astype(np.uint8)
        assert model.graph.run({"q": q})["r"].tolist() == expected.tolist()


def test_a_model_of_many_graphs_and_widths(session: Session, make_model: MakeModel) -> None:
    graphs = [adder(f"graph {n}") for n in range(40)]
    with session.load(make_model("many", mixed(), quantised(), *graphs)) as model:
        assert len(model.graphs) == 42
        a, b = numbers(1)
        bindings = [model.graphs[f"graph {n}"].bind() for n in range(0, 40, 5)]
        for binding in bindings:
            binding.inputs["a"][...] = a
            binding.inputs["b"][...] = b
            binding.run()
            assert (binding.outputs["y"] == a + b).all()


def test_a_binary_with_a_tensor_too_large_to_hold_is_refused(
    session: Session, tmp_path: Path
) -> None:
    huge = FakeTensor("a", "float32", (1 << 15, 1 << 15, 4))
    small = FakeTensor("y", "float32", (1,))
    path = tmp_path / "huge.bin"
    path.write_bytes(binary_bytes([FakeGraph("g", (huge,), (small,), ("null",))]))
    assert refused(session, path) == ("InvalidRequest", "BAD_FILE")
