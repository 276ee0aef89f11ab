# SPDX-License-Identifier: Apache-2.0
"""Writes the EPContext wrapper of one graph of a context binary, as ONNX Runtime reads it.

An ONNX model with one node is little protobuf, so it is written here rather than with the onnx
package, which only the compiler needs. The numbers are field numbers of onnx.proto.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qnnbroker.protos.errors import Unsupported

IR_VERSION = 10
OPSET = 21
PRODUCER = "qnnbroker"
#: numpy dtype -> ONNX element type.
ELEMENT_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
}
_INT, _STRING = 2, 3  # attribute types


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output; `dtype` is numpy's name, of the stored integers if it is quantised."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the binary is: the name of a file beside the wrapper, or its bytes."""

    binary: str | bytes

    @property
    def embed_mode(self) -> int:
        return int(isinstance(self.binary, bytes))


def wrapper_bytes(
    graph: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], place: Place, sdk_build: str
) -> bytes:
    """The wrapper of the QNN graph of that name.

    Raises:
        Unsupported: reason DTYPE; a tensor of a type that ONNX has not.
    """
    binary = place.binary if isinstance(place.binary, bytes) else place.binary.encode()
    node = b"".join(
        [
            *(_bytes(1, t.name.encode()) for t in inputs),
            *(_bytes(2, t.name.encode()) for t in outputs),
            _bytes(3, graph.encode()),
            _bytes(4, b"EPContext"),
            _attribute("main_context", 1),
            _attribute("embed_mode", place.embed_mode),
            _attribute("ep_cache_context", binary),
            _attribute("partition_name", graph.encode()),
            _attribute("source", b"QNNExecutionProvider"),
            _attribute("ep_sdk_version", sdk_build.encode()),
            _bytes(7, b"com.microsoft"),
        ]
    )
    content = b"".join(
        [
            _bytes(1, node),
            _bytes(2, graph.encode()),
            *(_bytes(11, _value(t)) for t in inputs),
            *(_bytes(12, _value(t)) for t in outputs),
        ]
    )
    return b"".join(
        [
            _number(1, IR_VERSION),
            _bytes(2, PRODUCER.encode()),
            _bytes(7, content),
            _bytes(8, _number(2, OPSET)),
            _bytes(8, _bytes(1, b"com.microsoft") + _number(2, 1)),
        ]
    )


def _value(tensor: Tensor) -> bytes:
    if tensor.dtype not in ELEMENT_TYPES:
        raise Unsupported(
            f"tensor {tensor.name!r} is of {tensor.dtype}, which ONNX has no type for",
            reason="DTYPE",
        )
    dims = b"".join(_bytes(1, _number(1, size)) for size in tensor.shape)
    typed = _number(1, ELEMENT_TYPES[tensor.dtype]) + _bytes(2, dims)
    return _bytes(1, tensor.name.encode()) + _bytes(2, _bytes(1, typed))


def _attribute(name: str, value: int | bytes) -> bytes:
    if isinstance(value, int):
        parts: Iterable[bytes] = (_number(3, value), _number(20, _INT))
    else:
        parts = (_bytes(4, value), _number(20, _STRING))
    return _bytes(5, _bytes(1, name.encode()) + b"".join(parts))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
