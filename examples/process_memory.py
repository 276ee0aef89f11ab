# SPDX-License-Identifier: Apache-2.0
"""How much memory processes take, shared pages counted by share."""

from pathlib import Path


def pss_bytes(pid: int) -> int:
    """Proportional set size: a page that n processes map counts 1/n in each.

    Raises:
        OSError: no such process, or not ours to look at.
        ValueError: the kernel does not say.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no Pss in smaps_rollup")


def with_descendants(pid: int) -> list[int]:
    """The process and everything it started that still runs."""
    found = [pid]
    for parent in found:  # grows while it is walked
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
