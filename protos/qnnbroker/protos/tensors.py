# SPDX-License-Identifier: Apache-2.0
"""TensorSpec and DataType: proto <-> Python <-> numpy dtype <-> byte size.

Byte sizes are derived here, from shape and dtype, and nowhere else.
"""

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qnnbroker.v1 import types_pb2 as pb

from .errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    # Only clients need it when they run: it is 13 MiB that the broker does without.
    import numpy as np


@dataclass(frozen=True, slots=True)
class ElementType:
    """What a tensor consists of: the name numpy has for it, the proto DataType number, bytes."""

    name: str
    number: int
    itemsize: int

    def __str__(self) -> str:
        return self.name


#: proto DataType number -> element type. Quantised tensors keep their integer storage type.
ELEMENTS: dict[int, ElementType] = {
    number: ElementType(name, number, itemsize)
    for number, name, itemsize in (
        (pb.DATA_TYPE_INT8, "int8", 1),
        (pb.DATA_TYPE_INT16, "int16", 2),
        (pb.DATA_TYPE_INT32, "int32", 4),
        (pb.DATA_TYPE_INT64, "int64", 8),
        (pb.DATA_TYPE_UINT8, "uint8", 1),
        (pb.DATA_TYPE_UINT16, "uint16", 2),
        (pb.DATA_TYPE_UINT32, "uint32", 4),
        (pb.DATA_TYPE_UINT64, "uint64", 8),
        (pb.DATA_TYPE_FLOAT16, "float16", 2),
        (pb.DATA_TYPE_FLOAT32, "float32", 4),
        (pb.DATA_TYPE_FLOAT64, "float64", 8),
        (pb.DATA_TYPE_BOOL, "bool", 1),
    )
}
_BY_NAME = {element.name: element for element in ELEMENTS.values()}

#: The largest tensor: QNN's size field is a u32 (qnn.h: client buffer data size).
MAX_TENSOR_BYTES = 2**32 - 1
#: Dimensions of one tensor; QNN's own graphs stay far below.
MAX_RANK = 32


def element_type(number: int) -> ElementType:
    """The element type of a proto DataType number.

    Raises:
        Unsupported: reason DTYPE.
    """
    try:
        return ELEMENTS[number]
    except KeyError:
        raise Unsupported(f"data type number {number} is not known", reason="DTYPE") from None


def named_element(dtype: "str | ElementType | np.dtype[Any]") -> ElementType:
    """The element type of that name; also of a numpy dtype, which has the same names.

    Raises:
        Unsupported: reason DTYPE.
    """
    try:
        return _BY_NAME[str(dtype)]
    except KeyError:
        raise Unsupported(f"dtype {dtype} is not one of {names()}", reason="DTYPE") from None


def dtype_number(dtype: object) -> int:
    """The proto DataType number of a numpy dtype, or of anything that numpy takes for one.

    Raises:
        Unsupported: reason DTYPE.
    """
    import numpy as np

    return named_element(np.dtype(dtype)).number  # type: ignore[call-overload]


def numpy_dtype(number: int) -> "np.dtype[np.generic]":
    """The numpy dtype of a proto DataType number.

    Raises:
        Unsupported: reason DTYPE.
    """
    import numpy as np

    return np.dtype(element_type(number).name)


def names() -> str:
    """The dtypes we take, for messages."""
    return ", ".join(_BY_NAME)


@dataclass(frozen=True, slots=True)
class Quantization:
    """real = (stored + offset) * scale, per tensor (axis None) or per index of `axis`.

    `encoding` is the QNN encoding number; encodings without scales here carry empty tuples.
    """

    scales: tuple[float, ...]
    offsets: tuple[int, ...]
    axis: int | None = None
    encoding: int = 0

    def to_proto(self) -> pb.Quantization:
        return pb.Quantization(
            axis=-1 if self.axis is None else self.axis,
            scales=self.scales,
            offsets=self.offsets,
            encoding=self.encoding,
        )

    @classmethod
    def from_proto(cls, m: pb.Quantization) -> "Quantization":
        axis = None if m.axis < 0 else m.axis
        return cls(tuple(m.scales), tuple(m.offsets), axis, m.encoding)


@dataclass(frozen=True, slots=True, init=False)
class TensorSpec:
    """Name, dtype, shape (no dynamic dimensions), quantisation and byte size of a tensor.

    Raises:
        InvalidRequest: a dimension that is no u32, or more than MAX_RANK of them.
        Unsupported: more than MAX_TENSOR_BYTES, or reason DTYPE.
    """

    name: str
    element: ElementType
    shape: tuple[int, ...]
    quantization: Quantization | None
    size_bytes: int

    def __init__(
        self,
        name: str,
        dtype: "str | ElementType | np.dtype[Any]",
        shape: tuple[int, ...],
        quantization: Quantization | None = None,
    ) -> None:
        if len(shape) > MAX_RANK:
            raise InvalidRequest(
                f"tensor {name!r} has {len(shape)} dimensions; {MAX_RANK} are allowed"
            )
        # Plain ints: numpy's own would overflow in the product below, silently.
        shape = tuple(operator.index(d) for d in shape)
        if any(not 0 <= d < 2**32 for d in shape):
            raise InvalidRequest(f"tensor {name!r} has the impossible shape {shape}")
        element = named_element(dtype)
        size = math.prod(shape) * element.itemsize
        if size > MAX_TENSOR_BYTES:
            raise Unsupported(
                f"tensor {name!r} needs {size} bytes; QNN takes {MAX_TENSOR_BYTES} at most"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "element", element)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "quantization", quantization)
        object.__setattr__(self, "size_bytes", size)

    @property
    def dtype(self) -> "np.dtype[np.generic]":
        """The numpy dtype of its elements."""
        return numpy_dtype(self.element.number)

    def to_proto(self) -> pb.TensorSpec:
        m = pb.TensorSpec(
            name=self.name,
            dtype=self.element.number,  # type: ignore[arg-type]
            shape=self.shape,
            size_bytes=self.size_bytes,
        )
        if self.quantization is not None:
            m.quantization.CopyFrom(self.quantization.to_proto())
        return m

    @classmethod
    def from_proto(cls, m: pb.TensorSpec) -> "TensorSpec":
        quantization = (
            Quantization.from_proto(m.quantization) if m.HasField("quantization") else None
        )
        return cls(m.name, element_type(m.dtype), tuple(m.shape), quantization)

    def __str__(self) -> str:
        return f"{self.name}: {self.element}{list(self.shape)}"
