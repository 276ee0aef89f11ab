# SPDX-License-Identifier: Apache-2.0
"""A mapped file that is about to change: another with the same bytes takes its place."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from qnnbroker.native.region import Region

pytestmark = pytest.mark.usefixtures("no_leaks")

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def files(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two files with the same bytes, open for reading."""
    fds = []
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(CONTENT)
        fds.append(os.open(tmp_path / name, os.O_RDONLY))
    yield fds[0], fds[1]
    for fd in fds:
        os.close(fd)


def test_views_see_the_other_file_at_the_same_addresses(
    files: tuple[int, int], tmp_path: Path
) -> None:
    with Region.map_file(files[0]) as region:
        view, address = memoryview(region), region.address
        region.move_to(files[1])
        os.truncate(tmp_path / "one", 0)
        assert region.address == address
        assert bytes(view) == CONTENT
        assert os.readlink(f"/proc/self/fd/{region.fileno()}").endswith("two")
        view.release()


def test_what_cannot_be_moved_stays(files: tuple[int, int], tmp_path: Path) -> None:
    with Region.map_file(files[0], 100) as region:
        with pytest.raises(ValueError, match="starts at a page"):
            region.move_to(files[1])
        assert bytes(memoryview(region)) == CONTENT[100:]
    with Region.create(100) as memory, pytest.raises(ValueError, match="only a read-only"):
        memory.move_to(files[1])
    os.truncate(tmp_path / "two", 5000)
    with Region.map_file(files[0]) as region:
        with pytest.raises(ValueError, match="has 5000 bytes"):
            region.move_to(files[1])
        with pytest.raises(OSError, match="duplicated"):
            region.move_to(-1)
        assert bytes(memoryview(region)) == CONTENT
    with pytest.raises(ValueError, match="closed"):
        region.move_to(files[1])
