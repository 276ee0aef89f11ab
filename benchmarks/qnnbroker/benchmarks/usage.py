# SPDX-License-Identifier: Apache-2.0
"""What processes use: memory, shared pages counted by share, and CPU time."""

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True)
class Memory:
    """Of one process, in bytes.

    `pss_bytes`: a page that n processes map counts 1/n. `private_bytes`: pages that nobody else
    maps.
    """

    pss_bytes: int
    private_bytes: int


def memory(pid: int) -> Memory:
    """Of that process.

    Raises:
        ProcessLookupError: no such process, or it has ended and only waits to be collected.
        OSError: not ours to look at.
    """
    try:
        _, *lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ValueError) as error:
        raise ProcessLookupError(f"process {pid} has no memory; it has ended") from error
    fields = {}
    for line in lines:
        key, value, *_ = line.replace(":", " ").split()
        fields[key] = int(value) * 1024
    return Memory(fields["Pss"], fields["Private_Clean"] + fields["Private_Dirty"])


def total_pss(pids: Iterable[int]) -> int:
    """All of them together, in bytes; one that has ended takes none."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += memory(pid).pss_bytes
    return total


def with_descendants(pid: int) -> list[int]:
    """The process and everything it started that still runs.

    Whoever ends while we look may or may not be among them. From /proc/PID/stat, which tells the
    parent at one moment: the lists of children are kept by thread, and move to another thread of
    the parent when theirs ends.
    """
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The name is in brackets and may hold spaces and brackets itself.
            _, _, fields = (process / "stat").read_text().rpartition(")")
            state, parent_pid, *_ = fields.split()
            if state not in "ZX":
                children.setdefault(int(parent_pid), []).append(int(process.name))
    found = [pid]
    for parent in found:  # grows while it is walked
        found += children.get(parent, [])
    return found


@dataclass(frozen=True)
class CpuTime:
    """Of one process since its start, threads that have ended included; ns.

    `own_ns`: its own, exact. `children_ns`: of the children that it waited for, in ticks of the
    kernel (10 ms).
    """

    own_ns: int
    children_ns: int


def cpu_time(pid: int) -> CpuTime:
    """Of that process.

    Raises:
        OSError: no such process.
    """
    _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    ticks = sum(map(int, fields.split()[13:15]))
    # How the kernel names the CPU clock of another process.
    own = time.clock_gettime_ns(~pid << 3 | 2)
    return CpuTime(own, ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK"))


def cpu_ns(pids: Iterable[int]) -> int:
    """What these processes have used themselves so far; one that has ended counts no more."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += cpu_time(pid).own_ns
    return total
