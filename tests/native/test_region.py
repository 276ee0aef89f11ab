# SPDX-License-Identifier: Apache-2.0
"""Region: views, and that none outlives the mapping; the checked span."""

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qnnbroker.native.counters import live_counts
from qnnbroker.native.region import Region, span_ok

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """The fds and mappings after each test are those before it."""
    before = sorted(os.listdir("/proc/self/fd")), live_counts()["regions"]
    yield
    gc.collect()
    assert (sorted(os.listdir("/proc/self/fd")), live_counts()["regions"]) == before


def is_mapped(address: int) -> bool:
    """Whether the kernel knows the page at `address`."""
    vector = (ctypes.c_ubyte * 1)()
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), vector) == 0)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, PAGE + 1), (PAGE, 1), (PAGE + 1, 0), (-1, 1), (0, -1), (1, 2**64 - 1), (2**64, 0)],
)
def test_a_view_that_leaves_the_region_is_refused(offset: int, length: int) -> None:
    with Region.create(PAGE) as region, pytest.raises(ValueError, match="leave a region"):
        region.view(offset, length)


def test_views_at_the_edges_are_fine() -> None:
    with Region.create(PAGE) as region:
        assert region.view(PAGE - 1, 1).nbytes == 1
        assert region.view(PAGE, 0).nbytes == 0


def test_a_region_with_a_live_view_refuses_to_close_and_stays_good() -> None:
    region = Region.create(PAGE)
    view = region.view(0, 4)
    assert region.exports == 1
    with pytest.raises(BufferError, match="1 live view"):
        region.close()
    view[:] = b"fine"
    view.release()
    assert region.exports == 0
    region.close()
    region.close()
    assert region.closed


def by_frombuffer(region: Region) -> "np.ndarray[Any, Any]":
    return np.frombuffer(region, np.float32)[8:16].reshape(2, 4)  # type: ignore[call-overload,no-any-return]


def by_ndarray(region: Region) -> "np.ndarray[Any, Any]":
    """numpy keeps no export here, only the `obj` of the view."""
    return np.ndarray((2, 4), np.float32, buffer=memoryview(region)[4:])


def by_array_interface(region: Region) -> "np.ndarray[Any, Any]":
    return np.asarray(memoryview(region)).view(np.float32)[:8].reshape(2, 4)


MAKERS = pytest.mark.parametrize("make", [by_frombuffer, by_ndarray, by_array_interface])


@MAKERS
def test_no_array_outlives_the_mapping_of_a_region_that_is_gone(
    make: Callable[[Region], "np.ndarray[Any, Any]"],
) -> None:
    region = Region.create(PAGE)
    address = region.address
    array = make(region)
    region.release()
    del region
    gc.collect()
    array[:] = 3.5  # would crash had it been unmapped
    assert array.sum() == 28
    assert is_mapped(address)
    del array
    assert not is_mapped(address)


@MAKERS
def test_a_region_refuses_to_close_under_any_kind_of_array(
    make: Callable[[Region], "np.ndarray[Any, Any]"],
) -> None:
    region = Region.create(PAGE)
    array = make(region)
    with pytest.raises(BufferError, match="live view"):
        region.close()
    array[:] = 1
    del array
    region.close()


def test_numpy_may_not_take_the_bare_address_of_a_region() -> None:
    """`np.ndarray(buffer=region)` would keep the Region, which may be closed, and no view."""
    with Region.create(PAGE) as region, pytest.raises(BufferError, match="memoryview"):
        np.ndarray(4, np.float32, buffer=region)  # type: ignore[arg-type]


def test_a_forgotten_region_warns_but_leaves_its_views_their_memory() -> None:
    region = Region.create(PAGE)
    array = by_ndarray(region)
    with pytest.warns(ResourceWarning, match="never closed"):
        del region
    array[:] = 2


def test_a_released_region_goes_with_its_last_view() -> None:
    region = Region.create(PAGE)
    address, fd = region.address, region.fileno()
    first, second = np.frombuffer(memoryview(region), np.uint8), region.view(0, 1)
    region.release()
    region.release()
    assert not region.closed
    for refused in (lambda: memoryview(region), lambda: region.view(0, 1), region.fileno):
        with pytest.raises(ValueError, match="released"):
            refused()
    first[0] = 7
    assert second[0] == 7
    del first
    assert not region.closed
    second.release()
    assert region.closed
    assert not is_mapped(address)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_released_region_may_still_be_closed_without_views() -> None:
    region = Region.create(1)
    region.release()
    assert region.closed
    region.close()


def test_a_closed_region_refuses_everything_but_its_size() -> None:
    region = Region.create(1)
    region.close()
    for refused in (
        lambda: memoryview(region),
        lambda: region.view(0, 0),
        lambda: region.address,
        region.fileno,
        region.__enter__,
    ):
        with pytest.raises(ValueError, match="closed"):
            refused()
    assert region.size_bytes == PAGE
    assert "closed" in repr(region)


def test_an_error_inside_with_is_not_hidden_by_a_view_in_its_traceback() -> None:
    region = Region.create(1)
    kept: list[memoryview] = []

    def fail() -> None:
        kept.append(region.view(0, 1))
        raise RuntimeError("the cause")

    with pytest.raises(RuntimeError, match="the cause"), region:
        fail()
    assert not region.closed
    kept.pop().release()
    assert region.closed


def test_a_forgotten_region_warns_and_is_freed() -> None:
    region = Region.create(1)
    with pytest.warns(ResourceWarning, match="never closed: <Region 4096 bytes"):
        del region


def test_regions_are_counted() -> None:
    before = live_counts()["regions"]
    with Region.create(1):
        assert live_counts()["regions"] == before + 1
    assert live_counts()["regions"] == before


# --- the checked span


EDGES = st.one_of(
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, 1, PAGE, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64]),
)


@given(total=EDGES, offset=EDGES, length=EDGES)
def test_a_span_is_accepted_exactly_when_it_lies_inside(
    total: int, offset: int, length: int
) -> None:
    inside = 0 <= offset and 0 <= length and offset + length <= total < 2**64
    assert span_ok(total, offset, length) == inside


@given(st.data())
def test_spans_that_lie_inside_are_accepted(data: st.DataObject) -> None:
    total = data.draw(st.integers(0, 2**64 - 1))
    offset = data.draw(st.integers(0, total))
    length = data.draw(st.integers(0, total - offset))
    assert span_ok(total, offset, length)
    assert not span_ok(total, offset, total - offset + 1)
