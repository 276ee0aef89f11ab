# SPDX-License-Identifier: Apache-2.0
"""TensorSpec and DataType: proto <-> Python <-> numpy dtype <-> byte size.

Byte sizes are derived here, from shape and dtype, and nowhere else.
"""

import math
import operator
from dataclasses import dataclass, field

import numpy as np

from qnnbroker.v1 import types_pb2 as pb

from .errors import InvalidRequest, Unsupported

#: proto DataType number -> numpy dtype. Quantised tensors keep their integer storage type.
NUMPY: dict[int, np.dtype] = {
    pb.DATA_TYPE_INT8: np.dtype(np.int8),
    pb.DATA_TYPE_INT16: np.dtype(np.int16),
    pb.DATA_TYPE_INT32: np.dtype(np.int32),
    pb.DATA_TYPE_INT64: np.dtype(np.int64),
    pb.DATA_TYPE_UINT8: np.dtype(np.uint8),
    pb.DATA_TYPE_UINT16: np.dtype(np.uint16),
    pb.DATA_TYPE_UINT32: np.dtype(np.uint32),
    pb.DATA_TYPE_UINT64: np.dtype(np.uint64),
    pb.DATA_TYPE_FLOAT16: np.dtype(np.float16),
    pb.DATA_TYPE_FLOAT32: np.dtype(np.float32),
    pb.DATA_TYPE_FLOAT64: np.dtype(np.float64),
    pb.DATA_TYPE_BOOL: np.dtype(np.bool_),
}
_NUMBER = {dtype: number for number, dtype in NUMPY.items()}

#: The largest tensor: QNN's size field is a u32 (qnn.h: client buffer data size).
MAX_TENSOR_BYTES = 2**32 - 1
#: Dimensions of one tensor; QNN's own graphs stay far below.
MAX_RANK = 32


def dtype_number(dtype: object) -> int:
    """The proto DataType number of a numpy dtype.

    Raises:
        Unsupported: reason DTYPE.
    """
    wanted = np.dtype(dtype)  # type: ignore[call-overload]
    try:
        return _NUMBER[wanted]
    except KeyError:
        raise Unsupported(f"dtype {wanted} is not one of {names()}", reason="DTYPE") from None


def numpy_dtype(number: int) -> "np.dtype[np.generic]":
    """The numpy dtype of a proto DataType number.

    Raises:
        Unsupported: reason DTYPE.
    """
    try:
        return NUMPY[number]
    except KeyError:
        raise Unsupported(f"data type number {number} is not known", reason="DTYPE") from None


def names() -> str:
    """The dtypes we take, for messages."""
    return ", ".join(str(d) for d in NUMPY.values())


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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype, shape (no dynamic dimensions), quantisation and byte size of a tensor.

    Raises:
        InvalidRequest: a dimension that is no u32, or more than MAX_RANK of them.
        Unsupported: more than MAX_TENSOR_BYTES.
    """

    name: str
    dtype: "np.dtype[np.generic]"
    shape: tuple[int, ...]
    quantization: Quantization | None = None
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_RANK:
            raise InvalidRequest(
                f"tensor {self.name!r} has {len(self.shape)} dimensions; {MAX_RANK} are allowed"
            )
        # Plain ints: numpy's own would overflow in the product below, silently.
        object.__setattr__(self, "shape", tuple(operator.index(d) for d in self.shape))
        if any(not 0 <= d < 2**32 for d in self.shape):
            raise InvalidRequest(f"tensor {self.name!r} has the impossible shape {self.shape}")
        size = math.prod(self.shape) * self.dtype.itemsize
        if size > MAX_TENSOR_BYTES:
            raise Unsupported(
                f"tensor {self.name!r} needs {size} bytes; QNN takes {MAX_TENSOR_BYTES} at most"
            )
        object.__setattr__(self, "size_bytes", size)

    def to_proto(self) -> pb.TensorSpec:
        m = pb.TensorSpec(
            name=self.name,
            dtype=dtype_number(self.dtype),  # type: ignore[arg-type]
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
        return cls(m.name, numpy_dtype(m.dtype), tuple(m.shape), quantization)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"
