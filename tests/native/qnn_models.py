# SPDX-License-Identifier: Apache-2.0
"""Tiny ONNX models as context binaries for the real QNN library, with ONNX Runtime's answers.

Compiling runs in a child process of its own, once: the results are kept in build/test-models under
a name that changes with the recipe and the versions. All are compiled with a soc_model, because one
process must not hold binaries that were compiled with one and without; but those in FOR.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CACHE = Path(__file__).parents[2] / "build" / "test-models"
SOC_MODEL = "60"
INSTALLED = importlib.util.find_spec("onnxruntime_qnn") is not None

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class CompiledModel:
    """A context binary with one set of inputs and the outputs that ONNX Runtime got for them.

    The arrays are those of the QNN graph, by tensor name; empty for a model of several graphs.
    """

    name: str
    binary: bytes
    inputs: dict[str, Array]
    outputs: dict[str, Array]


def compiled(name: str) -> CompiledModel:
    """The model of that recipe, compiled now or before. Safe to call from several processes."""
    versions = [importlib.metadata.version(p) for p in ("onnxruntime", "onnxruntime-qnn", "onnx")]
    recipe = hashlib.sha256(Path(__file__).read_bytes() + repr((name, versions)).encode())
    folder = CACHE / f"{name}-{recipe.hexdigest()[:16]}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
        try:
            child = [sys.executable, __file__, name, str(scratch)]
            done = subprocess.run(child, capture_output=True, text=True, timeout=300)
            if done.returncode != 0:
                raise RuntimeError(f"compiling {name} failed:\n{done.stdout}\n{done.stderr}")
            os.rename(scratch, folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    with np.load(folder / "tensors.npz") as arrays:
        tensors = {key: arrays[key] for key in arrays.files}
    return CompiledModel(
        name,
        (folder / "binary").read_bytes(),
        {k.removeprefix("in."): v for k, v in tensors.items() if k.startswith("in.")},
        {k.removeprefix("out."): v for k, v in tensors.items() if k.startswith("out.")},
    )


# From here on: what runs in the child.


def _weights(*shape: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(7)
    return np.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), np.float32)


def _dense(rows: int, size: int) -> Any:
    """y = x @ w + b in float, [rows, size]."""
    from onnx import TensorProto, helper, numpy_helper

    return helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="matmul"),
            helper.make_node("Add", ["m", "b"], ["y"], name="add"),
        ],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, size])],
        [
            numpy_helper.from_array(_weights(size, size), "w"),
            numpy_helper.from_array(_weights(size), "b"),
        ],
    )


def _conv(dtype: str) -> Any:
    """A convolution of quantised integers, `dtype` in and out."""
    from onnx import helper, numpy_helper

    integer = np.dtype(dtype)
    zero = np.array(2 ** (8 * integer.itemsize - 1), integer)
    step = 4.0 / 2 ** (8 * integer.itemsize - 1)

    def pair(name: str, scale: float, point: Array) -> list[Any]:
        return [
            numpy_helper.from_array(np.array(scale, np.float32), f"{name}_scale"),
            numpy_helper.from_array(point, f"{name}_zero"),
        ]

    def node(kind: str, source: str, target: str, key: str) -> Any:
        return helper.make_node(
            kind, [source, f"{key}_scale", f"{key}_zero"], [target], name=target
        )

    weights = np.clip(np.round(_weights(9 * 3, 4) * 64), -127, 127).astype(np.int8)
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
        [
            helper.make_tensor_value_info(
                "x", helper.np_dtype_to_tensor_dtype(integer), [1, 3, 8, 8]
            )
        ],
        [
            helper.make_tensor_value_info(
                "y", helper.np_dtype_to_tensor_dtype(integer), [1, 4, 8, 8]
            )
        ],
        [
            *pair("x", step, zero),
            *pair("y", 2 * step, zero),
            *pair("w", 1 / 64, np.array(0, np.int8)),
            numpy_helper.from_array(weights.T.reshape(4, 3, 3, 3).copy(), "w"),
        ],
    )


def _split() -> Any:
    """Two dense layers with something between that has no place on the NPU: two QNN graphs."""
    from onnx import TensorProto, helper, numpy_helper

    return helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"], name="first"),
            helper.make_node("Hardmax", ["m"], ["h"], name="between"),
            helper.make_node("MatMul", ["h", "w"], ["y"], name="second"),
        ],
        "split",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16])],
        [numpy_helper.from_array(_weights(16, 16), "w")],
    )


RECIPES: dict[str, Callable[[], Any]] = {
    "dense": lambda: _dense(1, 32),
    "slow": lambda: _dense(512, 1024),
    "conv_u8": lambda: _conv("uint8"),
    "conv_u16": lambda: _conv("uint16"),
    "conv_no_soc": lambda: _conv("uint8"),
    "conv_arch": lambda: _conv("uint8"),
    "conv_soc_30": lambda: _conv("uint8"),
    "conv_soc_43": lambda: _conv("uint8"),
    "split": _split,
}


#: What these are compiled for instead; all but the last are not of the class of the others.
FOR = {
    "conv_no_soc": {},
    "conv_arch": {"htp_arch": "75"},
    "conv_soc_30": {"soc_model": "30"},
    "conv_soc_43": {"soc_model": "43"},
}


def _session(path: Path, context: Path | None, fallback: bool, chip: dict[str, str]) -> Any:
    import onnxruntime as ort
    import onnxruntime_qnn as qnn

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "0" if fallback else "1")
    if context is not None:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", str(context))
        options.add_session_config_entry("ep.context_embed_mode", "0")
    devices = [d for d in ort.get_ep_devices() if d.ep_name == "QNNExecutionProvider"]
    settings = {
        "backend_path": qnn.get_qnn_htp_path(),
        **chip,
    }
    options.add_provider_for_devices(devices[:1], settings)
    return ort.InferenceSession(str(path), options)


def _compile(name: str, folder: Path) -> None:
    import onnx
    import onnxruntime as ort
    import onnxruntime_qnn as qnn
    from onnx import helper

    model = helper.make_model(RECIPES[name](), opset_imports=[helper.make_opsetid("", 21)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    source, wrapper = folder / "model.onnx", folder / "context.onnx"
    onnx.save(model, source)
    ort.register_execution_provider_library("QNNExecutionProvider", qnn.get_library_path())
    fallback = name == "split"
    chip = FOR.get(name, {"soc_model": SOC_MODEL, "enable_htp_fp16_precision": "1"})
    _session(source, wrapper, fallback, chip)
    tensors: dict[str, Array] = {}
    if not fallback:
        session = _session(wrapper, None, False, chip)
        rng = np.random.default_rng(3)
        for value in model.graph.input:
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
            if dtype.kind == "f":
                array = rng.standard_normal(shape).astype(dtype)
            else:
                array = rng.integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)
            tensors[f"in.{value.name}"] = array
        feed = {key.removeprefix("in."): value for key, value in tensors.items()}
        outputs = session.run(None, feed)
        for value, array in zip(model.graph.output, outputs, strict=True):
            tensors[f"out.{value.name}"] = array
    np.savez(folder / "tensors.npz", allow_pickle=False, **tensors)
    (binary,) = folder.glob("*.bin")
    binary.rename(folder / "binary")


if __name__ == "__main__":
    _compile(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # the library's threads race with an ordinary exit
