# SPDX-License-Identifier: Apache-2.0
"""tensors: specs survive the wire, and byte sizes come from shape and dtype alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qnnbroker.protos.errors import InvalidRequest, Unsupported
from qnnbroker.protos.tensors import (
    ELEMENTS,
    MAX_RANK,
    MAX_TENSOR_BYTES,
    Quantization,
    TensorSpec,
    dtype_number,
    names,
    numpy_dtype,
)
from qnnbroker.v1 import types_pb2 as pb

FLOAT = np.dtype(np.float32)
NUMPY = {number: np.dtype(element.name) for number, element in ELEMENTS.items()}
I32 = st.integers(-(2**31), 2**31 - 1)
QUANTIZATIONS = st.builds(
    Quantization,
    scales=st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(tuple),
    offsets=st.lists(I32, max_size=4).map(tuple),
    axis=st.none() | st.integers(0, 31),
    encoding=st.integers(0, 2**32 - 1),
)
SHAPES = st.lists(st.integers(0, 40), max_size=5).map(tuple)


@given(st.text(), st.sampled_from(list(NUMPY.values())), SHAPES, st.none() | QUANTIZATIONS)
def test_a_spec_comes_back_from_the_wire(
    name: str,
    dtype: "np.dtype[np.generic]",
    shape: tuple[int, ...],
    quantization: Quantization | None,
) -> None:
    spec = TensorSpec(name, dtype, shape, quantization)
    data = spec.to_proto().SerializeToString()
    again = TensorSpec.from_proto(pb.TensorSpec.FromString(data))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.size_bytes == np.zeros(shape, dtype).nbytes


def test_element_types_have_the_sizes_and_names_that_numpy_gives_them() -> None:
    for element in ELEMENTS.values():
        assert np.dtype(element.name).itemsize == element.itemsize
        assert str(np.dtype(element.name)) == element.name


def test_every_data_type_of_the_proto_has_a_numpy_dtype_and_back() -> None:
    numbers = set(pb.DataType.values()) - {pb.DATA_TYPE_UNSPECIFIED}
    assert set(NUMPY) == numbers
    for number in numbers:
        assert dtype_number(numpy_dtype(number)) == number
        proto_name = pb.DataType.Name(number).removeprefix("DATA_TYPE_").lower()
        assert numpy_dtype(number).name == proto_name
        assert proto_name in names()


@pytest.mark.parametrize(
    ("given_as", "number"),
    [
        ("float32", pb.DATA_TYPE_FLOAT32),
        (np.float16, pb.DATA_TYPE_FLOAT16),
        (np.longlong, pb.DATA_TYPE_INT64),
        ("<i4", pb.DATA_TYPE_INT32),
        (bool, pb.DATA_TYPE_BOOL),
    ],
)
def test_a_dtype_may_be_given_as_numpy_takes_it(given_as: object, number: int) -> None:
    assert dtype_number(given_as) == number


@pytest.mark.parametrize("dtype", [">f4", "complex64", "U4", "datetime64[s]", object])
def test_a_dtype_that_no_tensor_has_is_refused_with_those_that_are_taken(dtype: object) -> None:
    with pytest.raises(Unsupported, match="is not one of int8, int16") as caught:
        dtype_number(dtype)
    assert caught.value.reason == "DTYPE"


@pytest.mark.parametrize("number", [0, 13, -1, 2**31 - 1])
def test_an_unknown_data_type_number_is_refused(number: int) -> None:
    with pytest.raises(Unsupported, match=f"number {number} is not known"):
        numpy_dtype(number)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=MAX_RANK))
def test_a_size_is_exact_or_refused_however_large(shape: list[int]) -> None:
    exact = math.prod(shape) * 4
    if exact <= MAX_TENSOR_BYTES:
        assert TensorSpec("t", FLOAT, tuple(shape)).size_bytes == exact
    else:
        with pytest.raises(Unsupported, match=f"needs {exact} bytes"):
            TensorSpec("t", FLOAT, tuple(shape))


def test_the_largest_tensor_is_taken_and_one_more_byte_is_not() -> None:
    byte = np.dtype(np.uint8)
    assert TensorSpec("t", byte, (MAX_TENSOR_BYTES,)).size_bytes == MAX_TENSOR_BYTES
    with pytest.raises(Unsupported):
        TensorSpec("t", byte, (2, 2**31))


def test_a_shape_of_numpy_integers_does_not_overflow() -> None:
    dims = (np.int64(2**31), np.int64(2**31), np.int64(4))
    with pytest.raises(Unsupported, match=f"needs {2**66} bytes"):
        TensorSpec("t", FLOAT, dims)  # type: ignore[arg-type]
    spec = TensorSpec("t", FLOAT, (np.int32(2), np.uint8(3)))  # type: ignore[arg-type]
    assert spec == TensorSpec("t", FLOAT, (2, 3))
    assert [type(d) for d in spec.shape] == [int, int]


@pytest.mark.parametrize("shape", [(-1,), (2**32,), (1, -(2**40))])
def test_a_dimension_that_is_no_u32_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="impossible shape"):
        TensorSpec("t", FLOAT, shape)


def test_a_shape_of_absurd_length_is_refused_before_it_is_multiplied() -> None:
    message = pb.TensorSpec(name="t", dtype=pb.DATA_TYPE_UINT8, shape=[2**32 - 1] * 200_000)
    with pytest.raises(InvalidRequest, match=f"200000 dimensions; {MAX_RANK} are allowed"):
        TensorSpec.from_proto(message)


def test_a_size_in_the_message_is_not_believed() -> None:
    message = TensorSpec("t", FLOAT, (2, 3)).to_proto()
    message.size_bytes = 4
    assert TensorSpec.from_proto(message).size_bytes == 24


def test_a_scalar_is_one_element() -> None:
    spec = TensorSpec("t", FLOAT, ())
    assert spec.size_bytes == 4
    assert str(TensorSpec("image", FLOAT, (1, 3))) == "image: float32[1, 3]"


def test_per_tensor_and_axis_zero_are_told_apart() -> None:
    for axis in (None, 0, 3):
        quantization = Quantization((0.5,), (-128,), axis)
        assert Quantization.from_proto(quantization.to_proto()) == quantization
