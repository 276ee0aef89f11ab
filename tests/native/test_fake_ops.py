# SPDX-License-Identifier: Apache-2.0
"""The ops of the fake library, through the real binding, against numpy."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typing_extensions import Buffer

from qnnbroker.native.fake import FakeGraph, FakeOp, FakeTensor, binary_bytes, fake_qnn_dir
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_library import QnnLibrary

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def device() -> Iterator[QnnDevice]:
    with QnnBackend(QnnLibrary(fake_qnn_dir())) as backend, QnnDevice(backend) as device:
        yield device


def spans(side: list[tuple[FakeTensor, Array]]) -> list[tuple[Buffer, int, int]]:
    return [(array.data, 0, array.nbytes) for _, array in side]


def run(
    device: QnnDevice,
    ops: tuple[FakeOp, ...],
    inputs: list[tuple[FakeTensor, Array]],
    outputs: list[tuple[FakeTensor, Array]],
) -> list[Array]:
    """Executes one graph and returns its outputs, which are what was given."""
    graph = FakeGraph("g", tuple(t for t, _ in inputs), tuple(t for t, _ in outputs), ops)
    with QnnContext(device, binary_bytes([graph])) as context:
        with context.graph("g").bind(spans(inputs), spans(outputs)) as runnable:
            runnable.execute()
    return [array for _, array in outputs]


def random(dtype: str, *shape: int) -> Array:
    generator = np.random.default_rng(7)
    if np.dtype(dtype).kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "int64", "uint16"])
def test_add_is_what_numpy_says(device: QnnDevice, dtype: str) -> None:
    shape = (3, 5, 7)
    a, b = random(dtype, *shape), random(dtype, *shape)[::-1].copy()
    tensors = [FakeTensor(name, dtype, shape) for name in "abc"]
    (got,) = run(
        device,
        ("add",),
        [(tensors[0], a), (tensors[1], b)],
        [(tensors[2], np.zeros(shape, dtype))],
    )
    assert np.array_equal(got, a + b)


def test_float16_rounds_like_numpy(device: QnnDevice) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = values[np.isfinite(values)]
    other = np.roll(finite, 12345)
    tensors = [FakeTensor(name, "float16", finite.shape) for name in "abc"]
    (got,) = run(
        device,
        ("add",),
        [(tensors[0], finite), (tensors[1], other)],
        [(tensors[2], np.zeros_like(finite))],
    )
    with np.errstate(over="ignore"):
        assert np.array_equal(got, finite + other)


def test_a_single_element_is_added_to_all(device: QnnDevice) -> None:
    a, one = random("float32", 4, 4), np.array([2.5], np.float32)
    (got,) = run(
        device,
        ("add",),
        [(FakeTensor("a", "float32", (4, 4)), a), (FakeTensor("b", "float32", (1,)), one)],
        [(FakeTensor("c", "float32", (4, 4)), np.zeros_like(a))],
    )
    assert np.array_equal(got, a + one)


def test_quantised_add_rounds_and_saturates(device: QnnDevice) -> None:
    a = np.array([0, 10, 128, 200, 255], np.uint8)
    b = np.array([0, 128, 131, 255, 255], np.uint8)
    quantised = [FakeTensor(n, "ufixed8", (5,), scale=0.5, offset=-128) for n in "ab"]
    out = FakeTensor("c", "ufixed8", (5,), scale=0.25, offset=-128)
    (got,) = run(
        device,
        ("add",),
        list(zip(quantised, [a, b], strict=True)),
        [(out, np.zeros(5, np.uint8))],
    )
    real = (a.astype(float) - 128) * 0.5 + (b.astype(float) - 128) * 0.5
    assert np.array_equal(got, np.clip(np.rint(real / 0.25 + 128), 0, 255).astype(np.uint8))


def test_copy_converts_by_axis(device: QnnDevice) -> None:
    stored = random("int8", 2, 3)
    scales, offsets = (0.5, 0.25, 2.0), (0, 3, -4)
    tensor = FakeTensor("a", "sfixed8", (2, 3), axis=1, scales=scales, offsets=offsets)
    (got,) = run(
        device,
        ("copy",),
        [(tensor, stored)],
        [(FakeTensor("b", "float32", (2, 3)), np.zeros((2, 3), np.float32))],
    )
    assert np.array_equal(got, (stored + np.array(offsets)) * np.array(scales, np.float32))


def test_four_bit_elements_are_packed_low_half_first(device: QnnDevice) -> None:
    packed = np.array([0xA7, 0x0F], np.uint8)
    (got,) = run(
        device,
        ("copy",),
        [(FakeTensor("a", "sfixed4", (3,), scale=1.0), packed)],
        [(FakeTensor("b", "int32", (3,)), np.zeros(3, np.int32))],
    )
    assert got.tolist() == [7, -6, -1]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_matmul_is_what_numpy_says(device: QnnDevice, dtype: str, batched: bool) -> None:
    a = random("int8", 2, 3, 4).astype(dtype)
    b = random("int8", *((2,) if batched else ()), 4, 5).astype(dtype)
    (got,) = run(
        device,
        ("matmul",),
        [(FakeTensor("a", dtype, a.shape), a), (FakeTensor("b", dtype, b.shape), b)],
        [(FakeTensor("c", dtype, (2, 3, 5)), np.zeros((2, 3, 5), dtype))],
    )
    assert np.array_equal(got, a @ b)


def test_sums_of_values_and_of_bytes(device: QnnDevice) -> None:
    a = random("float32", 100)
    got = run(
        device,
        (("sum", "a", "s"), ("sum_bytes", "a", "b")),
        [(FakeTensor("a", "float32", (100,)), a)],
        [
            (FakeTensor("s", "float64", (1,)), np.zeros(1)),
            (FakeTensor("b", "int64", (1,)), np.zeros(1, np.int64)),
        ],
    )
    assert got[0][0] == pytest.approx(a.astype(float).sum(), rel=1e-12)
    assert got[1][0] == a.view(np.uint8).astype(np.int64).sum()


def test_ops_run_in_order_and_may_read_outputs(device: QnnDevice) -> None:
    a = random("float32", 8)
    names = {name: FakeTensor(name, "float32", (8,)) for name in ("in put", "x", "y%")}
    got = run(
        device,
        (("add", "in put", "in put", "x"), ("add", "x", "in put", "y%")),
        [(names["in put"], a)],
        [(names["x"], np.zeros_like(a)), (names["y%"], np.zeros_like(a))],
    )
    assert np.array_equal(got[0], a + a)
    assert np.array_equal(got[1], a + a + a)


def test_null_touches_nothing(device: QnnDevice) -> None:
    out = np.full(16, 77, np.uint8)
    run(
        device,
        ("null",),
        [(FakeTensor("a", "uint8", (16,)), np.zeros(16, np.uint8))],
        [(FakeTensor("b", "uint8", (16,)), out)],
    )
    assert (out == 77).all()


def test_sleep_takes_time_without_the_processor(device: QnnDevice) -> None:
    tensor = FakeTensor("a", "uint8", (1,)), np.zeros(1, np.uint8)
    other = FakeTensor("b", "uint8", (1,)), np.zeros(1, np.uint8)
    wall, cpu = time.monotonic(), time.thread_time()
    run(device, (("sleep", 100_000),), [tensor], [other])
    assert time.monotonic() - wall >= 0.1
    assert time.thread_time() - cpu < 0.08


def test_spin_takes_the_time_it_says(device: QnnDevice) -> None:
    tensor = FakeTensor("a", "uint8", (1,)), np.zeros(1, np.uint8)
    other = FakeTensor("b", "uint8", (1,)), np.zeros(1, np.uint8)
    wall = time.monotonic()
    run(device, (("spin", 20_000),), [tensor], [other])
    assert time.monotonic() - wall >= 0.02
