# SPDX-License-Identifier: Apache-2.0
"""Fake context binaries: what is written is what is read, and anything else is refused cleanly."""

import ctypes
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.fake_client import RawFake, adder, check, floats, pointer

from qnnbroker.native.fake import (
    DTYPES,
    FILE_OVERHEAD_BYTES,
    FakeGraph,
    FakeTensor,
    binary_bytes,
    fake_qnn_dir,
    write_binary,
)
from qnnbroker.native.qnn_error import QnnError
from qnnbroker.native.qnn_info import BinaryInfo, QuantInfo, parse_binary
from qnnbroker.native.qnn_library import QnnLibrary

MALFORMED = 30010
HEAD = "qnnbroker-fake 1\n"
GRAPH = HEAD + "graph g\ninput a uint8 4\noutput b uint8 4\n"


@pytest.fixture(scope="module")
def library() -> QnnLibrary:
    return QnnLibrary(fake_qnn_dir())


def read(library: QnnLibrary, *graphs: FakeGraph) -> BinaryInfo:
    return parse_binary(library, binary_bytes(graphs))


@pytest.fixture
def code_of(tmp_path: Path) -> "CodeOf":
    return CodeOf(RawFake(tmp_path / "fake"))


class CodeOf:
    """What the system half says about a text."""

    def __init__(self, raw: RawFake) -> None:
        self.raw = raw
        out = ctypes.c_void_p()
        check(raw.system(0, ctypes.pointer(out)))
        self.handle = out.value or 0

    def __call__(self, data: bytes | str) -> int:
        data = data.encode() if isinstance(data, str) else data
        out, size = ctypes.c_void_p(), ctypes.c_uint64()
        return self.raw.system(
            1,
            pointer(self.handle),
            ctypes.c_char_p(data),
            ctypes.c_uint64(len(data)),
            ctypes.pointer(out),
            ctypes.pointer(size),
        )


def test_everything_written_is_read(library: QnnLibrary) -> None:
    graph = FakeGraph(
        "a graph/with: names é",
        (floats("in", 1, 3), floats("x", 2, tensor_id=77)),
        (floats("out", 5, 1, 1, 2),),
        weight_bytes=123456,
        shared_weight_bytes=7000,
        spill_fill_bytes=99,
        vtcm_bytes=1 << 20,
    )
    info = parse_binary(
        library, binary_bytes([graph, adder("two")], arch=73, soc=43, build_id="v9.8.7")
    )
    assert (info.dsp_arch, info.soc_model, info.build_id, info.backend_id) == (73, 43, "v9.8.7", 6)
    first = info.graph("a graph/with: names é")
    assert [t.name for t in first.inputs + first.outputs] == ["in", "x", "out"]
    assert [t.shape for t in first.outputs] == [(5, 1, 1, 2)]
    assert first.inputs[1].tensor_id == 77
    assert [t.tensor_type for t in first.inputs + first.outputs] == [0, 0, 1]
    assert (first.weight_bytes, first.shared_weight_bytes) == (123456, 7000)
    assert (first.spill_fill_bytes, first.vtcm_bytes) == (99, 1 << 20)
    assert first.io_bytes == 3 * 4096
    assert info.graph("two").inputs[0].size_bytes == 16


def test_what_a_binary_was_compiled_for_is_read(library: QnnLibrary) -> None:
    told = binary_bytes([adder()], backend_id=9, core_api="3.1.4", backend_api="1.2.345")
    info = parse_binary(library, told)
    found = (info.backend_id, info.core_api_version, info.backend_api_version)
    assert found == (9, (3, 1, 4), (1, 2, 345))
    info = parse_binary(library, binary_bytes([adder()]))
    found = (info.backend_id, info.core_api_version, info.backend_api_version)
    assert found == (library.backend_id, library.core_api_version, library.backend_api_version)


def test_the_blob_is_the_file_without_its_overhead(library: QnnLibrary, tmp_path: Path) -> None:
    small = write_binary(tmp_path / "small.bin", [adder()])
    large = write_binary(tmp_path / "large.bin", [adder()], file_bytes=1 << 20)
    assert small.stat().st_size > FILE_OVERHEAD_BYTES
    assert large.stat().st_size == 1 << 20
    for path in (small, large):
        info = parse_binary(library, path.read_bytes())
        assert info.blob_bytes == path.stat().st_size - FILE_OVERHEAD_BYTES


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_data_type_has_its_number_and_size(library: QnnLibrary, dtype: str) -> None:
    scale = 0.5 if "fixed" in dtype else None
    tensor = FakeTensor("a", dtype, (3, 5), scale=scale)
    (found,) = read(library, FakeGraph("g", (tensor,), (floats("b", 1),))).graphs[0].inputs
    bits = int("".join(filter(str.isdigit, dtype)))
    assert found.dtype == DTYPES[dtype]
    assert found.size_bytes == (15 * bits + 7) // 8


def test_every_quantisation_is_read(library: QnnLibrary) -> None:
    scales, offsets = (0.5, 0.25, 0.125), (1, -2, 3)
    shape = (2, 3)
    given = [
        FakeTensor("t", "ufixed8", shape, scale=0.5, offset=-128),
        FakeTensor("a", "sfixed8", shape, axis=1, scales=scales, offsets=offsets),
        FakeTensor("w", "ufixed8", shape, scale=0.5, offset=-8, bits=4),
        FakeTensor("x", "sfixed8", shape, axis=1, scales=scales, offsets=offsets, bits=4),
        FakeTensor("s", "sfixed8", shape, axis=1, scales=scales, bits=4),
    ]
    graph = read(library, FakeGraph("g", tuple(given), (floats("out", 1),))).graphs[0]
    found = [tensor.quantization for tensor in graph.inputs]
    assert found[0] == QuantInfo(0, (0.5,), (-128,), None)
    assert found[1] == QuantInfo(1, scales, offsets, 1)
    assert found[2] == QuantInfo(2, (0.5,), (-8,), None, 4)
    assert found[3] == QuantInfo(3, scales, offsets, 1, 4)
    symmetric = found[4]
    assert symmetric is not None
    assert (symmetric.encoding, symmetric.scales, symmetric.axis) == (3, scales, 1)
    assert set(symmetric.offsets) <= {0}
    assert graph.outputs[0].quantization is None


def test_ids_are_unique_and_never_zero(library: QnnLibrary) -> None:
    graphs = [
        FakeGraph(f"g{i}", (floats("a", 1), floats("b", 1, tensor_id=2)), (floats("c", 1),))
        for i in range(3)
    ]
    for graph in read(library, *graphs).graphs:
        ids = [tensor.tensor_id for tensor in graph.inputs + graph.outputs]
        assert len(set(ids)) == 3
        assert 0 not in ids


@pytest.mark.parametrize("version", [1, 2, 3])
def test_older_records_say_the_same(tmp_path: Path, version: int) -> None:
    RawFake(tmp_path / "fake")  # only for the copies of the files
    code = """
import sys
from qnnbroker.native.qnn_info import parse_binary
from qnnbroker.native.qnn_library import QnnLibrary
info = parse_binary(QnnLibrary(sys.argv[1]), open(sys.argv[2], "rb").read())
print(info.dsp_arch, info.blob_bytes, [g.name for g in info.graphs], info.graphs[1].inputs[0].shape)
"""
    path = write_binary(tmp_path / "b.bin", [adder("one"), adder("two")], arch=73, file_bytes=8192)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "fake"), str(path)],
        env={**os.environ, "QNNBROKER_FAKE": f"info_version={version}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    arch = 73 if version == 3 else 0  # the older ones do not tell it
    assert done.stdout.strip() == f"{arch} 4096 ['one', 'two'] (4,)", done.stderr


def test_the_smallest_text_is_accepted(code_of: CodeOf) -> None:
    assert code_of(GRAPH + "end\n") == 0
    assert code_of(GRAPH + "# a remark\n\nop copy\nend\n\n  \n") == 0


MANY_GRAPHS = [GRAPH[len(HEAD) :].replace(" g", f" g{i}") for i in range(1025)]
WRONG = [
    " " + GRAPH + "end\n",
    GRAPH,
    GRAPH + "end\nmore\n",
    GRAPH + "end now\n",
    HEAD + "end\n",
    GRAPH.replace("fake 1", "fake 2") + "end\n",
    GRAPH.replace("fake 1", "fake") + "end\n",
    GRAPH + "colour blue\nend\n",
    GRAPH + "weights\nend\n",
    GRAPH + "weights 1 2\nend\n",
    GRAPH + "weights -1\nend\n",
    GRAPH + "weights 1e3\nend\n",
    GRAPH + "weights 99999999999999999999999\nend\n",
    GRAPH + "weights 68719476737\nend\n",
    GRAPH + "weights 1\nweights 1\nend\n",
    GRAPH + "arch 73\nend\n",
    HEAD + "arch x\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "backend_id -1\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "core_api 2.40\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "core_api 2.40.0 1\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "backend_api 2.40.0.1\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "backend_api 2.40.0\nbackend_api 2.40.0\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "size 5\n" + GRAPH[len(HEAD) :] + "end\n",
    HEAD + "build " + "v" * 64 + "\n" + GRAPH[len(HEAD) :] + "end\n",
    GRAPH + "graph g\ninput a uint8 4\noutput b uint8 4\nend\n",
    GRAPH + "graph h\nend\n",
    GRAPH + "graph %zz\nend\n",
    GRAPH + "input a uint8 4\nend\n",
    GRAPH + "input c uint9 4\nend\n",
    GRAPH + "input c uint8 0\nend\n",
    GRAPH + "input c uint8 4x\nend\n",
    GRAPH + "input c uint8 1x1x1x1x1x1x1x1x1\nend\n",
    GRAPH + "input c uint8 65536x65536\nend\n",
    GRAPH + "input c uint8 4 scale=1\nend\n",
    GRAPH + "input c ufixed8 4\nend\n",
    GRAPH + "input c ufixed8 4 scale=0\nend\n",
    GRAPH + "input c ufixed8 4 scale=nan\nend\n",
    GRAPH + "input c ufixed8 4 scale=1 scale=1\nend\n",
    GRAPH + "input c ufixed8 4 axis=1 scales=1,1,1,1\nend\n",
    GRAPH + "input c ufixed8 4 axis=0 scales=1,1,1\nend\n",
    GRAPH + "input c ufixed8 4 axis=0 scales=1,1,1,1,1\nend\n",
    GRAPH + "input c ufixed8 4 axis=0 scales=1,1,1,1 offsets=1\nend\n",
    GRAPH + "input c ufixed8 - axis=0 scales=1\nend\n",
    GRAPH + "input c uint8 -x4\nend\n",
    GRAPH + "input c uint8 4 id=0\nend\n",
    GRAPH + "input c uint8 4 id=7\ninput d uint8 4 id=7\nend\n",
    GRAPH + "op\nend\n",
    GRAPH + "op dance\nend\n",
    GRAPH + "op add\nend\n",
    GRAPH + "op copy a\nend\n",
    GRAPH + "op copy a nobody\nend\n",
    GRAPH + "op copy b a\nend\n",
    GRAPH + "op copy b b\nend\n",
    GRAPH + "op sum\nend\n",
    GRAPH + "op matmul a a b\nend\n",
    GRAPH + "op sleep\nend\n",
    GRAPH + "op null\ninput c uint8 4\nend\n",
    GRAPH + "caf\u00e9 1\nend\n",
    GRAPH + "op\x00null\nend\n",
    GRAPH + "x" * 70_000 + "\nend\n",
    GRAPH + "op " + "a " * 40 + "\nend\n",
    GRAPH + "".join(f"input t{i} uint8 1\n" for i in range(1025)) + "end\n",
    GRAPH + "op null\n" * 257 + "end\n",
    "".join([HEAD, *MANY_GRAPHS, "end\n"]),
]


@pytest.mark.parametrize("text", WRONG, ids=map(str, range(len(WRONG))))
def test_what_is_not_of_the_format_is_refused(code_of: CodeOf, text: str) -> None:
    assert code_of(text) == MALFORMED
    assert code_of(GRAPH + "end\n") == 0


def test_another_size_than_declared_is_refused(code_of: CodeOf) -> None:
    data = binary_bytes([adder()])
    assert code_of(data) == 0
    for wrong in (data[:-1], data + b"\n" * 4096, data[: len(data) // 2], data[:1], b"\0" * 5000):
        assert code_of(wrong) == MALFORMED


def test_nothing_at_all_is_an_argument_error(code_of: CodeOf) -> None:
    assert code_of(b"") == 30001
    code_of.handle = 0
    assert code_of(b"x") == 30000


def test_the_binding_says_what_is_wrong(library: QnnLibrary) -> None:
    with pytest.raises(QnnError) as caught:
        parse_binary(library, b"not a binary" * 1000)
    assert caught.value.code == MALFORMED


def mutated(seed: int) -> bytes:
    """A good binary with a few bytes, words or lines of it changed."""
    chance = random.Random(seed)
    quantised = FakeTensor(
        "q", "ufixed8", (2, 3), axis=1, scales=(1.0, 2.0, 3.0), offsets=(1, 2, 3)
    )
    other = FakeGraph("mm", (floats("a", 2, 3), floats("b", 3, 4), quantised), (floats("c", 2, 4),))
    data = bytearray(binary_bytes([adder(), other])[:1200].rstrip(b"\n"))
    lines = bytes(data).split(b"\n")
    for _ in range(chance.randint(1, 3)):
        kind = chance.randrange(4)
        if kind == 0:
            data[chance.randrange(len(data))] = chance.randrange(256)
        elif kind == 1:
            at = chance.randrange(len(data))
            del data[at : at + chance.randrange(1, 30)]
        elif kind == 2:
            at = chance.randrange(len(data))
            data[at:at] = chance.choice(lines) + b"\n"
        else:
            at = chance.randrange(len(data))
            data[at:at] = chance.choice([b"9", b"-", b"%", b"=", b",", b"x", b"\0", b" ", b"99999"])
    return bytes(data)


def test_three_hundred_mutated_texts_crash_nothing(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from tests.native.fake_client import RawFake, Refused
from tests.native.test_fake_binary import CodeOf, mutated
fake = RawFake(Path(sys.argv[1]), "memory_limit=50000000").open()
code_of = CodeOf(fake)
good = 0
for seed in range(300):
    data = mutated(seed)
    code = code_of(data)
    assert code in (0, 30010), (seed, code)
    good += code == 0
    try:
        assert fake.free_context(fake.context(data)) == 0
        assert code == 0, seed
    except Refused as error:
        assert error.code in (30010, 1002), (seed, error)
print("survived with", good, "good ones")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "fake")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("survived")
