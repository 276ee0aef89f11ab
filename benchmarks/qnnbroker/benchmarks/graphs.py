# SPDX-License-Identifier: Apache-2.0
"""Small ONNX models of known run times on the HTP emulation, written by a child: needs onnx.

Weights come from a seed, so that everybody measures the same graphs. The times in the names' table
are those of the emulation on one core of about 2.6 GHz; what a graph really took stands beside its
numbers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

_OPSET = 21


def write(name: str, path: str) -> None:
    """The model of that name, as an ONNX file."""
    import onnx
    from onnx import helper

    model = helper.make_model(MODELS[name](), opset_imports=[helper.make_opsetid("", _OPSET)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    onnx.save(model, path)


def _weights(*shape: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    rng = np.random.default_rng(7)
    fan_in = max(1, int(np.prod(shape[1:])))
    return np.asarray(rng.standard_normal(shape) / np.sqrt(fan_in), np.float32)


def _value(name: str, kind: str, shape: list[int]) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape
    )


def _constant(name: str, array: "np.ndarray[Any, Any]") -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(array, name)


def _gather() -> Any:
    """Rows of a small table by number."""
    from onnx import helper

    return helper.make_graph(
        [helper.make_node("Gather", ["table", "x"], ["y"], name="gather", axis=0)],
        "gather",
        [_value("x", "int32", [4])],
        [_value("y", "float32", [4, 16])],
        [_constant("table", _weights(100, 16))],
    )


def _conv() -> Any:
    """One convolution 3 -> 16 of a 32 x 32 picture, bytes in and out."""
    from onnx import helper

    def pair(key: str, scale: float, zero: "np.ndarray[Any, Any]") -> list[Any]:
        return [
            _constant(f"{key}_scale", np.array(scale, np.float32)),
            _constant(f"{key}_zero", zero),
        ]

    def node(kind: str, source: str, target: str, key: str) -> Any:
        return helper.make_node(
            kind, [source, f"{key}_scale", f"{key}_zero"], [target], name=target
        )

    middle = np.array(128, np.uint8)
    weights = np.clip(np.round(_weights(16, 3, 3, 3) * 64), -127, 127).astype(np.int8)
    return helper.make_graph(
        [
            node("DequantizeLinear", "x", "x_real", "x"),
            node("DequantizeLinear", "w", "w_real", "w"),
            helper.make_node(
                "Conv", ["x_real", "w_real"], ["c"], name="conv", kernel_shape=[3, 3], pads=[1] * 4
            ),
            node("QuantizeLinear", "c", "y", "y"),
        ],
        "conv",
        [_value("x", "uint8", [1, 3, 32, 32])],
        [_value("y", "uint8", [1, 16, 32, 32])],
        [
            *pair("x", 1 / 32, middle),
            *pair("y", 1 / 16, middle),
            *pair("w", 1 / 64, np.array(0, np.int8)),
            _constant("w", weights),
        ],
    )


def _cnn() -> Any:
    """A small network for pictures in 16-bit floats: two convolutions, pooling, ten classes."""
    from onnx import helper

    def conv(source: str, target: str, weights: str) -> list[Any]:
        return [
            helper.make_node(
                "Conv", [source, weights], [f"{target}_c"], f"{target}_conv", pads=[1] * 4
            ),
            helper.make_node("Relu", [f"{target}_c"], [target], f"{target}_relu"),
        ]

    return helper.make_graph(
        [
            *conv("x", "a", "w1"),
            helper.make_node("MaxPool", ["a"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
            *conv("p", "b", "w2"),
            helper.make_node("GlobalAveragePool", ["b"], ["g"], "mean"),
            helper.make_node("Flatten", ["g"], ["f"], "flat"),
            helper.make_node("Gemm", ["f", "w3"], ["y"], "classes", transB=1),
        ],
        "cnn",
        [_value("x", "float32", [1, 3, 32, 32])],
        [_value("y", "float32", [1, 10])],
        [
            _constant("w1", _weights(16, 3, 3, 3)),
            _constant("w2", _weights(32, 16, 3, 3)),
            _constant("w3", _weights(10, 32)),
        ],
    )


def _dense(rows: int, size: int) -> Any:
    """One matrix product of 16-bit floats."""
    from onnx import helper

    return helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="matmul")],
        "dense",
        [_value("x", "float32", [rows, size])],
        [_value("y", "float32", [rows, size])],
        [_constant("w", _weights(size, size))],
    )


#: Name to model; about 0.1, 1.2, 5 and 150 ms, and two seconds or more.
MODELS: dict[str, Callable[[], Any]] = {
    "gather": _gather,
    "conv": _conv,
    "cnn": _cnn,
    "dense": lambda: _dense(256, 1024),
    "long": lambda: _dense(2048, 1536),
}
