# SPDX-License-Identifier: Apache-2.0
"""What can be said about an ONNX file before the compiler sees it: is it a model, whole, static?

Imports onnx; used inside the compile child only.
"""

from pathlib import Path
from typing import Any

import onnx

from qnnbroker.protos.errors import InvalidRequest, NotAllowed, NotFound, Unsupported

_QUANTISING = frozenset({"QuantizeLinear", "DequantizeLinear"})
_SHOWN = 5


def open_model(path: Path) -> Any:
    """The model at `path` as an onnx.ModelProto, its external data left on disk.

    Raises:
        NotFound: there is no such file, or external data that it names is missing.
        NotAllowed: the file cannot be read.
        InvalidRequest: a directory, not an ONNX model, already compiled, or of dynamic shape.
        Unsupported: not one file of one graph that ONNX Runtime could compile.
    """
    if path.is_dir():
        raise InvalidRequest(
            f"wanted an ONNX file, '{path}' is a directory", reason="BAD_FILE", path=path
        )
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError as exc:
        raise NotFound(f"there is no file '{path}'", reason="FILE_MISSING", path=path) from exc
    except PermissionError as exc:
        raise NotAllowed(
            f"'{path}' cannot be read by this user", reason="FILE_UNREADABLE", path=path
        ) from exc
    except Exception as exc:  # the protobuf runtime's own error types differ by implementation
        raise InvalidRequest(
            f"'{path}' is not an ONNX model: {exc}", reason="BAD_FILE", path=path
        ) from exc
    if not model.graph.node or not model.ir_version:
        # An empty or foreign file may still parse: protobuf skips what it does not know.
        raise InvalidRequest(
            f"'{path}' is not an ONNX model: it has no graph", reason="BAD_FILE", path=path
        )
    _refuse_compiled(model, path)
    _refuse_missing_data(model, path)
    _refuse_dynamic(model, path)
    return model


def is_quantised(model: Any) -> bool:
    """Whether the model carries quantise/dequantise pairs, that is, its own integer precision."""
    return any(node.op_type in _QUANTISING for node in model.graph.node)


def _refuse_compiled(model: Any, path: Path) -> None:
    if any(node.op_type == "EPContext" for node in model.graph.node):
        raise InvalidRequest(
            f"'{path}' is compiled already (it wraps a context binary); load it as it is",
            reason="BAD_FILE",
            path=path,
        )


def _refuse_missing_data(model: Any, path: Path) -> None:
    for tensor in _initialisers(model.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        location = next((e.value for e in tensor.external_data if e.key == "location"), "")
        if not (path.parent / location).is_file():
            raise NotFound(
                f"weight '{tensor.name}' of '{path.name}' is in the file '{location}', "
                f"which is not in '{path.parent}'",
                reason="FILE_MISSING",
                path=path.parent / location,
            )


def _initialisers(graph: Any) -> list[Any]:
    found = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                found.append(attribute.t)
            if attribute.HasField("g"):
                found.extend(_initialisers(attribute.g))
    return found


def _refuse_dynamic(model: Any, path: Path) -> None:
    weights = {tensor.name for tensor in model.graph.initializer}
    dynamic: list[str] = []
    for value in model.graph.input:
        if value.name in weights:
            continue
        if not value.type.HasField("tensor_type"):
            raise Unsupported(
                f"input '{value.name}' of '{path.name}' is not a tensor",
                reason="DTYPE",
                tensor=value.name,
            )
        tensor_type = value.type.tensor_type
        if not tensor_type.HasField("shape"):
            dynamic.append(f"'{value.name}' (no shape at all)")
            continue
        shape = [dim.dim_value or dim.dim_param or "?" for dim in tensor_type.shape.dim]
        fixed = [dim.HasField("dim_value") for dim in tensor_type.shape.dim]
        if not all(fixed):
            text = [str(d) if ok else f"<{d}>" for d, ok in zip(shape, fixed, strict=True)]
            dynamic.append(f"'{value.name}' [{', '.join(text)}]")
    if dynamic:
        shown = ", ".join(dynamic[:_SHOWN])
        more = f" and {len(dynamic) - _SHOWN} more" if len(dynamic) > _SHOWN else ""
        raise InvalidRequest(
            f"a graph for the HTP has fixed shapes, '{path.name}' has inputs with dynamic "
            f"dimensions: {shown}{more}; fix them first, for example with "
            "python -m onnxruntime.tools.make_dynamic_shape_fixed",
            reason="BAD_FILE",
            tensors="; ".join(dynamic),
        )
