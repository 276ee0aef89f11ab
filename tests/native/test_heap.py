# SPDX-License-Identifier: Apache-2.0
"""Giving back what the allocator keeps of freed memory."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from qnnbroker.native import heap

ALLOCATOR = """
import ctypes
from qnnbroker.native import heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
"""

MIDDLE = """
blocks = [libc.malloc(100_000) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
kept = blocks.pop()  # at the end of the heap: what is below cannot be given back by itself
for block in blocks:
    libc.free(block)
before = resident()
print(heap.trim(), before - resident() > 15_000_000)
libc.free(kept)
"""


THREADS = """
import sys, threading
SIZE, THREADS = 6 << 20, 8
met = threading.Barrier(THREADS)

def work():
    libc.free(libc.malloc(SIZE))
    met.wait()  # no two of them on the same heap
    for _ in range(3):
        block = libc.malloc(SIZE)
        ctypes.memset(block, 1, SIZE)
        met.wait()
        libc.free(block)

print(sys.argv[1] == "as it is" or heap.keep_below(1 << 20))
before = resident()
threads = [threading.Thread(target=work) for _ in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resident() - before > 3 * SIZE)
"""

glibc_only = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "libasan" in Path("/proc/self/maps").read_text(),
    reason="another allocator than glibc's",
)


def printed(program: str, *arguments: str) -> list[str]:
    """The words that it printed, in a process of its own: what was freed before does not count."""
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATOR + program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


@glibc_only
def test_freed_memory_in_the_middle_of_the_heap_goes_back_to_the_system() -> None:
    assert printed(MIDDLE) == ["True", "True"]


@glibc_only
@pytest.mark.parametrize("how", ["as it is", "told"])
def test_large_freed_blocks_are_kept_for_no_thread_when_told_so(how: str) -> None:
    assert printed(THREADS, how) == ["True", str(how == "as it is")]


@pytest.mark.parametrize("size_bytes", [-1, 4095, (16 << 20) + 1])
def test_what_may_be_kept_has_limits(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"found {size_bytes}"):
        heap.keep_below(size_bytes)
