# SPDX-License-Identifier: Apache-2.0
"""Context binaries of the fake QNN library that the tests load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qnnbroker.native.fake import FakeGraph, FakeOp, FakeTensor, write_binary
from qnnbroker.v1 import types_pb2

Array = np.ndarray[Any, Any]
#: Makes a file: (file name, graphs, options of write_binary) -> path.
MakeModel = Callable[..., Path]

SHAPE = (4, 8)
TENSOR_BYTES = 4 * 8 * 4


def adder(name: str = "add", *, execute_us: int = 0, ops: tuple[FakeOp, ...] = ()) -> FakeGraph:
    """y = a + b, float32[4, 8]. The fake computes it exactly."""
    tensors = [FakeTensor(n, "float32", SHAPE) for n in ("a", "b", "y")]
    return FakeGraph(
        name,
        (tensors[0], tensors[1]),
        (tensors[2],),
        ops or (("add", "a", "b", "y"),),
        execute_us=execute_us,
    )


def mixed() -> FakeGraph:
    """Tensors of several widths: x uint8[3], h float16[5], l int64[2] -> z uint8[3], s int64[1]."""
    return FakeGraph(
        "mixed",
        (
            FakeTensor("x", "uint8", (3,)),
            FakeTensor("h", "float16", (5,)),
            FakeTensor("l", "int64", (2,)),
        ),
        (FakeTensor("z", "uint8", (3,)), FakeTensor("s", "int64", (1,))),
        (("copy", "x", "z"), ("sum", "l", "s")),
    )


def quantised() -> FakeGraph:
    """q and r ufixed8[6], real values (stored - 10) / 2, r = q + q."""
    q, r = (FakeTensor(n, "ufixed8", (6,), scale=0.5, offset=-10) for n in ("q", "r"))
    return FakeGraph("quantised", (q,), (r,), (("add", "q", "q", "r"),))


def model_maker(folder: Path) -> MakeModel:
    """Writes models into `folder`; without graphs an adder."""

    def make(name: str = "adder", *graphs: FakeGraph, **options: Any) -> Path:
        return write_binary(folder / f"{name}.bin", graphs or (adder(),), **options)

    return make


def numbers(seed: int) -> tuple[Array, Array]:
    """Inputs a and b of `adder`."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal(SHAPE).astype(np.float32),
        rng.standard_normal(SHAPE).astype(np.float32),
    )


def inline_inputs(seed: int) -> list[types_pb2.InlineTensor]:
    """`numbers` as the messages of an Infer of `adder`."""
    return [
        types_pb2.InlineTensor(
            name=name, dtype=types_pb2.DATA_TYPE_FLOAT32, shape=x.shape, data=x.tobytes()
        )
        for name, x in zip("ab", numbers(seed), strict=True)
    ]
