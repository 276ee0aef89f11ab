# SPDX-License-Identifier: Apache-2.0
"""AlexNet with random weights: large, for measuring load time and memory."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import ZooError
from zoo.model import Case, Feeds, Model, Outputs
from zoo.photographs import PHOTOGRAPHS, photograph

# From the onnx package, which making a model needs anyway.
_FILE = "backend/test/data/light/light_bvlc_alexnet.onnx"
_SHA256 = "2afa78cef5a88aed9d6e3d63fb92bd330c9177ac150d19189c6b3e7204ba0212"
_SEED = 7
_SIZE = 224
#: Of 16-bit floats, as a share of the largest probability.
_TOLERANCE = 0.02


class LightAlexNet(Model):
    """Input: `data_0` [1, 3, 224, 224]. Output: `prob_1` [1, 1000]. 61 million weights."""

    name = "light_alexnet"
    task = "a large context (AlexNet's graph, 61 million random weights)"
    precision = "fp16"
    packages = (PHOTOGRAPHS,)

    def write_float(self, path: Path) -> None:
        import onnx

        from zoo.onnx_tools import fix_shapes

        model = onnx.load_from_string(_published())
        _fill_weights(model)
        fix_shapes(model, path, {}, opset=13)

    def cases(self) -> list[Case]:
        from zoo.build import reference

        def check(outputs: Outputs) -> tuple[bool, str]:
            found = outputs["prob_1"].reshape(-1)
            wanted = reference(self.name)[0]["prob_1"].reshape(-1)
            off = float(np.abs(found - wanted).max() / wanted.max())
            return off < _TOLERANCE, f"{100 * off:.2f} % off the float model's answer"

        return [Case("chelsea.png", _features("chelsea.png"), check)]


def _features(name: str) -> Feeds:
    from PIL import Image

    picture = photograph(name).resize((_SIZE, _SIZE), Image.Resampling.BILINEAR)
    return {"data_0": ((np.asarray(picture, np.float32) - 127) / 128).transpose(2, 0, 1)[None]}


def _published() -> bytes:
    import onnx

    content = (Path(onnx.__file__).parent / _FILE).read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != _SHA256:
        raise ZooError(
            f"{_FILE} of onnx {onnx.__version__} is not the file that this recipe is for: "
            f"wanted SHA-256 {_SHA256}, found {found}"
        )
    return content


def _fill_weights(model: Any) -> None:
    """The file declares its weights by shape only: give them seeded values of a sensible size."""
    from onnx import numpy_helper

    rng = np.random.default_rng(_SEED)
    graph = model.graph
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type != "ConstantOfShape":
            nodes.append(node)
            continue
        shape = [int(size) for size in shapes[node.input[0]]]
        values = np.zeros(shape, np.float32)
        if len(shape) > 1:  # not a bias; scaled so that activations keep their size
            values = rng.standard_normal(shape, np.float32) * np.float32(
                np.sqrt(2 / np.prod(shape[1:]))
            )
        graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
    del graph.node[:]
    graph.node.extend(nodes)
    used = {name for node in nodes for name in node.input}
    weights = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(weights)
    inputs = [value for value in graph.input if value.name in used]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)  # before, weights had to be inputs too
