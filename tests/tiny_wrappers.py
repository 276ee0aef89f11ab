# SPDX-License-Identifier: Apache-2.0
"""Tiny ONNX models, their compilation by ONNX Runtime's QNN provider, and wrappers written by hand.

Compiling loads the QNN library and leaves process-wide settings behind, so each compilation is a
process of its own: `python tests/tiny_wrappers.py MODEL EMBED_MODE OUT`, from tests through
`compile_wrapper`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]

#: The chip whose code the emulation runs; all contexts of one process must be of one class.
SOC_MODEL = "60"


def _model(
    name: str,
    nodes: list[onnx.NodeProto],
    inputs: list[str],
    outputs: list[str],
    constants: dict[str, Array],
) -> onnx.ModelProto:
    def float_row(tensor: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(tensor, TensorProto.FLOAT, [1, 8])

    graph = helper.make_graph(
        nodes,
        name,
        [float_row(i) for i in inputs],
        [float_row(o) for o in outputs],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    return model


def add() -> onnx.ModelProto:
    """One operator, one partition."""
    return _model("add", [helper.make_node("Add", ["a", "b"], ["c"])], ["a", "b"], ["c"], {})


def parts() -> onnx.ModelProto:
    """Erf does not run on the NPU, so two partitions lie around it. Names that need care."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        n: rng.standard_normal((8, 8)).astype(np.float32) for n in ("w1", "w2")
    }
    nodes = [
        helper.make_node("MatMul", ["x y", "w1"], ["a"], name="first"),
        helper.make_node("Erf", ["a"], ["b"], name="middle"),
        helper.make_node("MatMul", ["b", "w2"], ["out/é:0"], name="last"),
    ]
    return _model("two parts", nodes, ["x y"], ["out/é:0"], weights)


def qdq() -> onnx.ModelProto:
    """Quantised, with float inputs and outputs: the boundary Q and DQ may stay on the CPU."""
    rng = np.random.default_rng(1)
    constants: dict[str, Array] = {
        "scale": np.array(0.05, np.float32),
        "zero": np.array(128, np.uint8),
        "w": rng.integers(0, 255, (8, 8)).astype(np.uint8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "scale", "zero"], ["x_dq"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["w_dq"]),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["m"]),
        helper.make_node("QuantizeLinear", ["m", "scale", "zero"], ["m_q"]),
        helper.make_node("DequantizeLinear", ["m_q", "scale", "zero"], ["y"]),
    ]
    return _model("quantised", nodes, ["x"], ["y"], constants)


MODELS = {"add": add, "parts": parts, "qdq": qdq}


def ep_node(**changes: object) -> onnx.NodeProto:
    """An EPContext node as the provider writes it; a change to None drops the attribute."""
    attributes: dict[str, object] = {
        "main_context": 1,
        "embed_mode": 0,
        "ep_cache_context": "model_qnn.bin",
        "source": "QNNExecutionProvider",
        "partition_name": "part_0",
        "ep_sdk_version": "v2.51",
    } | changes
    given = {k: v for k, v in attributes.items() if v is not None}
    return helper.make_node(
        "EPContext", ["x"], ["y"], name="node_0", domain="com.microsoft", **given
    )


def model_of(*nodes: onnx.NodeProto) -> bytes:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "batch", None])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    model = helper.make_model(helper.make_graph(list(nodes), "g", [x], [y]))
    return bytes(model.SerializeToString())


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def around_embedded(size: int) -> tuple[bytes, bytes]:
    """What comes before and behind an embedded binary of `size` bytes in a wrapper."""
    head, tail = model_of(ep_node(embed_mode=1, ep_cache_context=b"\x01" * 200)).split(
        b"\x01" * 200
    )
    return grow(head, tail, 200, size)


def grow(head: bytes, tail: bytes, old: int, new: int) -> tuple[bytes, bytes]:
    """Head and tail of a model around an embedded binary of `old` bytes, for one of `new` bytes."""
    model = onnx.load_from_string(head + b"\x01" * old + tail)
    (node,) = model.graph.node
    (cache,) = [a for a in node.attribute if a.name == "ep_cache_context"]
    others = [a.SerializeToString() for a in node.attribute if a.name != "ep_cache_context"]
    cache.s = b""
    before = b"".join(b"\x2a" + varint(len(a)) + a for a in others)
    del node.attribute[:]
    inner = cache.SerializeToString().replace(b"\x22\x00", b"")
    body = inner + b"\x22" + varint(new)
    before = node.SerializeToString() + before + b"\x2a" + varint(len(body) + new) + body
    graph = b"\x0a" + varint(len(before) + new) + before
    del model.graph.node[:]
    rest = model.graph.SerializeToString()
    return (
        b"\x08\x0e\x3a" + varint(len(graph) + new + len(rest)) + graph,
        rest,
    )


def compile_wrapper(model: str, embed_mode: int, out: Path) -> Path:
    """The path of the wrapper of `model`, written to `out` by a child process."""
    command = [sys.executable, __file__, model, str(embed_mode), str(out)]
    done = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


def _compile(model: str, embed_mode: str, out: str) -> None:
    import onnxruntime
    import onnxruntime_qnn

    name = onnxruntime_qnn.get_ep_name()
    onnxruntime.register_execution_provider_library(name, onnxruntime_qnn.get_library_path())
    device = next(d for d in onnxruntime.get_ep_devices() if d.ep_name == name)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_embed_mode", embed_mode)
    options.add_session_config_entry("ep.context_file_path", out)
    provider = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "soc_model": SOC_MODEL,
        "enable_htp_fp16_precision": "1",
    }
    options.add_provider_for_devices([device], provider)
    onnxruntime.InferenceSession(MODELS[model]().SerializeToString(), options)
    os._exit(0)  # the library may crash in its exit handlers


if __name__ == "__main__":
    _compile(*sys.argv[1:])
