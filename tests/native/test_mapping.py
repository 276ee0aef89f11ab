# SPDX-License-Identifier: Apache-2.0
"""Making and adopting shared memory and file ranges: what is checked, what is refused."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qnnbroker.native.counters import live_counts
from qnnbroker.native.region import Region

PAGE = mmap.PAGESIZE
# Not all of them are in the fcntl module of every Python.
ADD_SEALS, GET_SEALS = 1033, 1034
SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 1, 2, 4, 8, 16


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """The fds and mappings after each test are those before it."""
    before = sorted(os.listdir("/proc/self/fd")), live_counts()["regions"]
    yield
    gc.collect()
    assert (sorted(os.listdir("/proc/self/fd")), live_counts()["regions"]) == before


def sealed(size: int, seals: int = SHRINK | GROW) -> int:
    """A memfd made by hand."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("wanted", "rounded"), [(1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (150_528, 37 * PAGE)]
)
def test_a_new_region_is_whole_pages_of_zeros(wanted: int, rounded: int) -> None:
    with Region.create(wanted) as region:
        assert region.size_bytes == rounded
        assert region.writable
        assert bytes(region.view(0, region.size_bytes)) == bytes(rounded)


def test_a_new_region_is_sealed_allocated_and_close_on_exec() -> None:
    with Region.create(3 * PAGE) as region:
        fd = region.fileno()
        assert fcntl.fcntl(fd, GET_SEALS) == SHRINK | GROW | SEAL
        assert os.fstat(fd).st_blocks * 512 == 3 * PAGE
        assert not os.get_inheritable(fd)
        for size in (PAGE, 4 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, ADD_SEALS, WRITE)


@pytest.mark.parametrize("size", [0, -1, -(2**70), 2**40 + 1, 2**62, 2**64, 2**200])
def test_a_size_that_makes_no_sense_is_a_value_error(size: int) -> None:
    with pytest.raises(ValueError, match="size of a region must be"):
        Region.create(size)


def test_more_memory_than_the_machine_has_is_refused_before_it_is_tried() -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    with pytest.raises(OSError, match=f"{memory + PAGE} bytes; this machine has {memory}") as info:
        Region.create(memory + 1)
    assert info.value.errno == errno.ENOSPC


def test_a_size_that_is_no_integer_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Region.create(1.5)  # type: ignore[arg-type]


def test_a_region_is_not_made_by_calling_the_class() -> None:
    with pytest.raises(TypeError, match=r"Region\.create"):
        Region()


def test_a_region_is_not_pickled() -> None:
    with Region.create(1) as region, pytest.raises(TypeError, match="pickled"):
        pickle.dumps(region)


def test_two_mappings_of_one_fd_see_the_same_bytes() -> None:
    with Region.create(PAGE) as ours, Region.from_fd(ours.fileno()) as theirs:
        ours.view(10, 5)[:] = b"hello"
        assert bytes(theirs.view(10, 5)) == b"hello"
        assert ours.address != theirs.address
        assert ours.fileno() != theirs.fileno()


def test_only_the_maker_writes_when_others_may_not() -> None:
    with Region.create(PAGE, others_write=False) as ours:
        assert fcntl.fcntl(ours.fileno(), GET_SEALS) & FUTURE_WRITE
        with pytest.raises(ValueError, match="sealed against writing"):
            Region.from_fd(ours.fileno())
        with pytest.raises(PermissionError):
            mmap.mmap(ours.fileno(), PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with Region.from_fd(ours.fileno(), writable=False) as theirs:
            ours.view(0, 2)[:] = b"ok"
            assert bytes(theirs.view(0, 2)) == b"ok"


def test_a_fork_shares_the_memory_and_closes_for_itself() -> None:
    program = (
        "import os, sys; from qnnbroker.native.region import Region\n"
        "r = Region.create(1)\n"
        "if (pid := os.fork()) == 0:\n"
        "    r.view(0, 5)[:] = b'child'; r.close(); os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
        "assert bytes(r.view(0, 5)) == b'child'; r.close()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


# --- from_fd


def test_from_fd_takes_its_own_duplicate() -> None:
    fd = sealed(PAGE)
    region = Region.from_fd(fd, size_bytes=100)
    os.close(fd)
    assert region.size_bytes == PAGE
    assert not os.get_inheritable(region.fileno())
    region.close()


@pytest.mark.parametrize("seals", [0, SHRINK, GROW, WRITE])
def test_memory_that_could_change_its_size_is_refused(seals: int) -> None:
    fd = sealed(PAGE, seals)
    with pytest.raises(ValueError, match=f"seals {seals:#x}; at least 0x6"):
        Region.from_fd(fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("size", "wanted", "message"),
    [
        (0, None, "has 0 bytes"),
        (100, None, "has 100 bytes; whole pages"),
        (PAGE, PAGE + 1, f"has {PAGE} bytes; {PAGE + 1} are wanted"),
        (PAGE, -1, "size_bytes must be"),
        (2**50, None, "the size of fd"),
    ],
)
def test_memory_of_a_wrong_size_is_refused(size: int, wanted: int | None, message: str) -> None:
    fd = sealed(size)
    with pytest.raises(ValueError, match=message):
        Region.from_fd(fd, size_bytes=wanted)
    os.close(fd)


def test_files_pipes_directories_and_devices_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    opened = [os.open(p, os.O_RDONLY) for p in (tmp_path / "file", tmp_path, "/dev/zero")]
    opened += os.pipe()
    for fd in opened:
        with pytest.raises(ValueError, match="seals"):
            Region.from_fd(fd)
        os.close(fd)


def test_a_bad_fd_is_an_os_error() -> None:
    for make in (Region.from_fd, Region.map_file):
        with pytest.raises(OSError, match="fd 1000000") as info:
            make(1_000_000)
        assert info.value.errno == errno.EBADF


def test_a_read_only_mapping_gives_read_only_views() -> None:
    with Region.create(1) as ours, Region.from_fd(ours.fileno(), writable=False) as theirs:
        assert not theirs.writable
        assert memoryview(theirs).readonly
        assert not np.frombuffer(memoryview(theirs), np.uint8).flags.writeable
        with pytest.raises(TypeError):
            theirs.view(0, 1)[0] = 1
        with pytest.raises(TypeError, match="read-write"), open("/dev/zero", "rb") as zeros:
            zeros.readinto(theirs)


# --- map_file


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, None), (1, None), (PAGE - 1, 2), (PAGE, PAGE), (2 * PAGE + 7, 1), (0, 1)],
)
def test_any_range_of_a_file_is_mapped_exactly(
    tmp_path: Path, offset: int, size: int | None
) -> None:
    data = np.random.default_rng(1).bytes(3 * PAGE + 5)
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        region = Region.map_file(file.fileno(), offset, size)
    expected = data[offset:] if size is None else data[offset : offset + size]
    assert region.size_bytes == len(expected)
    assert not region.writable
    assert bytes(memoryview(region)) == expected
    assert ctypes.string_at(region.address, region.size_bytes) == expected
    region.close()


@pytest.mark.parametrize(
    ("offset", "size", "message"),
    [
        (0, 11, "11 bytes from offset 0 leave"),
        (10, None, "an empty range"),
        (11, None, "an empty range"),
        (5, 6, "6 bytes from offset 5 leave"),
        (0, 0, "an empty range"),
        (-1, None, "offset must be"),
        (2**64, None, "offset must be"),
        (2**40, 2**40, "leave fd"),
        (0, -1, "size_bytes must be"),
    ],
)
def test_a_range_that_is_not_in_the_file_is_refused(
    tmp_path: Path, offset: int, size: int | None, message: str
) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with open(tmp_path / "file", "rb") as file, pytest.raises(ValueError, match=message):
        Region.map_file(file.fileno(), offset, size)


def test_only_regular_files_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    fds = [os.open(p, os.O_RDONLY) for p in (tmp_path, "/dev/zero", tmp_path / "empty")]
    fds.append(os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK))
    for fd in fds:
        with pytest.raises(ValueError, match="not a regular file|an empty range"):
            Region.map_file(fd)
        os.close(fd)


def test_a_file_open_for_writing_only_is_a_permission_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"x")
    with pytest.raises(PermissionError):
        Region.map_file(fd)
    os.close(fd)
