# SPDX-License-Identifier: Apache-2.0
"""Registered memory through the binding: on the fake as on a device; the real library refuses."""

import gc
import os
from collections.abc import Iterator

import pytest
from tests.fake_models import TENSOR_BYTES, adder, numbers
from tests.native.qnn_models import INSTALLED, compiled

from qnnbroker.native.counters import live_counts
from qnnbroker.native.fake import (
    FakeGraph,
    FakeTensor,
    binary_bytes,
    control_loaded,
    fake_qnn_dir,
    read_ring,
)
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_error import NOT_SUPPORTED, QnnError
from qnnbroker.native.qnn_graph import QnnGraph
from qnnbroker.native.qnn_library import QnnLibrary, default_qnn_dir
from qnnbroker.native.qnn_memory import CUSTOM, ION, QnnRegistration, executes, tensor_bytes
from qnnbroker.native.region import Region

FLOAT32, INT32 = 0x0232, 0x0032
SHAPE = (4, 8)
PLACES = (0, 1024, 2048)


@pytest.fixture(scope="module")
def device() -> Iterator[QnnDevice]:
    with QnnBackend(QnnLibrary(fake_qnn_dir())) as backend, QnnDevice(backend) as device:
        yield device


@pytest.fixture
def context(device: QnnDevice) -> Iterator[QnnContext]:
    control_loaded("clear", mem_register=True)
    before = live_counts()
    with QnnContext(device, binary_bytes([adder()])) as context:
        yield context
    gc.collect()
    control_loaded("clear", mem_register=False, mem_ion=True, mem_custom=True)
    assert {**live_counts(), "graphs": 0} == {**before, "graphs": 0}


@pytest.fixture
def region() -> Iterator[Region]:
    with Region.create(4096) as region:
        yield region


def register(
    context: QnnContext, region: Region, offset: int = 0, *, kind: str = CUSTOM
) -> QnnRegistration:
    return QnnRegistration(
        context, region.fileno(), region.size_bytes, offset, FLOAT32, SHAPE, kind=kind
    )


def last_call() -> int:
    """The number of the last call that the library has seen."""
    return read_ring()[-1].sequence


def errors_since(number: int) -> list[str]:
    calls = [c for c in read_ring() if c.sequence > number]
    return [c.arguments["what"] for c in calls if c.name == "error"]


def fill(region: Region, seed: int = 1) -> bytes:
    """Writes a and b, gives the y that must come out."""
    a, b = numbers(seed)
    for place, array in zip(PLACES, (a, b), strict=False):
        with region.view(place, TENSOR_BYTES) as view:
            view[:] = array.tobytes()
    return bytes((a + b).tobytes())


def result(region: Region) -> bytes:
    with region.view(PLACES[2], TENSOR_BYTES) as view:
        return bytes(view)


def spans(region: Region) -> tuple[list[tuple[Region, int, int]], list[tuple[Region, int, int]]]:
    a, b, y = ((region, place, TENSOR_BYTES) for place in PLACES)
    return [a, b], [y]


def test_an_execute_reads_and_writes_through_the_handles(
    context: QnnContext, region: Region
) -> None:
    wanted = fill(region)
    graph = context.graph("add")
    known = [register(context, region, place) for place in PLACES]
    counted = executes()
    with graph.bind(*spans(region), known) as runnable:
        runnable.execute()
        assert executes() == (counted[0] + 1, counted[1])
        assert runnable.registrations == tuple(known)
        for registration in known:
            with pytest.raises(BufferError, match="open object"):
                registration.close()
    assert result(region) == wanted
    last = [c for c in read_ring() if c.name == "graphExecute"][-1]
    assert all(last.arguments[f"t{i}"].startswith("handle:") for i in (1, 2, 3))
    for registration in known:
        registration.close()
        registration.close()


def test_registered_and_other_tensors_mix_and_count_as_not_registered(
    context: QnnContext, region: Region
) -> None:
    wanted = fill(region)
    graph = context.graph("add")
    counted = executes()
    with (
        register(context, region, PLACES[2]) as known,
        graph.bind(*spans(region), [None, None, known]) as runnable,
    ):
        runnable.execute()
    assert result(region) == wanted
    assert executes() == (counted[0], counted[1] + 1)


def test_a_wrong_fd_gives_wrong_data_and_not_a_pass(context: QnnContext, region: Region) -> None:
    """That the fake looks through the handle: here it finds another buffer there."""
    wanted = fill(region)
    with (
        Region.create(4096) as other,
        QnnRegistration(context, other.fileno(), 4096, PLACES[2], FLOAT32, SHAPE) as wrong,
        context.graph("add").bind(*spans(region), [None, None, wrong]) as runnable,
    ):
        runnable.execute()
        assert result(region) == bytes(TENSOR_BYTES)
        assert result(other) == wanted


def test_an_fd_of_one_tensor(context: QnnContext) -> None:
    with Region.create(4096) as a, Region.create(4096) as b, Region.create(4096) as y:
        for region, array in zip((a, b), numbers(2), strict=True):
            with region.view(0, TENSOR_BYTES) as view:
                view[:] = array.tobytes()
        known = [register(context, r, kind=ION) for r in (a, b, y)]
        inputs = [(a, 0, TENSOR_BYTES), (b, 0, TENSOR_BYTES)]
        with context.graph("add").bind(inputs, [(y, 0, TENSOR_BYTES)], known) as runnable:
            runnable.execute()
        with y.view(0, TENSOR_BYTES) as view:
            assert bytes(view) == sum(numbers(2)).tobytes()  # type: ignore[union-attr]
        for registration in known:
            registration.close()


def test_one_buffer_is_registered_with_several_contexts(
    device: QnnDevice, context: QnnContext, region: Region
) -> None:
    wanted = fill(region)
    with QnnContext(device, binary_bytes([adder()])) as second:
        for each in (context, second):
            known = [register(each, region, place) for place in PLACES]
            with each.graph("add").bind(*spans(region), known) as runnable:
                runnable.execute()
            assert result(region) == wanted
            for registration in known:
                registration.close()


def test_a_registration_of_another_context_type_shape_or_place_is_refused(
    device: QnnDevice, context: QnnContext, region: Region
) -> None:
    graph: QnnGraph = context.graph("add")
    fd, size = region.fileno(), region.size_bytes
    with QnnContext(device, binary_bytes([adder()])) as second:
        wrong = [
            QnnRegistration(second, fd, size, 0, FLOAT32, SHAPE),
            QnnRegistration(context, fd, size, 0, INT32, SHAPE),
            QnnRegistration(context, fd, size, 0, FLOAT32, (8, 4)),
            QnnRegistration(context, fd, size, 128, FLOAT32, SHAPE),
        ]
        closed = register(context, region)
        closed.close()
        for registration in (*wrong, closed):
            with pytest.raises(ValueError, match="registration|closed"):
                graph.bind(*spans(region), [registration, None, None])
        with pytest.raises(TypeError):
            graph.bind(*spans(region), ["7", None, None])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="is no registration"):
            graph.bind(*spans(region), [device, None, None])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="3 registrations wanted, found 1"):
            graph.bind(*spans(region), [wrong[1]])
        for registration in wrong:
            registration.close()


def test_a_context_is_not_closed_below_its_registrations(device: QnnDevice, region: Region) -> None:
    control_loaded(mem_register=True)
    context = QnnContext(device, binary_bytes([adder()]))
    known = register(context, region)
    with pytest.raises(BufferError, match="1 open object"):
        context.close()
    known.close()
    context.close()
    control_loaded(mem_register=False)


def test_the_memory_may_go_before_the_registration(context: QnnContext) -> None:
    region = Region.create(4096)
    known = register(context, region)
    region.close()  # the library has its own mapping
    known.close()


@pytest.mark.parametrize(
    ("offset", "total", "dtype", "shape", "words"),
    [
        (4096, 4096, FLOAT32, (1,), "leave a buffer"),
        (4000, 4096, FLOAT32, (32,), "leave a buffer"),
        (0, 4096, FLOAT32, (1025,), "leave a buffer"),
        ((1 << 63) - 1, 4096, FLOAT32, (1,), "leave a buffer"),
        (1 << 64, 4096, FLOAT32, (1,), "makes no sense"),
        (-4, 4096, FLOAT32, (1,), "makes no sense"),
        (0, 4096, FLOAT32, (65536, 65536, 65536, 65536), "less than 4 GiB"),
        (0, 4096, FLOAT32, (0,), "empty dimensions"),
        (0, 4096, 0x9999, (1,), "unknown width"),
    ],
)
def test_spans_that_make_no_sense_never_reach_the_library(
    context: QnnContext,
    region: Region,
    offset: int,
    total: int,
    dtype: int,
    shape: tuple[int, ...],
    words: str,
) -> None:
    before = last_call()
    with pytest.raises(ValueError, match=words):
        QnnRegistration(context, region.fileno(), total, offset, dtype, shape)
    assert last_call() == before


def test_an_offset_with_ion_and_an_unknown_kind_are_refused(
    context: QnnContext, region: Region
) -> None:
    with pytest.raises(ValueError, match="starts at offset 0"):
        register(context, region, 64, kind=ION)
    with pytest.raises(ValueError, match="'heap'"):
        register(context, region, kind="heap")


def test_an_fd_that_is_not_open_is_refused(context: QnnContext) -> None:
    with pytest.raises(OSError, match="not open"):
        QnnRegistration(context, 1 << 20, 4096, 0, FLOAT32, SHAPE)


def test_a_tensor_without_dimensions_is_registered_as_one_element(
    context: QnnContext, region: Region
) -> None:
    with QnnRegistration(context, region.fileno(), 4096, 8, FLOAT32, ()) as known:
        assert (known.shape, known.size_bytes) == ((1,), 4)
    assert tensor_bytes(0x0304, (3,)) == 2  # of 4 bits each


@pytest.mark.parametrize(("kind", "switch"), [(CUSTOM, "mem_custom"), (ION, "mem_ion")])
def test_a_kind_that_the_library_refuses(
    context: QnnContext, region: Region, kind: str, switch: str
) -> None:
    control_loaded(f"{switch}=off")
    with pytest.raises(QnnError) as refused:
        register(context, region, kind=kind)
    assert refused.value.code == 8005
    other = ION if kind == CUSTOM else CUSTOM
    register(context, region, kind=other).close()


def test_after_a_restart_closing_says_so_and_closes(device: QnnDevice, region: Region) -> None:
    # What a restart makes of the call; a real one would void the module's device.
    before = last_call()
    with QnnBackend(device.backend.library) as backend, QnnDevice(backend) as own:
        control_loaded(mem_register=True)
        context = QnnContext(own, binary_bytes([adder()]))
        known = register(context, region)
        control_loaded("fail=memDeRegister:1:8001")
        with pytest.raises(QnnError, match="invalid handle"):
            known.close()
        assert known.closed
        context.close()
    control_loaded("clear", mem_register=False)
    assert errors_since(before) == ["registration_leak"]  # the rule above kept the call from it


def test_without_support_registering_says_not_supported(device: QnnDevice, region: Region) -> None:
    control_loaded(mem_register=False)
    with QnnContext(device, binary_bytes([adder()])) as context:
        for kind in (CUSTOM, ION):
            with pytest.raises(QnnError) as refused:
                register(context, region, kind=kind)
            assert refused.value.code == NOT_SUPPORTED


def test_many_registrations_leave_nothing(context: QnnContext, region: Region) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    known = [register(context, region, 128 * (i % 16)) for i in range(500)]
    assert live_counts()["registrations"] == 500
    for registration in known:
        registration.close()
    assert live_counts()["registrations"] == 0
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_graph_over_its_own_output_is_refused_with_handles_too(
    device: QnnDevice, context: QnnContext, region: Region
) -> None:
    known = [register(context, region, place) for place in (0, 1024, 0)]
    a, b = ((region, place, TENSOR_BYTES) for place in (0, 1024))
    with pytest.raises(ValueError, match="overlap"):
        context.graph("add").bind([a, b], [a], known)
    for registration in known:
        registration.close()


def test_quantised_tensors_are_registered_by_their_own_type(device: QnnDevice) -> None:
    control_loaded(mem_register=True)
    q, r = (FakeTensor(n, "ufixed8", (6,), scale=0.5, offset=-10) for n in "qr")
    graph = FakeGraph("double", (q,), (r,), (("add", "q", "q", "r"),))
    with QnnContext(device, binary_bytes([graph])) as context, Region.create(4096) as region:
        with region.view(0, 6) as view:
            view[:] = bytes([10, 12, 20, 30, 40, 50])
        known = [
            QnnRegistration(context, region.fileno(), 4096, at, 0x0408, (6,)) for at in (0, 64)
        ]
        double = context.graph("double")
        with double.bind([(region, 0, 6)], [(region, 64, 6)], known) as runnable:
            runnable.execute()
        out = list(region.view(64, 6))
        for registration in known:
            registration.close()
    control_loaded(mem_register=False)
    assert out == [10, 14, 30, 50, 70, 90]


@pytest.mark.qnn
@pytest.mark.skipif(not INSTALLED, reason="onnxruntime-qnn is not installed")
def test_the_real_library_without_a_device_refuses_every_kind(region: Region) -> None:
    with (
        QnnBackend(QnnLibrary(default_qnn_dir())) as backend,
        QnnDevice(backend) as device,
        QnnContext(device, compiled("dense").binary) as context,
    ):
        for kind in (CUSTOM, ION):
            with pytest.raises(QnnError) as refused:
                register(context, region, kind=kind)
            assert (refused.value.code, refused.value.operation) == (NOT_SUPPORTED, "memRegister")
