# SPDX-License-Identifier: Apache-2.0
"""QnnContext on the real library: loading, refusing, and ending in order."""

import gc
import mmap
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.native.qnn_models import INSTALLED, CompiledModel, compiled

from qnnbroker.native import qnn_library
from qnnbroker.native.counters import live_counts
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_error import QnnError
from qnnbroker.native.qnn_graph import QnnGraph, QnnRunnable
from qnnbroker.native.qnn_info import parse_binary
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir

pytestmark = [
    pytest.mark.qnn,
    pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed"),
]


@pytest.fixture
def device() -> Iterator[QnnDevice]:
    library = QnnLibrary(default_qnn_dir())
    before = live_counts()
    with QnnBackend(library) as backend, QnnDevice(backend) as device:
        yield device
        gc.collect()
    assert live_counts() == before


def bind(graph: QnnGraph, model: CompiledModel) -> tuple[QnnRunnable, bytearray]:
    """The graph on memory of its own, filled with the model's input; and its only output."""
    x = bytearray(model.inputs["x"].tobytes())
    y = bytearray(graph.outputs[0].size_bytes)
    return graph.bind([(x, 0, len(x))], [(y, 0, len(y))]), y


@pytest.mark.parametrize("name", ["dense", "conv_u8", "conv_u16", "slow"])
def test_outputs_are_those_of_onnx_runtime_to_the_byte(device: QnnDevice, name: str) -> None:
    model = compiled(name)
    with QnnContext(device, model.binary) as context:
        graph = context.graph(context.info.graphs[0].name)
        runnable, y = bind(graph, model)
        with runnable:
            runnable.execute()
            assert bytes(y) == model.outputs["y"].tobytes()
            y[:] = bytes(len(y))
            runnable.execute()
            assert bytes(y) == model.outputs["y"].tobytes()


def test_the_binary_is_not_needed_after_loading(device: QnnDevice, tmp_path: Path) -> None:
    model = compiled("dense")
    file = tmp_path / "binary"
    file.write_bytes(model.binary)
    heap = bytearray(b"x" + model.binary)  # an odd address is fine
    with file.open("rb") as handle:
        mapping = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
    with (
        QnnContext(device, memoryview(heap)[1:]) as one,
        QnnContext(device, mapping) as other,
    ):
        heap[:] = bytes(len(heap))
        heap.clear()  # these two raise BufferError while anything exports them
        mapping.close()
        file.unlink()
        assert not one.keeps_binary
        for context in (one, other):
            runnable, y = bind(context.graph(context.info.graphs[0].name), model)
            with runnable:
                runnable.execute()
            assert bytes(y) == model.outputs["y"].tobytes()


def test_a_description_that_is_known_is_not_parsed_again(device: QnnDevice) -> None:
    model = compiled("dense")
    info = parse_binary(device.backend.library, model.binary)
    with QnnContext(device, model.binary, info=info) as context:
        assert context.info is info
        assert (context.device, context.priority) == (device, 100)


def test_a_context_with_a_live_runnable_refuses_to_close(device: QnnDevice) -> None:
    model = compiled("dense")
    context = QnnContext(device, model.binary)
    graph = context.graph(context.info.graphs[0].name)
    runnable, _ = bind(graph, model)
    with pytest.raises(BufferError, match="1 open object"):
        context.close()
    with pytest.raises(BufferError, match="1 open object"):
        device.close()
    runnable.close()
    context.close()
    context.close()
    with pytest.raises(ValueError, match="QnnContext is closed"):
        context.graph(graph.name)
    with pytest.raises(ValueError, match="QnnContext is closed"):
        bind(graph, model)
    with pytest.raises(ValueError, match="QnnContext is closed"):
        graph.set_priority(100)


def test_a_forgotten_context_is_freed_with_a_warning(device: QnnDevice) -> None:
    context = QnnContext(device, compiled("dense").binary)
    graph = context.graph(context.info.graphs[0].name)
    del context
    gc.collect()
    assert live_counts()["contexts"] == 1, "the graph keeps it"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del graph
        gc.collect()
    assert ["never closed: <QnnContext" in str(w.message) for w in caught] == [True]
    assert live_counts()["contexts"] == 0


def test_what_was_bound_and_forgotten_is_freed_in_order(device: QnnDevice) -> None:
    model = compiled("dense")
    context = QnnContext(device, model.binary)
    runnable, y = bind(context.graph(context.info.graphs[0].name), model)
    del context
    runnable.execute()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del runnable
        (first,) = [str(w.message) for w in caught]
        assert live_counts()["runnables"] == 0
        caught.clear()  # a warning holds the object that it is about, and so the context
        (second,) = [str(w.message) for w in caught]
    assert "never closed: <QnnRunnable" in first
    assert "never closed: <QnnContext" in second
    counts = live_counts()
    assert (counts["contexts"], counts["graphs"], counts["runnables"]) == (0, 0, 0)
    y.clear()


def test_a_graph_is_one_object_as_long_as_it_is_held(device: QnnDevice) -> None:
    with QnnContext(device, compiled("split").binary, priority=150) as context:
        first, second = (context.graph(g.name) for g in context.info.graphs)
        assert first is not second
        assert context.graph(first.name) is first
        assert live_counts()["graphs"] == 2
        assert first.priority == 150
        first.set_priority(200)
        name = first.name
        del first
        assert live_counts()["graphs"] == 1
        assert context.graph(name).priority == 200, "what was set outlives the object"
        assert second.priority == 150
        with pytest.raises(ValueError, match="no graph 'nobody'"):
            context.graph("nobody")


def test_graphs_that_are_not_enabled_are_refused(device: QnnDevice) -> None:
    data = compiled("split").binary
    first, second = parse_binary(device.backend.library, data).graphs
    with QnnContext(device, data, enable_graphs=[second.name]) as context:
        graph = context.graph(second.name)
        size = graph.inputs[0].size_bytes
        x, y = bytearray(size), bytearray(size)
        with graph.bind([(x, 0, size)], [(y, 0, size)]) as runnable:
            runnable.execute()
        with pytest.raises(ValueError, match="not among the enabled ones"):
            context.graph(first.name)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "enable_graphs is empty"),
        (["nobody"], "no graph 'nobody'"),
        ("a name", "must be a sequence of names"),
        (None, ""),
    ],
)
def test_enabling_graphs_that_do_not_exist_is_refused(
    device: QnnDevice, names: list[str] | None, message: str
) -> None:
    data = compiled("split").binary
    if names is None:
        name = parse_binary(device.backend.library, data).graphs[0].name
        names, message = [name, name], "repeats a name"
    with pytest.raises(ValueError, match=message):
        QnnContext(device, data, enable_graphs=names)


@pytest.mark.parametrize("priority", [-1, 501])
def test_a_priority_out_of_range_is_refused(device: QnnDevice, priority: int) -> None:
    with pytest.raises(ValueError, match="priority must be from 0 to 500"):
        QnnContext(device, compiled("dense").binary, priority=priority)


def test_a_binary_that_does_not_load_is_reported_with_what_was_logged(device: QnnDevice) -> None:
    model = compiled("dense")
    info = parse_binary(device.backend.library, model.binary)
    qnn_library.drain_log()
    with pytest.raises(QnnError) as caught:
        QnnContext(device, bytes(len(model.binary)), info=info)
    assert caught.value.operation == "contextCreateFromBinary"
    errors = [text for level, text in qnn_library.drain_log() if level == 1]
    assert caught.value.message == errors[-1]
    assert errors[-1] in str(caught.value)
    with pytest.raises(ValueError, match="states .* bytes of content but has"):
        QnnContext(device, model.binary[:100], info=info)


def test_shared_weights_are_refused_where_they_would_crash(device: QnnDevice) -> None:
    data = compiled("dense").binary
    info = parse_binary(device.backend.library, data)
    shared = info._replace(graphs=(info.graphs[0]._replace(shared_weight_bytes=4096),))
    with pytest.raises(OSError, match="shares 4096 bytes of weights"):
        QnnContext(device, data, info=shared)


def test_a_closed_device_makes_no_context() -> None:
    with QnnBackend(QnnLibrary(default_qnn_dir())) as backend:
        device = QnnDevice(backend)
        device.close()
        with pytest.raises(ValueError, match="QnnDevice is closed"):
            QnnContext(device, compiled("dense").binary)


def test_interpreter_exit_with_everything_open_is_silent() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.native.qnn_models import compiled
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir
model = compiled("dense")
context = QnnContext(QnnDevice(QnnBackend(QnnLibrary(default_qnn_dir()))), model.binary)
graph = context.graph(context.info.graphs[0].name)
x, y = bytearray(model.inputs["x"].tobytes()), bytearray(128)
runnable = graph.bind([(x, 0, 128)], [(y, 0, 128)])
runnable.execute()
assert bytes(y) == model.outputs["y"].tobytes()
"""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-X", "dev", "-c", code, root]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr  # what the library says on loading
