# SPDX-License-Identifier: Apache-2.0
"""What processes use: memory, shared pages counted by share, and CPU time."""

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
        OSError: no such process, or not ours to look at.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        key, value, *_ = line.replace(":", " ").split()
        fields[key] = int(value) * 1024
    return Memory(fields["Pss"], fields["Private_Clean"] + fields["Private_Dirty"])


def total_pss_mib(pids: Iterable[int]) -> float:
    """All of them together, in MiB."""
    return sum(memory(pid).pss_bytes for pid in pids) / MIB


def with_descendants(pid: int) -> list[int]:
    """The process and everything it started that still runs."""
    found = [pid]
    for parent in found:  # grows while it is walked
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """CPU time that all threads of these processes have used so far, to the ns.

    Threads that have ended do not count.
    """
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total
