# SPDX-License-Identifier: Apache-2.0
"""QnnGraph and QnnRunnable on the real library: what may be bound, and executing it."""

import gc
import threading
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from tests.native.qnn_models import INSTALLED, compiled

from qnnbroker.native.counters import live_counts
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_graph import QnnGraph, check_overlap
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir
from qnnbroker.native.region import Region

pytestmark = [
    pytest.mark.qnn,
    pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed"),
]

SIZE = 128  # bytes of the dense model's input and output


@pytest.fixture(scope="module")
def device() -> Iterator[QnnDevice]:
    with QnnBackend(QnnLibrary(default_qnn_dir())) as backend, QnnDevice(backend) as device:
        yield device


@pytest.fixture
def dense(device: QnnDevice) -> Iterator[QnnGraph]:
    before = live_counts()
    with QnnContext(device, compiled("dense").binary) as context:
        yield context.graph(context.info.graphs[0].name)
    gc.collect()
    assert {**live_counts(), "graphs": 0} == {**before, "graphs": 0}  # pytest still holds ours


@pytest.fixture
def slow(device: QnnDevice) -> Iterator[QnnGraph]:
    with QnnContext(device, compiled("slow").binary) as context:
        yield context.graph(context.info.graphs[0].name)


def test_a_graph_runs_in_place_in_shared_memory(dense: QnnGraph) -> None:
    model = compiled("dense")
    with Region.create(4096) as region:
        with region.view(256, SIZE) as x:
            x[:] = model.inputs["x"].tobytes()
        with dense.bind([(region, 256, SIZE)], [(region, 1024, SIZE)]) as runnable:
            runnable.execute()
            with pytest.raises(BufferError, match="live view"):
                region.close()
        with region.view(1024, SIZE) as y:
            assert bytes(y) == model.outputs["y"].tobytes()


def test_bound_memory_stays_until_the_runnable_is_closed(dense: QnnGraph) -> None:
    x, y = bytearray(SIZE), bytearray(SIZE)
    runnable = dense.bind([(x, 0, SIZE)], [(y, 0, SIZE)])
    for owner in (x, y):
        with pytest.raises(BufferError):
            owner.clear()
    runnable.close()
    runnable.close()
    for owner in (x, y):
        owner.clear()
    assert runnable.closed
    with pytest.raises(ValueError, match="QnnRunnable is closed"):
        runnable.execute()
    with pytest.raises(ValueError, match="QnnRunnable is closed"), runnable:
        pass


READ_ONLY = bytes(SIZE)
MEMORY = bytearray(4 * SIZE)
GOOD = (MEMORY, 0, SIZE)
APART = (MEMORY, SIZE, SIZE)


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([], [APART], r"1 input\(s\) and 1 output\(s\); found 0 and 1"),
        ([GOOD], [APART, APART], "found 1 and 2"),
        ([(MEMORY, 0, SIZE - 4)], [APART], "input 'x' needs 128 bytes, found a span of 124"),
        ([(MEMORY, 0, SIZE + 4)], [APART], "input 'x' needs 128 bytes, found a span of 132"),
        ([GOOD], [(MEMORY, SIZE, 0)], "output 'y' needs 128 bytes, found a span of 0"),
        ([(MEMORY, 4 * SIZE - 4, SIZE)], [APART], "from offset 508; the buffer has 512"),
        ([(MEMORY, 1 << 63, SIZE)], [APART], "from offset 9223372036854775808; the buffer"),
        ([(MEMORY, (1 << 64) - 4, SIZE)], [APART], "the buffer has 512"),
        ([(MEMORY, (1 << 64) + 4, SIZE)], [APART], "the buffer has 512"),
        ([(MEMORY, -SIZE, SIZE)], [APART], "from offset -128; the buffer has 512"),
        ([(MEMORY, 2, SIZE)], [(MEMORY, 2 * SIZE, SIZE)], "an offset that 4 divides, found 2"),
        ([GOOD], [(READ_ONLY, 0, SIZE)], "output 'y' needs a writable contiguous buffer"),
        ([(17, 0, SIZE)], [APART], "input 'x' needs a readable contiguous buffer"),
        ([(memoryview(MEMORY)[::2], 0, SIZE)], [APART], "a readable contiguous buffer"),
        ([GOOD], [GOOD], "tensors 'x' and 'y' overlap"),
        ([GOOD], [(MEMORY, SIZE - 4, SIZE)], "tensors 'x' and 'y' overlap"),
        ([APART], [(MEMORY, 4, SIZE)], "tensors 'y' and 'x' overlap"),
        ([(memoryview(MEMORY)[4:], 0, SIZE)], [GOOD], "tensors 'y' and 'x' overlap"),
    ],
)
def test_a_bad_span_is_refused_and_leaves_nothing_exported(
    dense: QnnGraph,
    inputs: list[tuple[bytearray, int, int]],
    outputs: list[tuple[bytearray, int, int]],
    message: str,
) -> None:
    before = live_counts()
    with pytest.raises(ValueError, match=message):
        dense.bind(inputs, outputs)
    assert live_counts() == before


def test_a_refused_bind_exports_nothing(dense: QnnGraph) -> None:
    x, y = bytearray(SIZE), bytearray(SIZE - 4)
    with pytest.raises(ValueError, match="the buffer has 124"):
        dense.bind([(x, 0, SIZE)], [(y, 0, SIZE)])
    x.clear()
    y.clear()


def test_a_read_only_input_is_fine(dense: QnnGraph) -> None:
    model = compiled("dense")
    y = bytearray(SIZE)
    with dense.bind([(model.inputs["x"].tobytes(), 0, SIZE)], [(y, 0, SIZE)]) as runnable:
        runnable.execute()
    assert bytes(y) == model.outputs["y"].tobytes()


@pytest.mark.parametrize(
    ("spans", "pair"),
    [
        ([(0, 8, False, "a"), (0, 8, False, "b"), (8, 8, True, "c")], None),
        ([(0, 8, False, "a"), (4, 8, False, "b"), (11, 8, True, "c")], "'b' and 'c'"),
        ([(0, 64, False, "a"), (8, 8, False, "b"), (32, 8, True, "c")], "'a' and 'c'"),
        ([(0, 64, True, "a"), (8, 8, False, "b")], "'a' and 'b'"),
        ([(0, 8, True, "a"), (8, 8, True, "b"), (16, 8, False, "c"), (12, 6, False, "d")], "'b'"),
        ([(0, 8, True, "a"), (7, 8, True, "b")], "'a' and 'b'"),
        ([(16, 8, True, "c"), (0, 8, True, "a"), (8, 8, False, "b")], None),
    ],
)
def test_only_an_output_may_not_overlap(
    spans: list[tuple[int, int, bool, str]], pair: str | None
) -> None:
    if pair is None:
        check_overlap(spans)
    else:
        with pytest.raises(ValueError, match=pair):
            check_overlap(spans)


def test_executing_lets_other_threads_run(slow: QnnGraph) -> None:
    size = slow.inputs[0].size_bytes
    x, y = bytearray(size), bytearray(size)
    started, stop, ticks = threading.Event(), threading.Event(), list[float]()

    def tick() -> None:
        started.set()
        while not stop.is_set():
            ticks.append(time.monotonic())
            time.sleep(0)

    thread = threading.Thread(target=tick)
    with slow.bind([(x, 0, size)], [(y, 0, size)]) as runnable:
        thread.start()
        started.wait()
        begin = time.monotonic()
        runnable.execute()
        end = time.monotonic()
        stop.set()
        thread.join()
    # With the GIL held the other thread could run at the edges of the interval only.
    fifth = (end - begin) / 5
    assert any(begin + 2 * fifth < t < end - 2 * fifth for t in ticks)


def test_nothing_closes_under_an_execute(slow: QnnGraph) -> None:
    size = slow.inputs[0].size_bytes
    x, y = bytearray(size), bytearray(size)
    runnable = slow.bind([(x, 0, size)], [(y, 0, size)])
    refused: list[BaseException] = []
    done = threading.Event()

    def execute() -> None:
        runnable.execute()
        done.set()

    thread = threading.Thread(target=execute)
    thread.start()
    while not done.is_set() and not refused:
        try:
            runnable.close()
        except BufferError as error:
            refused.append(error)
        else:
            runnable = slow.bind([(x, 0, size)], [(y, 0, size)])
    with pytest.raises(BufferError):
        slow.context.close()
    thread.join()
    assert refused
    assert "it is executing" in str(refused[0])
    runnable.close()


def test_several_runnables_of_one_graph_run_at_once(dense: QnnGraph) -> None:
    model = compiled("dense")
    wrong: list[bytes] = []

    def work(seed: int) -> None:
        x, y = bytearray(model.inputs["x"].tobytes()), bytearray(SIZE)
        with dense.bind([(x, 0, SIZE)], [(y, 0, SIZE)]) as runnable:
            for _ in range(20):
                y[:] = bytes([seed]) * SIZE
                runnable.execute()
                if bytes(y) != model.outputs["y"].tobytes():
                    wrong.append(bytes(y))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_priority_can_be_set_and_is_checked(dense: QnnGraph) -> None:
    assert dense.priority == 100
    for priority in (0, 500, 200):
        dense.set_priority(priority)
        assert dense.priority == priority
    for bad in (-1, 501, 1 << 40):
        with pytest.raises(ValueError, match="priority must be from 0 to 500"):
            dense.set_priority(bad)
    assert dense.priority == 200
    assert dense.statistics()["priority"] == 200


def test_statistics_start_at_zero(dense: QnnGraph) -> None:
    statistics = dense.statistics()
    assert statistics.pop("priority") == 100
    assert set(statistics.values()) == {0}


def test_a_forgotten_runnable_lets_go_and_warns(dense: QnnGraph) -> None:
    x, y = bytearray(SIZE), bytearray(SIZE)
    runnable = dense.bind([(x, 0, SIZE)], [(y, 0, SIZE)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del runnable
        gc.collect()
    assert ["never closed: <QnnRunnable" in str(w.message) for w in caught] == [True]
    x.clear()
    y.clear()


def test_a_graph_is_made_by_its_context_only(dense: QnnGraph) -> None:
    with pytest.raises(TypeError, match="made by QnnContext.graph"):
        QnnGraph()
    with pytest.raises(TypeError, match="cannot be pickled"):
        dense.__reduce__()
    assert np.prod(dense.inputs[0].shape) * 4 == SIZE
    assert dense.name in repr(dense)
