# SPDX-License-Identifier: Apache-2.0
"""The record layouts of csrc/qb_tensor.c, on records made by hand: all versions and encodings."""

import ctypes as C
import struct
from pathlib import Path

import pytest

from qnnbroker.native import qnn_library

CORE = C.CDLL(str(Path(qnn_library.__file__).with_name("libqbcore.so")))
NONE = 0x7FFFFFFF


class BinaryView(C.Structure):
    _fields_ = [
        ("version", C.c_uint32),
        ("backend_id", C.c_uint32),
        ("build_id", C.c_char_p),
        ("soc_name", C.c_char_p),
        ("core_api", C.c_uint32 * 3),
        ("backend_api", C.c_uint32 * 3),
        ("blob_version", C.c_uint32 * 3),
        ("blob_bytes", C.c_uint64),
        ("graph_count", C.c_uint32),
        ("graphs", C.c_void_p),
        ("soc_model", C.c_uint32),
        ("dsp_arch", C.c_uint32),
    ]


class GraphView(C.Structure):
    _fields_ = [
        ("version", C.c_uint32),
        ("name", C.c_char_p),
        ("input_count", C.c_uint32),
        ("output_count", C.c_uint32),
        ("inputs", C.c_void_p),
        ("outputs", C.c_void_p),
        *[(f"{k}_bytes", C.c_uint64) for k in ("spill", "vtcm", "io", "weight", "shared")],
    ]


class TensorView(C.Structure):
    _fields_ = [
        *[(k, C.c_uint32) for k in ("version", "id", "type", "dtype", "rank")],
        ("name", C.c_char_p),
        ("dims", C.c_void_p),
        ("quantized", C.c_bool),
        *[(k, C.c_uint32) for k in ("encoding", "bits", "pair_count")],
        ("axis", C.c_int32),
        ("union_base", C.c_void_p),
    ]


class TensorSpec(C.Structure):
    _fields_ = [
        *[(k, C.c_uint32) for k in ("id", "type", "dtype", "rank")],
        ("name", C.c_char_p),
        ("dims", C.c_void_p),
        ("quantized", C.c_bool),
        *[(k, C.c_uint32) for k in ("encoding", "bits", "pair_count")],
        ("axis", C.c_int32),
        ("scales", C.c_void_p),
        ("offsets", C.c_void_p),
        ("pairs", C.c_void_p),
    ]


for _name in ("qb_binary_read", "qb_graph_read", "qb_tensor_read", "qb_tensor_pair"):
    getattr(CORE, _name).restype = C.c_bool
CORE.qb_tensor_build.restype = None


class Record:
    """Bytes with fields put in at offsets; keeps alive what it points to."""

    def __init__(self, size: int) -> None:
        self.bytes = C.create_string_buffer(size)
        self.kept: list[object] = []

    @property
    def address(self) -> int:
        return C.addressof(self.bytes)

    def put(self, offset: int, layout: str, *values: float) -> "Record":
        struct.pack_into("<" + layout, self.bytes, offset, *values)
        return self

    def point(self, offset: int, target: "bytes | Record") -> "Record":
        if isinstance(target, bytes):
            target = Record(len(target) + 1).put(0, f"{len(target)}s", target)  # type: ignore[arg-type]
        self.kept.append(target)
        return self.put(offset, "Q", target.address)


def binary(version: int) -> Record:
    """A description of a binary, laid out as that version has it."""
    record = Record(144).put(0, "I", version).put(8, "I", 6)
    record.point(16, b"v2.51.0").put(24, "3I", 2, 40, 1).put(36, "3I", 5, 51, 2)
    record.point(48, b"some chip")
    graphs = Record(88)
    if version == 3:
        record.put(56, "3I", 4, 0, 6).put(72, "Q", 1 << 33).put(96, "I", 1).point(104, graphs)
        record.put(120, "I", 8).point(128, Record(8).put(0, "2I", 1, 73)).put(136, "I", 60)
    else:
        record.put(56, "3I", 9, 9, 9).put(68, "3I", 4, 0, 6).put(96, "Q", 1 << 33)
        record.put(120, "I", 1).point(128, graphs)
    return record


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_binary_is_read_in_each_version(version: int) -> None:
    record, view = binary(version), BinaryView()
    assert CORE.qb_binary_read(C.c_void_p(record.address), C.byref(view))
    assert (view.version, view.backend_id) == (version, 6)
    assert (view.build_id, view.soc_name) == (b"v2.51.0", b"some chip")
    assert (list(view.core_api), list(view.backend_api)) == ([2, 40, 1], [5, 51, 2])
    assert (list(view.blob_version), view.blob_bytes) == ([4, 0, 6], 1 << 33)
    assert (view.graph_count, view.graphs is not None) == (1, True)
    assert (view.soc_model, view.dsp_arch) == ((60, 73) if version == 3 else (0, 0))


@pytest.mark.parametrize("version", [0, 4, NONE])
def test_a_binary_of_an_unknown_version_is_not_read(version: int) -> None:
    record, view = Record(144).put(0, "I", version), BinaryView()
    assert not CORE.qb_binary_read(C.c_void_p(record.address), C.byref(view))
    assert view.version == version


def test_counts_without_an_array_are_taken_as_none() -> None:
    record, view = Record(144).put(0, "I", 3).put(96, "I", 7), BinaryView()
    assert CORE.qb_binary_read(C.c_void_p(record.address), C.byref(view))
    assert view.graph_count == 0
    graph_record, graph = Record(88).put(0, "I", 1).put(16, "I", 3).put(32, "I", 4), GraphView()
    assert CORE.qb_graph_read(C.c_void_p(graph_record.address), 0, C.byref(graph))
    assert (graph.input_count, graph.output_count) == (0, 0)


def graph_blob(size: int, first: int, second: int) -> Record:
    record = Record(112).put(0, "I", first).put(8, "Q", 11).put(16, "I", 12)
    record.put(40, "I", second).put(72, "Q", 13).put(88, "Q", 14).put(104, "Q", 15)
    return record


@pytest.mark.parametrize(
    ("version", "size", "first", "second", "costs"),
    [
        (3, 112, 1, 2, [11, 12, 13, 14, 15]),
        (3, 112, 1, 1, [11, 12, 0, 0, 0]),
        (3, 48, 1, 2, [11, 12, 0, 0, 0]),
        (3, 112, 2, 2, [0] * 5),
        (3, 16, 1, 2, [0] * 5),
        (2, 112, 1, 2, [0] * 5),
        (1, 112, 1, 2, [0] * 5),
    ],
)
def test_a_graph_states_its_costs_only_in_the_known_layout(
    version: int, size: int, first: int, second: int, costs: list[int]
) -> None:
    # The second of two, so that the stride is tested too.
    record = Record(176).put(88, "I", version).point(96, b"g").put(104, "I", 2).put(120, "I", 1)
    record.point(112, Record(288)).point(128, Record(144))
    record.put(152, "I", size).point(160, graph_blob(size, first, second))
    view = GraphView()
    assert CORE.qb_graph_read(C.c_void_p(record.address), 1, C.byref(view))
    assert (view.name, view.input_count, view.output_count) == (b"g", 2, 1)
    assert [view.spill_bytes, view.vtcm_bytes, view.io_bytes, view.weight_bytes] == costs[:4]
    assert view.shared_bytes == costs[4]


def tensor(version: int = 1) -> Record:
    record = Record(144).put(0, "I", version).put(8, "I", 5).point(16, b"x").put(24, "I", 1)
    record.put(32, "I", 0x0408).put(40, "2I", NONE, NONE).put(80, "I", 2)
    return record.point(88, Record(8).put(0, "2I", 3, 4))


def pairs_of(view: TensorView) -> list[tuple[float, int]]:
    scale, offset, pairs = C.c_float(), C.c_int32(), []
    for i in range(view.pair_count):
        if not CORE.qb_tensor_pair(C.byref(view), i, C.byref(scale), C.byref(offset)):
            break
        pairs.append((scale.value, offset.value))
    assert not CORE.qb_tensor_pair(C.byref(view), view.pair_count, C.byref(scale), C.byref(offset))
    return pairs


@pytest.mark.parametrize("version", [1, 2])
def test_a_tensor_is_read_in_each_version(version: int) -> None:
    record, view = tensor(version), TensorView()
    assert CORE.qb_tensor_read(C.c_void_p(record.address), 0, C.byref(view))
    assert (view.id, view.name, view.type, view.dtype) == (5, b"x", 1, 0x0408)
    assert (view.rank, struct.unpack("<2I", C.string_at(view.dims, 8))) == (2, (3, 4))
    assert not view.quantized
    assert pairs_of(view) == []
    assert not CORE.qb_tensor_read(C.c_void_p(tensor(3).address), 0, C.byref(view))


def quantised(encoding: int) -> Record:
    """A tensor with that encoding; its values are read below."""
    record = tensor().put(40, "2I", 1, encoding)
    if encoding == 0:
        return record.put(48, "fi", 0.5, -128)
    if encoding == 1:
        pairs = Record(16).put(0, "fifi", 0.5, -1, 0.25, 2)
        return record.put(48, "iI", 3, 2).point(56, pairs)
    if encoding == 2:
        return record.put(48, "Ifi", 4, 0.5, -8)
    if encoding == 3:
        record.put(48, "IiI", 4, 1, 2).point(64, Record(8).put(0, "2f", 0.5, 0.25))
        return record.point(72, Record(8).put(0, "2i", -1, 2))
    return record


EXPECTED = {
    0: (0, -1, [(0.5, -128)]),
    1: (0, 3, [(0.5, -1), (0.25, 2)]),
    2: (4, -1, [(0.5, -8)]),
    3: (4, 1, [(0.5, -1), (0.25, 2)]),
    5: (0, -1, []),
}


@pytest.mark.parametrize("encoding", EXPECTED)
def test_each_quantisation_is_read(encoding: int) -> None:
    record, view = quantised(encoding), TensorView()
    assert CORE.qb_tensor_read(C.c_void_p(record.address), 0, C.byref(view))
    assert view.quantized
    assert view.encoding == encoding
    assert (view.bits, view.axis, pairs_of(view)) == EXPECTED[encoding]


def test_a_symmetric_quantisation_has_offsets_of_zero() -> None:
    record, view = quantised(3).put(72, "Q", 0), TensorView()
    assert CORE.qb_tensor_read(C.c_void_p(record.address), 0, C.byref(view))
    assert pairs_of(view) == [(0.5, 0), (0.25, 0)]


@pytest.mark.parametrize(("encoding", "scales_at"), [(1, 56), (3, 64)])
def test_missing_scales_are_not_read(encoding: int, scales_at: int) -> None:
    record, view = quantised(encoding).put(scales_at, "Q", 0), TensorView()
    assert CORE.qb_tensor_read(C.c_void_p(record.address), 0, C.byref(view))
    assert pairs_of(view) == []


@pytest.mark.parametrize("encoding", EXPECTED)
def test_a_tensor_that_is_built_reads_back(encoding: int) -> None:
    bits, axis, pairs = EXPECTED[encoding]
    n = len(pairs)
    dims = Record(8).put(0, "2I", 3, 4)
    scales = Record(64).put(0, f"{n}f", *[s for s, _ in pairs])
    offsets = Record(64).put(0, f"{n}i", *[o for _, o in pairs])
    both = Record(64).put(0, "fi" * n, *[v for pair in pairs for v in pair])
    spec = TensorSpec(5, 1, 0x0408, 2, b"x", dims.address, True, encoding, bits, n, axis)
    spec.scales, spec.offsets, spec.pairs = scales.address, offsets.address, both.address
    record = Record(144).put(0, "144s", b"\xff" * 144)  # type: ignore[arg-type]
    CORE.qb_tensor_build(C.c_void_p(record.address), C.byref(spec), C.c_void_p(0x1234567890), 12)

    view = TensorView()
    assert CORE.qb_tensor_read(C.c_void_p(record.address), 0, C.byref(view))
    assert (view.version, view.id, view.name, view.type, view.dtype) == (1, 5, b"x", 1, 0x0408)
    assert (view.rank, view.dims) == (2, dims.address)
    assert view.quantized == bool(pairs)
    assert pairs_of(view) == pairs
    if pairs:
        assert (view.encoding, view.bits, view.axis) == (encoding, bits, axis)
    dense, memory_type = struct.unpack_from("<I", record.bytes, 28), record.bytes.raw[96:100]
    assert (dense, memory_type) == ((0,), bytes(4))
    assert struct.unpack_from("<QI", record.bytes, 104) == (0x1234567890, 12)
    assert record.bytes.raw[116:] == bytes(28)
