# SPDX-License-Identifier: Apache-2.0
"""Giving back what the allocator keeps of freed memory."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes
from qnnbroker.native import heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
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


@pytest.mark.skipif(
    "libasan" in Path("/proc/self/maps").read_text(), reason="another allocator is in its place"
)
def test_freed_memory_in_the_middle_of_the_heap_goes_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["True", "True"]
