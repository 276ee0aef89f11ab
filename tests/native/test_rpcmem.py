# SPDX-License-Identifier: Apache-2.0
"""rpcmem over the stand-in library, new and old; and what DMA buffers are told from."""

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qnnbroker.native.counters import live_counts
from qnnbroker.native.dmabuf import READ, WRITE, begin_access, end_access, is_dma_buf
from qnnbroker.native.fake import fake_qnn_dir
from qnnbroker.native.region import Region
from qnnbroker.native.rpcmem import OLD_MAX_BYTES, RpcMem

NEW = fake_qnn_dir() / "rpcmem" / "libcdsprpc.so"
OLD = fake_qnn_dir() / "rpcmem_old" / "libcdsprpc.so"


def stand_in(path: Path, name: str) -> int:
    function = getattr(ctypes.CDLL(str(path)), name)
    function.restype = ctypes.c_uint64
    return int(function())


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()
    before = live_counts()["rpcmem"], live_counts()["regions"], len(os.listdir("/proc/self/fd"))
    wrong = stand_in(NEW, "fake_cdsprpc_bad_frees")
    yield
    gc.collect()
    after = live_counts()["rpcmem"], live_counts()["regions"], len(os.listdir("/proc/self/fd"))
    assert after == before
    assert stand_in(NEW, "fake_cdsprpc_live") == 0
    assert stand_in(NEW, "fake_cdsprpc_bad_frees") == wrong


@pytest.mark.parametrize("path", [NEW, OLD])
def test_memory_is_a_region_whose_fd_the_library_knows(path: Path) -> None:
    rpcmem = RpcMem(path)
    assert rpcmem.has_alloc2 == (path == NEW)
    with rpcmem.create(5000) as region:
        assert (region.size_bytes, region.writable) == (8192, True)
        to_fd = ctypes.CDLL(str(path)).rpcmem_to_fd
        to_fd.argtypes = [ctypes.c_void_p]
        assert to_fd(region.address) == region.fileno()
        with Region.from_fd(region.fileno()) as other:  # what a client gets
            np.frombuffer(memoryview(region), np.uint8)[:4] = [1, 2, 3, 4]
            assert bytes(other.view(0, 4)) == b"\1\2\3\4"


def test_views_keep_it_and_the_last_one_frees_it() -> None:
    region = RpcMem(NEW).create(4096)
    view = np.frombuffer(memoryview(region), np.uint8)
    with pytest.raises(BufferError, match="1 live view"):
        region.close()
    region.release()
    assert stand_in(NEW, "fake_cdsprpc_live") == 1
    assert view.sum() == 0
    del view
    assert stand_in(NEW, "fake_cdsprpc_live") == 0


def test_two_gigabytes_need_the_new_function() -> None:
    with pytest.raises(OSError, match="at most 2147483647 bytes.*has no rpcmem_alloc2"):
        RpcMem(OLD).create(OLD_MAX_BYTES + 1)


def test_a_library_that_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNBROKER_FAKE_RPCMEM_LIMIT", "8192")
    rpcmem = RpcMem(NEW)
    with rpcmem.create(8192), pytest.raises(OSError, match="4096 bytes of rpcmem"):
        rpcmem.create(4096)
    with rpcmem.create(4096):
        pass
    with pytest.raises(OSError, match="rpcmem"):
        RpcMem(NEW, heap=3).create(4096)


@pytest.mark.parametrize("size", [0, -1, 1 << 50])
def test_sizes_that_make_no_sense_never_reach_the_library(size: int) -> None:
    with pytest.raises(ValueError, match="size of a region"):
        RpcMem(NEW).create(size)


def test_a_library_that_is_not_there_or_is_another() -> None:
    with pytest.raises(FileNotFoundError, match="cannot open shared object"):
        RpcMem("/nowhere/libcdsprpc.so")
    with pytest.raises(OSError, match=r"lacks rpcmem_alloc"):
        RpcMem(fake_qnn_dir() / "libQnnSystem.so")


def test_the_record_tells_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNBROKER_FAKE_RPCMEM", str(tmp_path / "calls"))
    RpcMem(NEW).create(4096).close()
    free = ctypes.CDLL(str(OLD)).rpcmem_free
    free.argtypes = [ctypes.c_void_p]
    free(4096)
    lines = [line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert lines == ["alloc", "free", "bad_free"]


def test_a_memfd_is_no_dma_buffer() -> None:
    with Region.create(4096) as region:
        assert not is_dma_buf(region.fileno())
        with pytest.raises(ValueError, match="not a DMA buffer"):
            Region.from_dma_buf(region.fileno())
        for call in (begin_access, end_access):
            with pytest.raises(OSError, match="DMA buffer"):
                call(region.fileno(), READ | WRITE)
