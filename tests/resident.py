# SPDX-License-Identifier: Apache-2.0
"""What a process has in memory: of a file that it has mapped, and of no file."""

from pathlib import Path


def resident_bytes(pid: int | str, file: Path, *, writable: bool) -> int:
    """Bytes in memory of the mappings of a file that may be written, or of those that may not."""
    found, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # START-END PERMISSIONS OFFSET DEVICE INODE PATH
            counts = words[-1] == str(file) and ("w" in words[1]) == writable
        elif counts and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def anonymous_kib(pid: int) -> int:
    """KiB of memory of no file: heap, stacks, written parts of libraries."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError
