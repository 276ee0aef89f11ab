# SPDX-License-Identifier: Apache-2.0
"""Model files: opened without harm, told apart by identity, hashed once."""

import asyncio
import hashlib
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qnnbroker.broker import files
from qnnbroker.broker.files import HashCache, ModelFile
from qnnbroker.protos.errors import BrokerError, InvalidRequest, NotAllowed, NotFound

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(range(256)) * 64)
    return path


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.fspath(path)[-100:])


def make_empty(path: Path) -> None:
    path.touch()


def make_directory(path: Path) -> None:
    path.mkdir()


def make_nothing(path: Path) -> None:
    pass


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "error", "reason", "says"),
    [
        (make_nothing, NotFound, "FILE_MISSING", "no file"),
        (make_link_to_nothing, NotFound, "FILE_MISSING", "no file"),
        (make_directory, InvalidRequest, "BAD_FILE", "a directory"),
        (make_fifo, InvalidRequest, "BAD_FILE", "a FIFO"),
        (make_socket, InvalidRequest, "BAD_FILE", "cannot open"),
        (make_device, InvalidRequest, "BAD_FILE", "a device"),
        (make_empty, InvalidRequest, "BAD_FILE", "empty"),
        (make_loop, InvalidRequest, "BAD_FILE", "cannot open"),
    ],
)
def test_what_is_no_model_file_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    error: type[BrokerError],
    reason: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("thing"))
    with pytest.raises(error, match=says) as refused:
        ModelFile.open(Path("thing"))
    assert refused.value.reason == reason
    assert "thing" in str(refused.value)


def test_a_part_of_the_path_that_is_a_file_means_no_file(model: Path) -> None:
    with pytest.raises(NotFound):
        ModelFile.open(model / "below")


@pytest.mark.parametrize("path", ["with\0nul", "x" * 5000])
def test_an_impossible_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ModelFile.open(Path("/") / path)
    assert refused.value.reason == "BAD_FILE"


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_we_may_not_read_is_not_allowed(model: Path) -> None:
    model.chmod(0)
    with pytest.raises(NotAllowed) as refused:
        ModelFile.open(model)
    assert refused.value.reason == "FILE_UNREADABLE"


def test_a_range_is_all_that_is_read_and_mapped(model: Path) -> None:
    content = model.read_bytes()
    with ModelFile.open(model) as file:
        assert file.size_bytes == len(content)
        file.narrow(4097, 1000)
        assert file.size_bytes == 1000
        assert file.read(0, 5000) == content[4097:5097]
        assert file.read(990, 100) == content[5087:5097]
        assert file.read(1000, 1) == b""
        with file.map() as region:
            assert bytes(memoryview(region)) == content[4097:5097]
            assert not region.writable


def test_a_duplicate_outlives_the_original(model: Path) -> None:
    file = ModelFile.open(model)
    file.narrow(1, 2)
    with file.duplicate() as other:
        file.close()
        file.close()
        assert other.read(0, 9) == b"\1\2"


def replace(path: Path) -> None:
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").rename(path)


def rewrite(path: Path) -> None:
    with open(path, "r+b") as f:
        f.write(b"other")


def grow(path: Path) -> None:
    with open(path, "ab") as f:
        f.write(b"more")


def shrink(path: Path) -> None:
    os.truncate(path, 10)


def test_a_file_that_is_replaced_is_still_what_was_opened(model: Path) -> None:
    content = model.read_bytes()
    with ModelFile.open(model) as file:
        replace(model)
        file.check_unchanged()
        assert file.read(0, len(content)) == content


@pytest.mark.parametrize("change", [rewrite, grow, shrink])
def test_a_change_since_it_was_opened_is_seen(model: Path, change: Callable[[Path], None]) -> None:
    os.utime(model, ns=(1, 1))
    with ModelFile.open(model) as file:
        file.check_unchanged()
        before = file.identity
        # A change within one tick of the kernel's clock may leave the times as they were.
        while (now := os.fstat(file.fd)).st_ctime_ns == before.ctime_ns:
            change(model)
        assert now.st_ctime_ns != before.ctime_ns
        with pytest.raises(InvalidRequest, match="was changed"):
            file.check_unchanged()


def test_a_file_that_shrank_is_not_mapped(model: Path) -> None:
    with ModelFile.open(model) as file:
        os.truncate(model, 0)
        with pytest.raises(InvalidRequest, match="cannot map"):
            file.map()


# --- hashes


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def nothing(done: int, total: int) -> None:
    pass


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file had been written long ago."""
    monkeypatch.setattr(files, "SETTLED_NS", -(10**18))


@pytest.mark.usefixtures("settled")
def test_a_file_is_hashed_once_and_progress_is_told(
    model: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CHUNK_BYTES", 4000)
    monkeypatch.setattr(files, "PIECE_BYTES", 4000)
    told: list[tuple[int, int]] = []

    async def work() -> None:
        cache = HashCache(threads)
        with ModelFile.open(model) as file:
            digest = await cache.sha256(file, lambda *p: told.append(p))
            await asyncio.sleep(0)
            assert digest == hashlib.sha256(model.read_bytes()).hexdigest()
            steps = list(told)
            assert steps == [(min(n * 4000, 16384), 16384) for n in range(1, 6)]
            assert await cache.sha256(file, lambda *p: told.append(p)) == digest
            assert told[len(steps) :] == [(16384, 16384)]
            assert cache.hashed_bytes == 16384

    run(work)


@pytest.mark.usefixtures("settled")
def test_ranges_of_one_file_have_hashes_of_their_own(
    model: Path, threads: ThreadPoolExecutor
) -> None:
    async def work() -> None:
        cache = HashCache(threads)
        digests = []
        for offset, length in [(0, 300), (1, 300), (0, 301)]:
            with ModelFile.open(model) as file:
                file.narrow(offset, length)
                digests.append(await cache.sha256(file, nothing))
                part = model.read_bytes()[offset : offset + length]
                assert digests[-1] == hashlib.sha256(part).hexdigest()
        assert len(set(digests)) == 3

    run(work)


def test_equal_requests_are_one_and_a_cancelled_one_leaves_the_others(
    model: Path, threads: ThreadPoolExecutor
) -> None:
    async def work() -> None:
        cache = HashCache(threads)
        go = threading.Event()
        stalled = [threads.submit(go.wait) for _ in range(2)]  # every thread of the pool
        with ModelFile.open(model) as file:
            waiters = [asyncio.create_task(cache.sha256(file, nothing)) for _ in range(3)]
            await asyncio.sleep(0)
            waiters[0].cancel()
            await asyncio.sleep(0)
            go.set()
            results = await asyncio.gather(*waiters, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [hashlib.sha256(model.read_bytes()).hexdigest()] * 2
        assert cache.hashed_bytes == 16384
        assert all(s.result() for s in stalled)

    run(work)


def test_a_file_rewritten_right_away_gets_its_new_hash(
    model: Path, threads: ThreadPoolExecutor
) -> None:
    async def work() -> None:
        cache = HashCache(threads)
        for round in range(200):
            content = round.to_bytes(4, "little") * 1000
            model.write_bytes(content)
            with ModelFile.open(model) as file:
                assert await cache.sha256(file, nothing) == hashlib.sha256(content).hexdigest()

    run(work)


def test_a_change_while_it_is_hashed_is_an_error_and_not_remembered(
    model: Path, threads: ThreadPoolExecutor
) -> None:
    async def work() -> None:
        cache = HashCache(threads)
        with ModelFile.open(model) as file:
            grow(model)
            with pytest.raises(InvalidRequest, match="was changed"):
                await cache.sha256(file, nothing)
        with ModelFile.open(model) as file:
            assert (
                await cache.sha256(file, nothing) == hashlib.sha256(model.read_bytes()).hexdigest()
            )

    run(work)


@pytest.mark.usefixtures("settled")
def test_the_oldest_hash_is_forgotten_first(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HashCache, "MAX_ENTRIES", 2)

    async def work() -> None:
        cache = HashCache(threads)

        async def hashed(name: str) -> int:
            before = cache.hashed_bytes
            with ModelFile.open(tmp_path / name) as file:
                await cache.sha256(file, nothing)
            return cache.hashed_bytes - before

        for name in "abc":
            (tmp_path / name).write_bytes(name.encode())
            assert await hashed(name) == 1
        assert [await hashed(n) for n in "cb"] == [0, 0]
        assert await hashed("a") == 1

    run(work)
