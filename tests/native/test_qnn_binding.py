# SPDX-License-Identifier: Apache-2.0
"""The binding on the fake library, which records each call and fails on request."""

import gc
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qnnbroker.native.counters import live_counts
from qnnbroker.native.fake import (
    FakeCall,
    FakeGraph,
    FakeTensor,
    binary_bytes,
    control_loaded,
    fake_qnn_dir,
    read_ring,
)
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_error import DSP_RESTARTED, NOT_SUPPORTED, OUT_OF_MEMORY, QnnError
from qnnbroker.native.qnn_info import QuantInfo, parse_binary
from qnnbroker.native.qnn_library import QnnLibrary


@dataclass
class Fake:
    """A copy of the fake library of the test's own, so that its state is fresh."""

    library: QnnLibrary

    def control(self, *words: str) -> None:
        control_loaded(*words, directory=self.library.directory)

    def calls(self) -> list[FakeCall]:
        return read_ring(self.library.directory)

    def names(self) -> list[str]:
        return [c.name for c in self.calls()]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    library = QnnLibrary(shutil.copytree(fake_qnn_dir(), tmp_path / "fake_qnn"))
    before = live_counts()
    yield Fake(library)
    gc.collect()
    assert live_counts() == before


def floats(name: str, count: int = 4) -> FakeTensor:
    return FakeTensor(name, "float32", (count,))


COPY = FakeGraph("copy", (floats("x"),), (floats("y"),), ops=("copy",))


def test_objects_are_made_and_freed_in_the_right_order(fake: Fake) -> None:
    with (
        QnnBackend(fake.library) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, binary_bytes([COPY])) as context,
    ):
        x, y = bytearray(range(16)), bytearray(16)
        with context.graph("copy").bind([(x, 0, 16)], [(y, 0, 16)]) as runnable:
            runnable.execute()
        assert y == x
    names = fake.names()
    assert names[:2] == ["logCreate", "backendCreate"]
    assert names[-4:] == ["contextFree", "deviceFree", "backendFree", "logFree"]
    made = {c.name: c.arguments for c in fake.calls()}
    assert made["backendCreate"]["logger"] == made["logCreate"]["logger"]
    assert made["deviceCreate"]["logger"] == made["logCreate"]["logger"]
    assert all(c.result == 0 for c in fake.calls())


def test_what_is_forgotten_is_freed_in_the_right_order_too(fake: Fake) -> None:
    device = QnnDevice(QnnBackend(fake.library))
    graph = QnnContext(device, binary_bytes([COPY])).graph("copy")
    x, y = bytearray(16), bytearray(16)
    everything: list[Any] = [graph.bind([(x, 0, 16)], [(y, 0, 16)])]
    everything.append(everything)  # a cycle, so that the collector picks the order
    del device, graph, everything
    with pytest.warns(ResourceWarning):
        gc.collect()
    gc.collect()
    assert fake.names()[-4:] == ["contextFree", "deviceFree", "backendFree", "logFree"]


def test_priority_and_enabled_graphs_reach_the_library(fake: Fake) -> None:
    other = FakeGraph("a name with spaces, é", (floats("x"),), (floats("y"),), ops=("copy",))
    data = binary_bytes([COPY, other])
    with QnnBackend(fake.library) as backend, QnnDevice(backend) as device:
        with QnnContext(device, data, priority=30, enable_graphs=[other.name]) as context:
            graph = context.graph(other.name)
            graph.set_priority(250)
        with QnnContext(device, data):
            pass
        # A list longer than there are graphs is all that QNN refuses, so that shows it arrives.
        info = parse_binary(fake.library, data)
        more = info._replace(graphs=(*info.graphs, info.graphs[0]._replace(name="third")))
        with pytest.raises(QnnError, match="code 5005"):
            QnnContext(device, data, info=more, enable_graphs=[g.name for g in more.graphs])
    priorities = [
        c.arguments["priority"] for c in fake.calls() if c.name == "contextCreateFromBinary"
    ]
    assert priorities == ["30", "100", "100"]
    (retrieved,) = (c for c in fake.calls() if c.name == "graphRetrieve")
    assert retrieved.arguments["name"] == other.name
    (changed,) = (c for c in fake.calls() if c.name == "graphSetConfig")
    assert changed.arguments["priority"] == "250"


def test_a_graph_executes_at_the_given_addresses(fake: Fake) -> None:
    tensors = (floats("a"), floats("b"))
    add = FakeGraph("add", tensors, (floats("c"),), ops=("add",))
    memory = bytearray(64)
    memory[0:4] = memory[16:20] = b"\x00\x00\x80\x3f"  # 1.0
    with (
        QnnBackend(fake.library) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, binary_bytes([add])) as context,
    ):
        graph = context.graph("add")
        spans = [(memory, 0, 16), (memory, 16, 16)], [(memory, 32, 16)]
        with graph.bind(*spans) as runnable:
            runnable.execute()
        assert memory[32:36] == b"\x00\x00\x00\x40"  # 2.0
        ids = [t.tensor_id for t in (*graph.inputs, *graph.outputs)]
    (call,) = (c for c in fake.calls() if c.name == "graphExecute")
    places = [call.arguments[f"t{i}"].split(":") for i in ids]
    addresses = [int(address, 16) for _, address, _ in places]
    assert [a - addresses[0] for a in addresses] == [0, 16, 32]
    assert {(kind, size) for kind, _, size in places} == {("raw", "16")}


def test_every_quantisation_is_described_and_bound(fake: Fake) -> None:
    scales, offsets = (0.5, 0.25, 0.125, 1.0), (-1, -2, -3, 4)
    inputs = (
        FakeTensor("tensor", "ufixed8", (2, 4), scale=0.5, offset=-128),
        FakeTensor("axis", "sfixed16", (2, 4), axis=1, scales=scales, offsets=offsets),
        FakeTensor("bits", "sfixed4", (3, 5), scale=0.25, offset=0, bits=4),
        FakeTensor("bits axis", "ufixed8", (4,), axis=0, scales=scales, offsets=offsets, bits=6),
    )
    data = binary_bytes([FakeGraph("g", inputs, (floats("y"),))])
    (graph_info,) = parse_binary(fake.library, data).graphs
    assert [t.quantization for t in graph_info.inputs] == [
        QuantInfo(0, (0.5,), (-128,), None),
        QuantInfo(1, scales, offsets, 1),
        QuantInfo(2, (0.25,), (0,), None, 4),
        QuantInfo(3, scales, offsets, 0, 6),
    ]
    assert graph_info.outputs[0].quantization is None
    sizes = [t.size_bytes for t in graph_info.inputs]
    assert sizes == [8, 16, 8, 4]  # two elements of 4 bits share a byte
    with (
        QnnBackend(fake.library) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, data) as context,
    ):
        spans = [(bytes(n), 0, n) for n in sizes]
        with context.graph("g").bind(spans, [(bytearray(16), 0, 16)]) as runnable:
            runnable.execute()
    assert [c.result for c in fake.calls() if c.name == "graphExecute"] == [0]


def everything(fake: Fake) -> None:
    with (
        QnnBackend(fake.library) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, binary_bytes([COPY])) as context,
    ):
        graph = context.graph("copy")
        graph.set_priority(200)
        with graph.bind([(bytes(16), 0, 16)], [(bytearray(16), 0, 16)]) as runnable:
            runnable.execute()


@pytest.mark.parametrize(
    "operation",
    [
        "logCreate",
        "backendCreate",
        "deviceCreate",
        "contextCreateFromBinary",
        "graphRetrieve",
        "graphSetConfig",
        "graphExecute",
    ],
)
def test_a_failing_call_is_reported_and_leaves_nothing_behind(fake: Fake, operation: str) -> None:
    before = live_counts()
    fake.control(f"fail={operation}:1:{OUT_OF_MEMORY}")
    with pytest.raises(QnnError) as caught:
        everything(fake)
    assert (caught.value.code, caught.value.operation) == (OUT_OF_MEMORY, operation)
    names = fake.names()
    for made, freed in (
        ("logCreate", "logFree"),
        ("backendCreate", "backendFree"),
        ("deviceCreate", "deviceFree"),
        ("contextCreateFromBinary", "contextFree"),
    ):
        successes = [c for c in fake.calls() if c.name == made and c.result == 0]
        assert len(successes) == names.count(freed), freed
    fake.control("clear")
    del caught  # its traceback holds what was made
    gc.collect()
    assert live_counts() == before
    everything(fake)


FREES: list[tuple[str, Callable[[Any, Any, Any], Any]]] = [
    ("contextFree", lambda backend, device, context: context),
    ("deviceFree", lambda backend, device, context: device),
    ("backendFree", lambda backend, device, context: backend),
]


@pytest.mark.parametrize(("operation", "which"), FREES)
def test_a_failing_free_is_reported_once_and_counts_as_closed(
    fake: Fake, operation: str, which: Callable[[Any, Any, Any], Any]
) -> None:
    backend = QnnBackend(fake.library)
    device = QnnDevice(backend)
    context = QnnContext(device, binary_bytes([COPY]))
    handle = which(backend, device, context)
    fake.control(f"fail={operation}:1:1100")
    for each in (context, device, backend):
        if each is handle:
            with pytest.raises(QnnError, match=f"{operation} failed with QNN code 1100"):
                each.close()
            assert each.closed
        each.close()


def test_an_error_inside_is_not_hidden_by_what_it_broke(fake: Fake) -> None:
    fake.control(f"fail=graphExecute:1:{DSP_RESTARTED}")
    with pytest.raises(QnnError) as caught:
        everything(fake)  # frees fail as well now: the restart took all handles
    assert (caught.value.code, caught.value.operation) == (DSP_RESTARTED, "graphExecute")
    assert any(c.name == "contextFree" for c in fake.calls())


def test_an_error_inside_is_not_hidden_by_what_it_holds(fake: Fake) -> None:
    made: list[QnnDevice] = []

    def fail() -> None:
        with QnnBackend(fake.library) as backend:
            made.append(QnnDevice(backend))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (device,) = made
    assert not device.backend.closed
    device.close()
    assert device.backend.closed
    assert fake.names()[-3:] == ["deviceFree", "backendFree", "logFree"]


def test_a_backend_without_priorities_says_so(fake: Fake) -> None:
    fake.control(f"fail=graphSetConfig:1:{NOT_SUPPORTED}")
    with (
        QnnBackend(fake.library) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, binary_bytes([COPY])) as context,
    ):
        graph = context.graph("copy")
        with pytest.raises(QnnError, match="not supported"):
            graph.set_priority(200)
        assert graph.priority == 100
