# SPDX-License-Identifier: Apache-2.0
"""Regions against tensors: exactly what fits is let through."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qnnbroker.broker.bindings import CheckedRegion, RegionRef, check_overlap, check_region
from qnnbroker.protos.errors import InvalidRequest, NotFound
from qnnbroker.protos.tensors import TensorSpec

SIZE = 8192
U64 = st.integers(0, 2**64 - 1)
NEAR = st.one_of(
    U64, st.integers(0, SIZE + 64), st.integers(2**64 - SIZE, 2**64 - 1), st.just(2**32)
)


class OneBuffer:
    """What check_region needs of a buffer table: one buffer of SIZE bytes with the id 7."""

    buffer_id, size_bytes, region = 7, SIZE, bytearray(SIZE)

    def get(self, id: int) -> Any:
        if id != self.buffer_id:
            raise NotFound("no such buffer", reason="BUFFER_UNKNOWN")
        return self


BUFFERS: Any = OneBuffer()
SPECS = st.builds(
    TensorSpec,
    st.just("t"),
    st.sampled_from([np.dtype(d) for d in ("uint8", "float16", "float32", "int64")]),
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
)


@given(SPECS, NEAR, st.one_of(NEAR, st.none()))
def test_a_region_is_taken_when_and_only_when_it_holds_its_tensor(
    spec: TensorSpec, offset: int, size: int | None
) -> None:
    size = spec.size_bytes if size is None else size
    fits = (
        size == spec.size_bytes
        and offset + size <= SIZE  # numbers of Python do not wrap
        and offset % spec.dtype.itemsize == 0
    )
    ref = RegionRef(7, offset, size)
    if fits:
        checked = check_region("input", spec, ref, BUFFERS)
        assert (checked.offset_bytes, checked.span[2]) == (offset, spec.size_bytes)
    else:
        with pytest.raises(InvalidRequest):
            check_region("input", spec, ref, BUFFERS)


def region(buffer: Any, start: int, length: int) -> CheckedRegion:
    return CheckedRegion(TensorSpec("t", np.dtype("uint8"), (length,)), buffer, start)


PLACES = st.lists(
    st.tuples(st.sampled_from([0, 1]), st.integers(0, 40), st.integers(1, 9)), max_size=4
)


@given(PLACES, PLACES)
def test_an_output_shares_no_byte_with_anything_else(
    inputs: Sequence[tuple[int, int, int]], outputs: Sequence[tuple[int, int, int]]
) -> None:
    buffers = [OneBuffer(), OneBuffer()]

    def regions(places: Sequence[tuple[int, int, int]]) -> list[CheckedRegion]:
        return [region(buffers[b], start, length) for b, start, length in places]

    def bytes_of(place: tuple[int, int, int]) -> set[tuple[int, int]]:
        return {(place[0], n) for n in range(place[1], place[1] + place[2])}

    everything = [*inputs, *outputs]
    shared = any(
        bytes_of(output) & bytes_of(other)
        for i, output in enumerate(outputs)
        for j, other in enumerate(everything)
        if j != len(inputs) + i
    )
    if shared:
        with pytest.raises(InvalidRequest) as refused:
            check_overlap(regions(inputs), regions(outputs))
        assert refused.value.reason == "OVERLAP"
    else:
        check_overlap(regions(inputs), regions(outputs))
