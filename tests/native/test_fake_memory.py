# SPDX-License-Identifier: Apache-2.0
"""Registered memory in the fake library: whose it is, how much of it, and how long."""

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.fake_client import RawFake, Tensor, adder, pointer
from tests.waiting import wait_until

from qnnbroker.native.fake import binary_bytes

OK, BAD_TENSOR, PAGE = 0, 6004, 4096
FLOAT32, INT32 = 0x0232, 0x0032


class Shared:
    """A memfd, and our own view of it."""

    def __init__(self, size: int = PAGE) -> None:
        self.fd = os.memfd_create("buffer", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self.floats = np.frombuffer(mmap.mmap(self.fd, size), np.float32)

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def raw(tmp_path: Path) -> RawFake:
    return RawFake(tmp_path / "fake", "mem_register=on").open()


@pytest.fixture
def shared() -> Iterator[Shared]:
    memory = Shared()
    yield memory
    memory.close()


def descriptor(
    keep: list[Any],
    fd: int,
    *,
    offset: int = 0,
    total: int = PAGE,
    dims: tuple[int, ...] = (4,),
    dtype: int = FLOAT32,
    memory_type: int = 2,
    htp_type: int = 1,
    rank: int | None = None,
) -> bytes:
    """One memory descriptor; what it points at is put into `keep`."""
    shape = (ctypes.c_uint32 * max(len(dims), 1))(*dims)
    custom = ctypes.create_string_buffer(struct.pack("<IxxxxQixxxxQ", htp_type, total, fd, offset))
    keep.extend([shape, custom])
    head = struct.pack(
        "<IxxxxQQII",
        len(dims) if rank is None else rank,
        ctypes.addressof(shape),
        0,
        dtype,
        memory_type,
    )
    if memory_type == 2:
        return head + struct.pack("<QQ", ctypes.addressof(custom), 0)
    return head + struct.pack("<iIQ", fd, 0, 0)


def register(raw: RawFake, context: int, fd: int, **how: Any) -> tuple[int, int]:
    """(code, handle)"""
    keep: list[Any] = []
    handle = ctypes.c_void_p()
    data = ctypes.create_string_buffer(descriptor(keep, fd, **how), 48)
    code = raw.core(35, pointer(context), data, ctypes.c_uint32(1), ctypes.pointer(handle))
    return code, handle.value or 0


def deregister(raw: RawFake, *handles: int) -> int:
    array = (ctypes.c_void_p * len(handles))(*handles)
    return raw.core(36, array, ctypes.c_uint32(len(handles)))


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings_of(fd: int) -> int:
    inode = str(os.fstat(fd).st_ino)
    return sum(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_is_off_by_default(tmp_path: Path, shared: Shared) -> None:
    raw = RawFake(tmp_path / "fake").open()
    context = raw.context(binary_bytes([adder()]))
    assert register(raw, context, shared.fd)[0] == 1000
    assert deregister(raw, 1) == 1000


@pytest.mark.parametrize("memory_type", [1, 2])
def test_an_execute_works_in_the_registered_memory(
    raw: RawFake, shared: Shared, memory_type: int
) -> None:
    context = raw.context(binary_bytes([adder()]))
    graph = raw.graph(context, "add")
    if memory_type == 1:  # one tensor for each fd
        others = [shared, Shared(), Shared()]
        places = [(other, 0) for other in others]
    else:
        others = []
        places = [(shared, 0), (shared, 64), (shared, 128)]
    handles = []
    for memory, offset in places:
        code, handle = register(raw, context, memory.fd, offset=offset, memory_type=memory_type)
        assert code == OK
        handles.append(handle)
    views = [memory.floats[offset // 4 :][:4] for memory, offset in places]
    views[0][:], views[1][:] = [1, 2, 3, 4], 10
    inputs = [Tensor(1, handle=handles[0]), Tensor(2, handle=handles[1])]
    assert raw.execute(graph, inputs, [Tensor(3, handle=handles[2])]) == OK
    assert views[2].tolist() == [11, 12, 13, 14]
    assert deregister(raw, *handles) == OK
    assert raw.execute(graph, inputs, [Tensor(3, handle=handles[2])]) == BAD_TENSOR
    for other in others[1:]:
        other.close()
    assert raw.free_context(context) == OK
    assert raw.errors() == []


def test_registered_and_raw_tensors_mix(raw: RawFake, shared: Shared) -> None:
    context = raw.context(binary_bytes([adder()]))
    _, handle = register(raw, context, shared.fd, offset=32)
    shared.floats[8:12] = 5
    other, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    inputs = [Tensor(1, handle=handle), Tensor(2, other)]
    assert raw.execute(raw.graph(context, "add"), inputs, [Tensor(3, out)]) == OK
    assert out.tolist() == [6, 6, 6, 6]
    assert deregister(raw, handle) == OK


def test_the_callers_fd_may_be_closed(raw: RawFake) -> None:
    context = raw.context(binary_bytes([adder()]))
    memory = Shared()
    _, handle = register(raw, context, memory.fd)
    memory.close()
    memory.floats[:4] = 3
    ones, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    inputs = [Tensor(1, handle=handle), Tensor(2, ones)]
    assert raw.execute(raw.graph(context, "add"), inputs, [Tensor(3, out)]) == OK
    assert out.tolist() == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"total": 2 * PAGE}, 8003),
        ({"total": 0}, 8000),
        ({"offset": PAGE}, 8004),
        ({"offset": PAGE - 15}, 8004),
        ({"offset": (1 << 64) - 8}, 8004),
        ({"dims": (1025,)}, 8004),
        ({"dims": ()}, 8004),
        ({"dims": (4, 0)}, 8004),
        ({"dims": (65536, 65536, 65536)}, 8004),
        ({"rank": 9}, 8004),
        ({"dtype": 0x9999}, 8000),
        ({"memory_type": 3}, 8005),
        ({"memory_type": 0}, 8005),
        ({"htp_type": 0}, 8005),
        ({"memory_type": 1, "dims": (1025,)}, 8003),
    ],
)
def test_what_does_not_fit_is_refused(
    raw: RawFake, shared: Shared, how: dict[str, Any], code: int
) -> None:
    context = raw.context(binary_bytes([adder()]))
    fds = open_fds()
    assert register(raw, context, shared.fd, **how) == (code, 0)
    assert open_fds() == fds
    assert register(raw, context, shared.fd, offset=PAGE - 16)[0] == OK


def test_an_fd_that_is_none_is_refused(raw: RawFake, shared: Shared) -> None:
    context = raw.context(binary_bytes([adder()]))
    assert register(raw, context, -1)[0] == 8000
    assert register(raw, 99, shared.fd)[0] == 5002
    with open("/proc/self/exe", "rb") as only_readable:
        assert register(raw, context, only_readable.fileno())[0] == 8003


def test_several_are_registered_together_or_not_at_all(raw: RawFake, shared: Shared) -> None:
    context = raw.context(binary_bytes([adder()]))
    keep: list[Any] = []
    good = descriptor(keep, shared.fd)
    bad = descriptor(keep, shared.fd, offset=PAGE)
    handles = (ctypes.c_void_p * 3)()
    mapped, fds = mappings_of(shared.fd), open_fds()

    def code(*descriptors: bytes) -> int:
        data = ctypes.create_string_buffer(b"".join(descriptors), 48 * len(descriptors))
        return raw.core(35, pointer(context), data, ctypes.c_uint32(len(descriptors)), handles)

    assert code(good, good, bad) == 8004
    assert (mappings_of(shared.fd), open_fds()) == (mapped, fds)
    assert code(good, good, good) == OK
    assert mappings_of(shared.fd) == mapped + 3
    assert deregister(raw, *(handle or 0 for handle in handles)) == OK
    assert (mappings_of(shared.fd), open_fds()) == (mapped, fds)
    assert deregister(raw, handles[0] or 0) == 8001


def test_a_handle_is_of_one_context_type_and_shape(raw: RawFake, shared: Shared) -> None:
    first, second = (raw.context(binary_bytes([adder()])) for _ in range(2))
    ones, out = np.ones(4, np.float32), np.zeros(4, np.float32)

    def code(handle: int) -> int:
        inputs = [Tensor(1, handle=handle), Tensor(2, ones)]
        return raw.execute(raw.graph(first, "add"), inputs, [Tensor(3, out)])

    handles = [
        register(raw, first, shared.fd)[1],
        register(raw, second, shared.fd)[1],
        register(raw, first, shared.fd, dtype=INT32)[1],
        register(raw, first, shared.fd, dims=(2, 2))[1],
        register(raw, first, shared.fd, dims=(8,))[1],
    ]
    assert [code(handle) for handle in handles] == [OK, *[BAD_TENSOR] * 4]
    assert code(77) == BAD_TENSOR
    assert deregister(raw, *handles) == OK


def test_a_context_that_goes_takes_its_registrations_along(raw: RawFake, shared: Shared) -> None:
    mapped, fds = mappings_of(shared.fd), open_fds()
    first, second = (raw.context(binary_bytes([adder()])) for _ in range(2))
    _, handle = register(raw, first, shared.fd)
    _, kept = register(raw, second, shared.fd)
    assert raw.free_context(first) == OK
    assert raw.errors() == ["registration_leak"]
    assert deregister(raw, handle) == 8001
    assert deregister(raw, kept) == OK
    assert (mappings_of(shared.fd), open_fds()) == (mapped, fds)


def test_deregistering_waits_for_the_execute_and_is_recorded(raw: RawFake, shared: Shared) -> None:
    raw.control("hang=graphExecute:1")
    context = raw.context(binary_bytes([adder()]))
    _, handle = register(raw, context, shared.fd)
    graph = raw.graph(context, "add")
    ones, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    results: dict[str, int] = {}

    def execute() -> None:
        inputs = [Tensor(1, handle=handle), Tensor(2, ones)]
        results["execute"] = raw.execute(graph, inputs, [Tensor(3, out)])

    def remove() -> None:
        results["remove"] = deregister(raw, handle)

    threads = [threading.Thread(target=execute)]
    threads[0].start()
    raw.wait_faults(1)
    threads.append(threading.Thread(target=remove))
    threads[1].start()
    wait_until(lambda: raw.errors() == ["deregistered_in_use"], "the fake says so")
    assert results == {}
    raw.control("unhang")
    for thread in threads:
        thread.join(20)
    assert results == {"execute": OK, "remove": OK}


def test_a_restart_voids_registrations(raw: RawFake, shared: Shared) -> None:
    mapped = mappings_of(shared.fd)
    context = raw.context(binary_bytes([adder()]))
    _, handle = register(raw, context, shared.fd)
    raw.control("restart")
    assert mappings_of(shared.fd) == mapped
    assert register(raw, context, shared.fd)[0] == 1007
    assert register(raw, context, shared.fd)[0] == 5002
    assert deregister(raw, handle) == 8001
    assert raw.free_context(context) == 5002
    assert raw.errors() == []


def test_a_registration_can_be_made_to_fail(raw: RawFake, shared: Shared) -> None:
    context = raw.context(binary_bytes([adder()]))
    raw.control("fail=memRegister:2:8003", "fail=memDeRegister:1:8001")
    assert register(raw, context, shared.fd)[0] == OK
    assert register(raw, context, shared.fd)[0] == 8003
    assert deregister(raw, 1) == 8001
    assert deregister(raw, 1) == OK
