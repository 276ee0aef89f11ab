# SPDX-License-Identifier: Apache-2.0
"""epcontext: real wrappers read as the onnx package does; damaged ones refused."""

import mmap
import tracemalloc
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tests.tiny_wrappers import around_embedded, compile_wrapper, ep_node, model_of, varint

from qnnbroker.broker.epcontext import (
    ByteRange,
    EPContextNode,
    ValueInfo,
    Wrapper,
    binary_path,
    check_fully_offloaded,
    embedded_binary,
    names_for,
    read_wrapper,
    sniff,
)
from qnnbroker.broker.protowire import Budget
from qnnbroker.protos.errors import InvalidRequest, Unsupported

LAYOUTS = [("add", 0), ("add", 1), ("parts", 0), ("parts", 1), ("qdq", 0), ("qdq", 1)]


@pytest.fixture(scope="session")
def wrappers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """What onnxruntime-qnn writes for each model and embed mode."""
    folder = tmp_path_factory.mktemp("wrappers")
    return {(m, e): compile_wrapper(m, e, folder / f"{m} {e}.onnx") for m, e in LAYOUTS}


def only_node(data: bytes) -> EPContextNode:
    (node,) = read_wrapper(data).nodes
    return node


def as_value(info: onnx.ValueInfoProto) -> ValueInfo:
    tensor = info.type.tensor_type
    return ValueInfo(info.name, tensor.elem_type, tuple(d.dim_value for d in tensor.shape.dim))


def as_onnx_reads(path: Path) -> Wrapper:
    """The same record, built from what the onnx package reads."""
    model = onnx.load(path, load_external_data=False)
    data = path.read_bytes()
    nodes, others = [], []
    for n in model.graph.node:
        if n.op_type != "EPContext":
            others.append((n.op_type, n.name))
            continue
        a = {x.name: helper.get_attribute_value(x) for x in n.attribute}
        cache: str | ByteRange | None = None
        if a["embed_mode"] and "ep_cache_context" in a:
            cache = ByteRange(data.index(a["ep_cache_context"]), len(a["ep_cache_context"]))
        elif "ep_cache_context" in a:
            cache = a["ep_cache_context"].decode()
        pairs = a.get("io_name_overrides", b"").decode().split(";")
        overrides = {p.split("=")[0]: p.split("=")[1] for p in pairs if p}
        edges = (*n.input, *n.output)
        nodes.append(
            EPContextNode(
                name=n.name,
                partition_name=a["partition_name"].decode(),
                main_context=bool(a["main_context"]),
                embed_mode=a["embed_mode"],
                cache_context=cache,
                source=a["source"].decode(),
                sdk_version=a["ep_sdk_version"].decode(),
                inputs=tuple(n.input),
                outputs=tuple(n.output),
                io_name_overrides={e: q for e, q in overrides.items() if e in edges},
            )
        )
    return Wrapper(
        ir_version=model.ir_version,
        metadata={p.key: p.value for p in model.metadata_props},
        graph_name=model.graph.name,
        inputs=tuple(map(as_value, model.graph.input)),
        outputs=tuple(map(as_value, model.graph.output)),
        nodes=tuple(nodes),
        other_nodes=tuple(
            (n.op_type, n.name) for n in model.graph.node if n.op_type != "EPContext"
        ),
    )


@pytest.mark.qnn
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_real_wrapper_is_read_as_the_onnx_package_reads_it(
    wrappers: dict[tuple[str, int], Path], layout: tuple[str, int]
) -> None:
    path = wrappers[layout]
    data = path.read_bytes()
    assert sniff(data) == "wrapper"
    assert read_wrapper(data) == as_onnx_reads(path)


@pytest.mark.qnn
def test_real_binaries_are_found_beside_the_wrapper_and_inside_it(
    wrappers: dict[tuple[str, int], Path],
) -> None:
    path = wrappers["add", 0]
    binary = binary_path(path, only_node(path.read_bytes())).read_bytes()
    assert sniff(binary) == "binary"
    data = memoryview(wrappers["add", 1].read_bytes())
    inside = embedded_binary(data, only_node(bytes(data)))
    assert inside.obj is data.obj
    assert sniff(inside) == "binary"
    assert len(inside) == len(binary)


@pytest.mark.qnn
@pytest.mark.parametrize("embed_mode", [0, 1])
def test_two_partitions_are_two_graphs_of_one_binary(
    wrappers: dict[tuple[str, int], Path], embed_mode: int
) -> None:
    wrapper = read_wrapper(wrappers["parts", embed_mode].read_bytes())
    assert [n.main_context for n in wrapper.nodes] == [True, False]
    assert wrapper.nodes[1].cache_context is None
    assert wrapper.main_nodes == wrapper.nodes[:1]
    assert len({n.partition_name for n in wrapper.nodes}) == 2
    assert [names_for(n) for n in wrapper.nodes] == [
        {"x y": "x y", "a": "a"},
        {"b": "b", "out/é:0": "out/é:0"},
    ]


@pytest.mark.qnn
def test_operators_outside_the_npu_are_refused_by_name(
    wrappers: dict[tuple[str, int], Path],
) -> None:
    check_fully_offloaded(read_wrapper(wrappers["add", 0].read_bytes()))
    with pytest.raises(
        Unsupported, match="1 operator beside its EPContext nodes: Erf 'middle'"
    ) as caught:
        check_fully_offloaded(read_wrapper(wrappers["parts", 0].read_bytes()))
    assert caught.value.reason == "LAYOUT"


@pytest.mark.qnn
def test_tensors_keep_the_names_of_the_model_when_the_boundary_is_quantised(
    wrappers: dict[tuple[str, int], Path],
) -> None:
    wrapper = read_wrapper(wrappers["qdq", 0].read_bytes())
    (node,) = wrapper.nodes
    assert node.io_name_overrides == {"x_q": "x", "m_q": "y"}
    assert names_for(node) == {"x": "x_q", "y": "m_q"}
    assert {op for op, _ in wrapper.other_nodes} == {"QuantizeLinear", "DequantizeLinear"}


@pytest.mark.qnn
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrapper_cut_off_anywhere_is_refused(
    wrappers: dict[tuple[str, int], Path], layout: tuple[str, int]
) -> None:
    data = memoryview(wrappers[layout].read_bytes())
    whole = read_wrapper(data)
    # Every offset of the structure, every 97th inside the binary.
    span = next((n.cache_context for n in whole.nodes if n.embed_mode), ByteRange(0, 0))
    assert isinstance(span, ByteRange)
    inside = range(span.offset + 64, span.offset + span.length - 64)
    for end in (e for e in range(len(data)) if e not in inside or e % 97 == 0):
        # A cut between two top-level fields leaves a model; what it still has must be the same.
        try:
            left = read_wrapper(data[:end])
        except InvalidRequest:
            continue
        assert left.nodes == whole.nodes


@pytest.mark.qnn
@settings(deadline=None, max_examples=300)
@given(
    layout=st.sampled_from([("add", 0), ("parts", 0), ("qdq", 0), ("parts", 1)]),
    flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=6),
)
def test_flipped_bits_give_a_wrapper_or_a_refusal(
    wrappers: dict[tuple[str, int], Path],
    layout: tuple[str, int],
    flips: list[tuple[int, int]],
) -> None:
    data = bytearray(wrappers[layout].read_bytes())
    for position, bits in flips:
        # Half of the flips hit the first kilobyte, where the structure is.
        data[position % (len(data) if position % 2 else min(1024, len(data)))] ^= bits
    read_or_refuse(bytes(data))


@given(st.binary(max_size=400))
def test_random_bytes_give_a_refusal(data: bytes) -> None:
    read_or_refuse(data)
    read_or_refuse(b"\x08\x0e\x3a" + data)


def read_or_refuse(data: bytes) -> None:
    assert sniff(data) in ("wrapper", "binary", "unknown")
    try:
        wrapper = read_wrapper(data)
        check_fully_offloaded(wrapper)
        for node in wrapper.nodes:
            names_for(node)
            if isinstance(node.cache_context, ByteRange):
                embedded_binary(memoryview(data), node)
            else:
                binary_path(Path("model.onnx"), node)
    except (InvalidRequest, Unsupported) as error:
        refused = error
    else:
        return
    assert refused.reason in ("BAD_FILE", "LAYOUT")
    assert len(str(refused)) < 4000


@pytest.mark.parametrize("length", [2**31 - 1, 2**32, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("tag", [b"\x3a", b"\x3a\x80\x01\x0a", b"\x72", b"\x22"])
def test_absurd_lengths_cost_nothing_and_are_refused(tag: bytes, length: int) -> None:
    with pytest.raises(InvalidRequest, match="claims"):
        read_wrapper(b"\x08\x0e" + tag + varint(length))


def test_a_file_of_endless_small_fields_is_refused() -> None:
    nodes = b"\x0a\x00" * 70_000
    with pytest.raises(InvalidRequest, match="more than 65536 nodes"):
        read_wrapper(b"\x08\x0e\x3a" + varint(len(nodes)) + nodes)
    with pytest.raises(InvalidRequest, match="more protobuf fields"):
        read_wrapper(b"\x08\x0e" * 2000, budget=Budget(fields=1000))


def test_an_embedded_binary_is_neither_read_nor_copied(tmp_path: Path) -> None:
    size = 3 * 2**30
    path = tmp_path / "large.onnx"
    data = around_embedded(size)
    with path.open("wb") as file:  # sparse: the binary is a hole, and would be 3 GB to read
        file.write(data[0])
        file.seek(size, 1)
        file.write(data[1])
    tracemalloc.start()
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as view:
            (node,) = read_wrapper(view).nodes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert node.cache_context == ByteRange(len(data[0]), size)
    assert path.stat().st_blocks * 512 < 2**20
    assert peak < 2**20


def test_a_refusal_holds_on_to_no_view_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"\x08\x0e\x3a\x7fabc")
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with pytest.raises(InvalidRequest) as caught:
            read_wrapper(memoryview(mapped))
        mapped.close()  # BufferError, if the exception's frames still had one
    assert caught.value.__traceback__ is not None


def test_symbolic_and_unknown_shapes_are_told_apart() -> None:
    wrapper = read_wrapper(model_of(ep_node()))
    assert wrapper.inputs[0].shape == (1, "batch", "")
    assert wrapper.outputs[0].shape is None
    assert wrapper.outputs[0].elem_type == TensorProto.FLOAT16


def test_the_operator_must_be_of_the_right_domain() -> None:
    node = ep_node()
    node.domain = "somebody.else"
    wrapper = read_wrapper(model_of(node))
    assert wrapper.nodes == ()
    assert wrapper.other_nodes == (("EPContext", "node_0"),)


def test_a_refusal_names_ten_operators_and_counts_the_rest() -> None:
    others = [helper.make_node("Relu", ["x"], ["y"], name=f"relu_{i}") for i in range(12)]
    with pytest.raises(Unsupported, match=r"12 operators beside .*'relu_9' and 2 more;") as caught:
        check_fully_offloaded(read_wrapper(model_of(ep_node(), *others)))
    assert "relu_10" not in str(caught.value)
    with pytest.raises(Unsupported, match="12 operators, is not compiled: run `qnnbroker c"):
        check_fully_offloaded(read_wrapper(model_of(*others)))


def test_a_wrapper_without_a_binary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has 0 EPContext nodes"):
        check_fully_offloaded(read_wrapper(model_of()))
    lonely = ep_node(main_context=0, ep_cache_context=None)
    with pytest.raises(InvalidRequest, match="none of which carries"):
        check_fully_offloaded(read_wrapper(model_of(lonely)))


def test_kinds_of_files_are_told_apart_by_their_first_bytes() -> None:
    assert sniff(b"qnnbroker-fake 1 graph") == "binary"
    assert sniff(model_of()) == "wrapper"
    for data in (b"", b"\x08", bytes(100), b"\x7fELF" + bytes(60), b"PK\x03\x04" + bytes(60)):
        assert sniff(data) == "unknown"
