# SPDX-License-Identifier: Apache-2.0
"""Magika: which type is this file? Google's file type detection, its graph rewritten for an NPU."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from zoo.fetch import Member, Package
from zoo.model import Array, Case, Model, Outputs
from zoo.photographs import PHOTOGRAPHS

MAGIKA = Package(
    name="magika",
    version="1.0.3",
    kind="wheel",
    licence="Apache-2.0",
    sha256="3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
    members={
        "model.onnx": Member(
            "magika/models/standard_v3_3/model.onnx",
            "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
        ),
        "config.json": Member(
            "magika/models/standard_v3_3/config.min.json",
            "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db",
        ),
        "content_types.json": Member(
            "magika/config/content_types_kb.min.json",
            "75208adba69bc0556403b62b32ef3ccf8b5ce494411780845852e52e6583a10d",
        ),
    },
    keep_archive="magika.whl",
)

_END_BYTES = 1024  # looked at, of the file's beginning and of its end
_BLOCK_BYTES = 4096  # in which they are looked for, white space not counted
_PADDING = 256  # the token that is no byte
_SPACE = b"\t\n\v\f\r "
_TYPES = 214
_EPSILON = 1e-6


class MagikaFused(Model):
    """The published weights and function, in operators that an NPU has.

    The exported graph spells out one-hot encoding, GELU and layer normalisation. Cubes and squares
    in them leave the range of 16-bit floats, so it compiles and answers wrongly. Here the first
    layer, which sees one byte at a time, is a table of its 257 answers, and the rest are operators
    that the backend computes as a whole.
    """

    name = "magika_fused"
    task = "file type detection (Google Magika, standard_v3_3)"
    precision = "fp16"
    packages = (MAGIKA, PHOTOGRAPHS)

    def write_float(self, path: Path) -> None:
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        weights = _weights(onnx.load(str(MAGIKA.file("model.onnx"))))
        shapes = {"steps": [1, 512, 256], "flat": [1, 512]}
        constants = [numpy_helper.from_array(v, k) for k, v in weights.items()]
        constants += [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in shapes.items()]

        def node(op: str, inputs: list[str], output: str, **attributes: object) -> Any:
            return helper.make_node(op, inputs, [output], name=f"{op}_{output}", **attributes)

        nodes = [
            node("Gather", ["table", "bytes"], "embedded"),
            node("Reshape", ["embedded", "steps"], "stepped"),  # four bytes a step
            node("Transpose", ["stepped"], "channels", perm=[0, 2, 1]),
            node(
                "LayerNormalization",
                ["channels", "norm0_scale", "norm0_bias"],
                "normed0",
                axis=-1,
                epsilon=_EPSILON,
            ),
            node("Conv", ["normed0", "kernel", "conv_bias"], "convolved", kernel_shape=[5]),
            node("Gelu", ["convolved"], "active", approximate="tanh"),
            node("GlobalMaxPool", ["active"], "strongest"),
            node("Reshape", ["strongest", "flat"], "features"),
            node(
                "LayerNormalization",
                ["features", "norm1_scale", "norm1_bias"],
                "normed1",
                axis=-1,
                epsilon=_EPSILON,
            ),
            node("Gemm", ["normed1", "dense", "dense_bias"], "logits"),
            node("Softmax", ["logits"], "target_label", axis=-1),
        ]
        graph = helper.make_graph(
            nodes,
            self.name,
            [helper.make_tensor_value_info("bytes", TensorProto.INT32, [1, 2 * _END_BYTES])],
            [helper.make_tensor_value_info("target_label", TensorProto.FLOAT, [1, _TYPES])],
            constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
        model.ir_version = 9
        model = onnx.shape_inference.infer_shapes(model)
        onnx.checker.check_model(model)
        onnx.save(model, str(path))

    def cases(self) -> list[Case]:
        names = labels()

        def case(path: Path, content: bytes, wanted: str) -> Case:
            def check(outputs: Outputs) -> tuple[bool, str]:
                label, probability = best(outputs, names)
                return label == wanted, f"{label} ({probability:.2f})"

            return Case(f"{path.name} ({wanted})", {"bytes": features(content)}, check)

        return [case(path, content, wanted) for path, content, wanted in samples()]


def features(content: bytes) -> Array:
    """What the model sees of a file: int32 [1, 2048], the first and last 1024 bytes that count.

    Padding stands after the beginning and before the end of a short file.
    """
    beginning = content[:_BLOCK_BYTES].lstrip(_SPACE)[:_END_BYTES]
    end = content[-_BLOCK_BYTES:].rstrip(_SPACE)[-_END_BYTES:]
    tokens = np.full(2 * _END_BYTES, _PADDING, np.int32)
    tokens[: len(beginning)] = np.frombuffer(beginning, np.uint8)
    tokens[tokens.size - len(end) :] = np.frombuffer(end, np.uint8)
    return tokens[None]


def file_features(path: Path) -> Array:
    """`features` of a file, of which no more than is needed is read."""
    with open(path, "rb") as file:
        content = file.read(_BLOCK_BYTES)
        rest = file.seek(0, 2) - len(content)
        if rest > 0:
            keep = min(rest, _BLOCK_BYTES)
            file.seek(-keep, 2)
            content += file.read(keep)
    return features(content)


def labels() -> list[str]:
    """The names of the 214 types, in the order of the model's output."""
    found: list[str] = json.loads(MAGIKA.file("config.json").read_text())["target_labels_space"]
    return found


def best(outputs: Outputs, names: list[str]) -> tuple[str, float]:
    """The most probable type and its probability."""
    probabilities = outputs["target_label"].reshape(-1)
    index = int(probabilities.argmax())
    return names[index], float(probabilities[index])


def samples() -> list[tuple[Path, bytes, str]]:
    """Real files of this machine and of the fetched packages, with their types."""
    found = [
        (Path(json.__file__).with_name("decoder.py"), "python"),
        (MAGIKA.file("model.onnx"), "onnx"),
        (PHOTOGRAPHS.file("chelsea.png"), "png"),
        (PHOTOGRAPHS.file("rocket.jpg"), "jpeg"),
        (MAGIKA.file("magika.whl"), "zip"),
        (MAGIKA.file("content_types.json"), "json"),
        (Path(sys.executable).resolve(), "elf"),
    ]
    read = [(path, path.read_bytes(), label) for path, label in found]
    packed = gzip.compress(read[0][1], mtime=0)
    return [*read, (Path("decoder.py.gz"), packed, "gzip")]


def _weights(model: Any) -> dict[str, Array]:
    """The trained values, found by shape and layer, under our own names."""
    from onnx import numpy_helper

    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}

    def only(shape: tuple[int, ...], layer: str = "") -> Array:
        (found,) = [v for k, v in values.items() if v.shape == shape and layer in k]
        return np.ascontiguousarray(found.astype(np.float32))

    first = (only((257, 64)) + only((1, 1, 64))[0]).astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (first + 0.044715 * first**3)
    return {
        # The first layer and its GELU, for each of the 257 tokens.
        "table": (0.5 * first * (1 + np.tanh(inner))).astype(np.float32),
        "norm0_scale": only((1, 512, 1), "LayerNorm_0/Reshape_2").reshape(512),
        "norm0_bias": only((1, 512, 1), "LayerNorm_0/Reshape_3").reshape(512),
        "kernel": only((512, 256, 5, 1)).reshape(512, 256, 5),
        "conv_bias": only((1, 512, 1), "const_fold_opt").reshape(512),
        "norm1_scale": only((1, 512), "LayerNorm_1/Reshape_2").reshape(512),
        "norm1_bias": only((1, 512), "LayerNorm_1/Reshape_3").reshape(512),
        "dense": only((512, _TYPES)),
        "dense_bias": only((1, _TYPES)).reshape(_TYPES),
    }
