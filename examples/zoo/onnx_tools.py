# SPDX-License-Identifier: Apache-2.0
"""Making published ONNX files fit for an NPU: fixed shapes, one opset, constants folded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MAIN_DOMAINS = ("", "ai.onnx")


def fix_shapes(
    model: Any, path: Path, shapes: Mapping[str, Sequence[int]], opset: int | None = None
) -> None:
    """Write `model` to `path` with the given input shapes.

    Args:
        model: an onnx.ModelProto; changed.
        path: the file to write.
        shapes: input name to shape, for the inputs that change.
        opset: convert to this version of the standard operators first.
    """
    import onnx

    if opset is not None:
        model = onnx.version_converter.convert_version(model, opset)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for value in model.graph.input:
        if value.name in shapes:
            shape = value.type.tensor_type.shape
            del shape.dim[:]
            for size in shapes[value.name]:
                shape.dim.add().dim_value = size
    # Shapes written for the old inputs would contradict the new ones.
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    folded = _fold_constants(model, path)
    folded = onnx.shape_inference.infer_shapes(folded, data_prop=True)
    # ONNX Runtime's quantisation helpers fail on a model with metadata.
    del folded.metadata_props[:]
    onnx.save(folded, str(path))


def _fold_constants(model: Any, path: Path) -> Any:
    """The model after ONNX Runtime's basic optimisations, with the opsets that it still uses."""
    import onnx
    import onnxruntime as ort

    unfolded = path.with_name(f"{path.stem}_unfolded.onnx")
    onnx.save(model, str(unfolded))
    try:
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(path)
        ort.InferenceSession(str(unfolded), options, providers=["CPUExecutionProvider"])
    finally:
        unfolded.unlink()
    folded = onnx.load(str(path))
    used = {node.domain for node in folded.graph.node}
    opsets = [o for o in folded.opset_import if o.domain in _MAIN_DOMAINS or o.domain in used]
    del folded.opset_import[:]
    folded.opset_import.extend(opsets)
    return folded
