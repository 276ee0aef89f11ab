# SPDX-License-Identifier: Apache-2.0
"""Every way in which ONNX Runtime and the QNN tools lay binaries out, loaded and run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder, numbers
from tests.native.qnn_models import compiled
from tests.tiny_wrappers import compile_wrapper

from qnnbroker.cli.compiling_shared import compile_shared
from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.client import Session, Unsupported, connect
from qnnbroker.native.fake import FakeGraph, FakeTensor
from qnnbroker.v1 import control_pb2 as pb

DTYPES = {
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "float16": "float16",
    "float32": "float32",
    "bool8": "bool",
    "sfixed8": "int8",
    "sfixed16": "int16",
    "ufixed8": "uint8",
    "ufixed16": "uint16",
}


def works(session: Session, path: Path, graph: str = "") -> None:
    model = session.load(path)
    a, b = numbers(1)
    chosen = model.graphs[graph] if graph else model.graph
    (result,) = chosen.run({"a": a, "b": b}).values()
    np.testing.assert_array_equal(result, a + b)


# --- on the fake library


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_and_shapes_travel_as_they_are(
    shared_broker: BrokerProcess, make_model: MakeModel, dtype: str, shape: tuple[int, ...]
) -> None:
    scale = {"scale": 0.5, "offset": 0} if "fixed" in dtype else {}
    # QNN has no rank 0: a scalar is a tensor of one element.
    tensors = [FakeTensor(n, dtype, shape or (1,), **scale) for n in ("x", "y")]  # type: ignore[arg-type]
    path = make_model(
        "copy", FakeGraph("copy", (tensors[0],), (tensors[1],), (("copy", "x", "y"),))
    )
    with connect(shared_broker.runtime_dir) as session, session.load(path) as model:
        spec = model.graph.inputs["x"]
        assert (spec.dtype, spec.shape) == (np.dtype(DTYPES[dtype]), shape or (1,))
        assert (spec.quantization is not None) == ("fixed" in dtype)
        x = np.arange(int(np.prod(spec.shape))).reshape(spec.shape).astype(spec.dtype)
        (y,) = model.graph.run({"x": x}).values()
        np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("first", ["one", "two"])
def test_wrappers_of_one_binary_with_shared_weights_load_it_once(
    broker: BrokerProcess, make_model: MakeModel, first: str
) -> None:
    graphs = [
        replace(adder(n), weight_bytes=1 << 20, shared_weight_bytes=4 << 20) for n in ("one", "two")
    ]
    binary = make_model("shared", *graphs)
    tensors = [Tensor(n, "float32", (4, 8)) for n in ("a", "b", "y")]
    wrappers = {}
    for name in ("one", "two"):
        wrappers[name] = binary.with_name(f"{name}_ctx.onnx")
        content = wrapper_bytes(name, tensors[:2], tensors[2:], Place(binary.name), "v2")
        wrappers[name].write_bytes(content)
    second = {"one": "two", "two": "one"}[first]
    with connect(broker.runtime_dir) as one, connect(broker.runtime_dir) as two:
        works(one, wrappers[first])
        works(two, wrappers[second])
        assert two.models[0].shared
        assert list(two.models[0].graphs) == [second]
        assert one.models[0].content_hash == two.models[0].content_hash
        (made,) = broker.calls("contextCreateFromBinary")
        assert made.number("bytes") == 6 << 20  # the shared ones once
        works(one, binary, "one")
        assert broker.counters()["contexts"] == 1


def test_an_embedded_binary_is_the_same_context_as_the_bare_one(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    binary = make_model("bare", file_bytes=3 << 20)
    tensors = [Tensor(n, "float32", (4, 8)) for n in ("a", "b", "y")]
    wrapper = binary.with_name("embedded.onnx")
    place = Place(binary.read_bytes())
    wrapper.write_bytes(wrapper_bytes("add", tensors[:2], tensors[2:], place, "v2"))
    with connect(broker.runtime_dir) as session:
        works(session, wrapper)
        works(session, binary)
        assert broker.counters()["contexts"] == 1
        assert broker.counters()["binaries_copied_total"] == 0


# --- on the real library


@pytest.fixture
def real(start_broker: StartBroker, tmp_path: Path) -> BrokerProcess:
    broker = start_broker(backend="qnn", verdict_dir=str(tmp_path / "verdicts"))
    broker.accidents_expected = True
    return broker


@pytest.mark.qnn
@pytest.mark.parametrize("embed", [0, 1])
def test_a_wrapper_of_onnxruntime_loads_with_its_binary_beside_or_inside(
    real: BrokerProcess, tmp_path: Path, embed: int
) -> None:
    wrapper = compile_wrapper("add", embed, tmp_path / "add_ctx.onnx")
    assert len(list(tmp_path.glob("*.bin"))) == 1 - embed
    with connect(real.runtime_dir) as session, session.load(wrapper) as model:
        a, b = (np.full((1, 8), v, np.float32) for v in (1.5, 2.25))
        (c,) = model.graph.run({"a": a, "b": b}).values()
        np.testing.assert_allclose(c, a + b, rtol=1e-3)  # in 16-bit floats
        described = real.stub.DescribeModel(pb.DescribeModelRequest(name=model.name)).model
        assert described.compatibility.startswith("v2:6:2.")
        assert not [w for w in described.warnings if "the wrapper says" in w]


@pytest.mark.qnn
@pytest.mark.parametrize("embed", [0, 1])
def test_a_wrapper_with_operators_for_the_cpu_is_refused_and_names_them(
    real: BrokerProcess, tmp_path: Path, embed: int
) -> None:
    wrapper = compile_wrapper("parts", embed, tmp_path / "parts_ctx.onnx")
    with connect(real.runtime_dir) as session:
        with pytest.raises(Unsupported, match="Erf 'middle'") as refused:
            session.load(wrapper)
        assert refused.value.reason == "LAYOUT"


@pytest.mark.qnn
@pytest.mark.parametrize("embed", [0, 1])
def test_a_wrapper_of_several_partitions_offers_each(
    real: BrokerProcess, tmp_path: Path, embed: int
) -> None:
    """The wrapper of two partitions, without the operator between them that needs the CPU."""
    wrapper = compile_wrapper("parts", embed, tmp_path / "parts_ctx.onnx")
    model = onnx.load(wrapper)
    nodes = [n for n in model.graph.node if n.op_type == "EPContext"]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.save(model, wrapper)
    with connect(real.runtime_dir) as session, session.load(wrapper) as loaded:
        assert len(loaded.graphs) == len(nodes) == 2
        x = np.ones((1, 8), np.float32)
        for node in nodes:
            (partition,) = (a.s.decode() for a in node.attribute if a.name == "partition_name")
            graph = loaded.graphs[partition]
            assert list(graph.inputs) == list(node.input)
            (y,) = graph.run({node.input[0]: x}).values()
            assert np.isfinite(y).all()
        assert real.counters()["contexts"] == 1


@pytest.mark.qnn
def test_quantised_boundaries_have_the_names_of_the_wrapper(
    real: BrokerProcess, tmp_path: Path
) -> None:
    """With the quantising operators left to the CPU, the graph's names differ from the edges'."""
    wrapper = compile_wrapper("qdq", 0, tmp_path / "qdq_ctx.onnx")
    model = onnx.load(wrapper)
    (node,) = (n for n in model.graph.node if n.op_type == "EPContext")
    overrides = {a.name: a.s.decode() for a in node.attribute}.get("io_name_overrides", "")
    assert overrides
    del model.graph.node[:]
    model.graph.node.append(node)
    onnx.save(model, wrapper)
    with connect(real.runtime_dir) as session, session.load(wrapper) as loaded:
        graph = loaded.graph
        assert (list(graph.inputs), list(graph.outputs)) == (list(node.input), list(node.output))
        spec = graph.inputs[node.input[0]]
        assert spec.dtype == np.uint8
        assert spec.quantization is not None
        assert spec.quantization.scales == pytest.approx((0.05,))
        assert spec.quantization.offsets == (-128,)
        x = np.full(spec.shape, 140, np.uint8)
        (y,) = graph.run({node.input[0]: x}).values()
        assert y.dtype == np.uint8


def source(path: Path, size: int, rows: int = 1, *, weights: bool) -> Path:
    """A product with weights that depend on the size, or a sum of two inputs."""

    def tensor(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, size])

    array = np.random.default_rng(size).standard_normal((size, size)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul" if weights else "Add", ["x", "w"], ["y"])],
        path.stem,
        [tensor("x")] if weights else [tensor("x"), tensor("w")],
        [tensor("y")],
        [numpy_helper.from_array(array, "w")] if weights else [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    onnx.save(model, path)
    return path


@pytest.mark.qnn
def test_two_models_in_one_binary_that_share_no_weights_are_one_context(
    real: BrokerProcess, tmp_path: Path
) -> None:
    sizes = {"a": 8, "b": 24}
    sources = [source(tmp_path / f"{n}.onnx", s, weights=False) for n, s in sizes.items()]
    made = compile_shared(sources, tmp_path)
    with connect(real.runtime_dir) as one, connect(real.runtime_dir) as two:
        b = two.load(made.models[1].wrapper)  # the one that the binary is not named after
        a = one.load(made.models[0].wrapper)
        assert a.shared
        assert a.content_hash == b.content_hash
        assert real.counters()["contexts"] == 1
        for model, size in ((a, 8), (b, 24)):
            x = np.arange(size, dtype=np.float32)[None]
            (y,) = model.graph.run({"x": x, "w": x}).values()
            np.testing.assert_allclose(y, 2 * x, rtol=1e-3)


@pytest.mark.qnn
def test_shared_weights_are_refused_where_the_library_would_die_of_them(
    real: BrokerProcess, tmp_path: Path
) -> None:
    sources = [
        source(tmp_path / f"{n}.onnx", 64, rows, weights=True) for rows, n in ((1, "a"), (2, "b"))
    ]
    made = compile_shared(sources, tmp_path)
    bystander = tmp_path / "dense.bin"
    bystander.write_bytes(compiled("dense").binary)
    with connect(real.runtime_dir) as session, session.load(bystander) as model:
        for one in made.models:
            with pytest.raises(Unsupported) as refused:
                session.load(one.wrapper)
            assert refused.value.reason == "SHARED_WEIGHTS"
        wanted = compiled("dense")
        (y,) = model.graph.run(wanted.inputs).values()
        np.testing.assert_array_equal(y, next(iter(wanted.outputs.values())))
        assert session.server_info().pid == real.pid


@pytest.mark.qnn
def test_the_worker_imports_neither_onnx_nor_onnxruntime(
    real: BrokerProcess, tmp_path: Path
) -> None:
    wrapper = compile_wrapper("add", 1, tmp_path / "add_ctx.onnx")
    with connect(real.runtime_dir) as session:
        session.load(wrapper)
        maps = Path(f"/proc/{real.pid}/maps").read_text()
    assert "libQnnHtp.so" in maps
    assert "onnxruntime_pybind" not in maps
    assert "/onnx/" not in maps
    code = "import sys, qnnbroker.broker.process as m; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"onnx", "onnxruntime", "click", "rich"} & set(out.stdout.split())
