# SPDX-License-Identifier: Apache-2.0
"""Files that stay as they are: leases where they are to be had, sealed copies elsewhere."""

import asyncio
import contextlib
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.broker import leases, steady
from qnnbroker.broker.files import HashCache, ModelFile
from qnnbroker.broker.leases import FileLease, LeaseRefused, file_system_of
from qnnbroker.broker.steady import SteadyFile, content_hash
from qnnbroker.protos.errors import InvalidRequest, NotAllowed

pytestmark = pytest.mark.usefixtures("no_leaks")

CONTENT = bytes(range(256)) * 200
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def held(path: Path) -> Iterator[SteadyFile]:
    with SteadyFile(ModelFile.open(path)) as file:
        yield file


@contextlib.contextmanager
def writing(path: Path, change: Callable[[Path], object]) -> Iterator[threading.Thread]:
    """Somebody who wants to change the file, and gets to it when it is let go."""
    writer = threading.Thread(target=change, args=(path,))
    writer.start()
    yield writer
    writer.join(PATIENCE_SECONDS)
    assert not writer.is_alive()


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def rewrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"x" * 4096)


def content_of(file: SteadyFile) -> bytes:
    with file.map() as region:
        return bytes(region.view(0, region.size_bytes))


@pytest.mark.parametrize("change", [truncate, rewrite])
def test_a_lease_holds_back_who_would_change_the_file(
    path: Path, held: SteadyFile, change: Callable[[Path], object]
) -> None:
    assert held.hold()
    assert not held.copied
    with writing(path, change) as writer:
        wait_until(lambda: not held.safe, "somebody waits to write")
        assert writer.is_alive()
        assert content_of(held) == CONTENT
        held.settle(keep=False)


def test_a_lease_that_the_kernel_took_is_not_held_and_can_be_let_go(
    path: Path, held: SteadyFile
) -> None:
    assert held.hold()
    # What the kernel does when somebody has waited for longer than lease-break-time.
    fcntl.fcntl(held.file.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    assert not held.safe
    held.ensure(DIGEST)
    assert held.copied
    path.write_bytes(b"something else")
    assert content_of(held) == CONTENT


def test_a_lease_is_of_the_file_whatever_its_names(path: Path, held: SteadyFile) -> None:
    other = path.with_name("hard link")
    other.hardlink_to(path)
    path.unlink()
    assert held.hold()
    with writing(other, truncate):
        wait_until(lambda: not held.safe, "somebody waits to write")
        assert content_of(held) == CONTENT
        held.settle(keep=False)


def test_a_range_of_a_file_that_was_written_since_is_refused(path: Path) -> None:
    file = ModelFile.open(path)
    file.narrow(100, 333)
    path.write_bytes(CONTENT + b"more")
    with SteadyFile(file) as held, pytest.raises(InvalidRequest, match="was changed"):
        held.hold()
    with SteadyFile(ModelFile.open(path)) as held:
        assert held.hold()


def test_what_a_writer_was_held_back_from_is_loaded_from_a_copy(
    path: Path, held: SteadyFile
) -> None:
    assert held.hold()
    with writing(path, truncate):
        wait_until(lambda: not held.safe, "somebody waits to write")
        held.ensure(DIGEST)  # and lets the writer go on
        assert held.copied
        wait_until(lambda: path.stat().st_size == 0, "it is truncated")
        assert content_of(held) == CONTENT


def test_a_copy_of_something_else_is_refused(path: Path, held: SteadyFile) -> None:
    with pytest.raises(InvalidRequest, match="changed while it was loaded"):
        held.ensure("0" * 64)


def open_for_writing(path: Path) -> contextlib.AbstractContextManager[object]:
    return open(path, "r+b")


@contextlib.contextmanager
def mapped_for_writing(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, len(CONTENT)) as memory:
        os.close(fd)
        yield
        memory[:1] = b"x"


@pytest.mark.parametrize("writer", [open_for_writing, mapped_for_writing])
def test_a_file_that_is_being_written_is_copied_and_the_copy_is_sealed(
    path: Path,
    held: SteadyFile,
    writer: Callable[[Path], contextlib.AbstractContextManager[object]],
) -> None:
    with writer(path):
        assert not held.hold()
        assert held.copy() == DIGEST
    path.write_bytes(b"")
    assert content_of(held) == CONTENT
    seals = fcntl.fcntl(held.file.fd, fcntl.F_GET_SEALS)
    assert seals == (
        fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    )
    with pytest.raises(OSError, match="Operation not permitted"):
        os.truncate(f"/proc/self/fd/{held.file.fd}", 0)


def test_only_the_range_that_is_meant_is_copied(path: Path) -> None:
    file = ModelFile.open(path)
    file.narrow(100, 333)
    with SteadyFile(file) as held:
        assert held.copy() == hashlib.sha256(CONTENT[100:433]).hexdigest()
        assert content_of(held) == CONTENT[100:433]


def test_a_settled_copy_gives_its_memory_back_and_keeps_the_file(held: SteadyFile) -> None:
    held.copy()
    assert "memfd:" in os.readlink(f"/proc/self/fd/{held.file.fd}")
    held.settle(keep=True)
    assert held.copied
    held.settle(keep=False)
    assert not held.copied
    assert os.readlink(f"/proc/self/fd/{held.file.fd}").endswith("model.bin")


def test_it_closes_with_its_last_holder(held: SteadyFile) -> None:
    other = held.share()
    assert held.hold()
    other.close()
    assert held.safe


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOCAL_FILE_SYSTEMS", frozenset[str]()), ("break_seconds", lambda: 5)],
)
def test_a_lease_that_proves_nothing_is_not_taken(
    held: SteadyFile, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(leases, name, value)
    with pytest.raises(LeaseRefused):
        FileLease(held.file.fd)
    assert not held.hold()


def test_the_file_system_of_an_open_file_is_known(held: SteadyFile) -> None:
    assert file_system_of(held.file.fd) not in ("", "proc")
    with open("/proc/self/maps") as maps:
        assert file_system_of(maps.fileno()) == "proc"
    assert file_system_of(10**6) == ""


def test_a_description_that_somebody_else_has_too_is_not_relied_on(path: Path) -> None:
    theirs = os.open(path, os.O_RDONLY)
    with SteadyFile(ModelFile.adopt(path, os.dup(theirs), own=False)) as held:
        assert held.hold()
        with pytest.raises(BlockingIOError):  # they have none
            fcntl.fcntl(theirs, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        assert held.safe
    os.close(theirs)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_PATH])
def test_a_descriptor_that_cannot_be_read_is_not_adopted(path: Path, flags: int) -> None:
    with pytest.raises(NotAllowed, match="not open for reading"):
        ModelFile.adopt(path, os.open(path, flags))


def run_hash(
    held: SteadyFile, hashes: HashCache, resident: Callable[[str], bool] = lambda _: False
) -> str:
    async def work() -> str:
        return await content_hash(held, hashes, lambda done, total: None, resident)

    return asyncio.run(work())


def test_anothers_file_that_is_resident_is_known_by_its_times(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise LeaseRefused("another user's", owner_only=True)

    monkeypatch.setattr(steady, "FileLease", refuse)
    monkeypatch.setattr(steady, "QUIET_NS", -(10**18))
    with ThreadPoolExecutor(1) as threads:
        hashes = HashCache(threads)
        for resident, copied in ((False, True), (False, True), (True, False)):
            with SteadyFile(ModelFile.open(path)) as held:
                assert run_hash(held, hashes, lambda _, yes=resident: yes) == DIGEST  # type: ignore[misc]
                assert held.copied is copied


def test_a_file_that_changes_while_it_is_hashed_is_hashed_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qnnbroker.broker.files.PIECE_BYTES", 1000)
    with ThreadPoolExecutor(1) as threads, SteadyFile(ModelFile.open(path)) as held:
        reads: list[threading.Thread] = []
        plain = ModelFile.pieces

        def pieces(self: ModelFile) -> Iterator[tuple[int, memoryview]]:
            for offset, piece in plain(self):
                if offset == 2000 and not reads:
                    reads.append(threading.Thread(target=truncate, args=(path,)))
                    reads[0].start()
                    wait_until(lambda: not held.safe, "somebody waits to write")
                yield offset, piece

        monkeypatch.setattr(ModelFile, "pieces", pieces)
        assert run_hash(held, HashCache(threads)) == DIGEST
        assert held.copied
        assert content_of(held) == CONTENT
        reads[0].join(PATIENCE_SECONDS)
        assert path.stat().st_size == 0


@pytest.mark.parametrize("change", [truncate, rewrite])
def test_a_file_that_nobody_can_hold_and_that_changes_while_it_is_copied_harms_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    """Cut short it is refused; what was written into it makes it another model, hashed as such."""
    monkeypatch.setattr(leases, "LOCAL_FILE_SYSTEMS", frozenset[str]())
    monkeypatch.setattr("qnnbroker.broker.files.PIECE_BYTES", 1000)
    plain = ModelFile.pieces

    def pieces(self: ModelFile) -> Iterator[tuple[int, memoryview]]:
        for offset, piece in plain(self):
            if offset == 2000:
                change(path)
            yield offset, piece

    monkeypatch.setattr(ModelFile, "pieces", pieces)
    with ThreadPoolExecutor(1) as threads, SteadyFile(ModelFile.open(path)) as held:
        if change is truncate:
            with pytest.raises(InvalidRequest, match="was changed"):
                run_hash(held, HashCache(threads))
            assert not held.copied
        else:
            digest = run_hash(held, HashCache(threads))
            assert digest == hashlib.sha256(content_of(held)).hexdigest()
            assert held.copied
