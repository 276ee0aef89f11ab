# SPDX-License-Identifier: Apache-2.0
"""Opening, identifying and hashing what a client names as a model file."""

import asyncio
import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from qnnbroker.native.region import Region
from qnnbroker.protos.errors import InvalidRequest, NotAllowed, NotFound, SubmissionCancelled

#: Bytes hashed between two progress reports.
CHUNK_BYTES = 8 * 1024 * 1024
#: Read at a time: a buffer that stays in the cache is twice as fast as a large one, and leaves
#: nothing behind in the heap.
PIECE_BYTES = 256 * 1024
#: Read at a time where only a few bytes here and there are wanted.
WINDOW_BYTES = 4096
#: A file that changed less than this ago could change again with the times staying the same, since
#: the kernel stamps them with its tick (4 to 10 ms).
SETTLED_NS = 100_000_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one version of a file from another without reading it, and the range meant."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    offset: int = 0
    length: int = -1

    @property
    def content(self) -> "FileIdentity":
        """The same without what changes with the file's names, too."""
        return replace(self, ctime_ns=0)


class ModelFile:
    """A range of a regular file, opened read-only. Close it, or use it as a context manager.

    The range is the whole file unless `narrow` chose one (a binary embedded in its wrapper).
    """

    def __init__(self, path: Path, fd: int, identity: FileIdentity) -> None:
        self.path = path
        self.fd = fd
        self.identity = identity
        #: False when somebody else has the same open file description.
        self.own = True

    def narrow(self, offset: int, length: int) -> None:
        """From now on only `length` bytes from `offset` are meant; the caller checked the range."""
        self.identity = replace(self.identity, offset=offset, length=length)

    def duplicate(self) -> "ModelFile":
        """The same file and range with an fd of its own."""
        copy = ModelFile(self.path, os.dup(self.fd), self.identity)
        self.own = copy.own = False
        return copy

    def map(self) -> Region:
        """The range, mapped read-only.

        Raises:
            InvalidRequest: reason BAD_FILE; it shrank, or cannot be mapped.
        """
        try:
            return Region.map_file(self.fd, self.identity.offset, self.size_bytes)
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"cannot map {str(self.path)!r}: {error}", reason="BAD_FILE"
            ) from error

    @classmethod
    def open(cls, path: Path) -> "ModelFile":
        """Opens `path` without ever blocking on it (FIFOs) or following it into a device.

        Raises:
            NotFound: reason FILE_MISSING.
            NotAllowed: reason FILE_UNREADABLE.
            InvalidRequest: reason BAD_FILE; a directory, a FIFO, a device, empty.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"there is no file {str(path)!r}", reason="FILE_MISSING") from error
        except PermissionError as error:
            raise NotAllowed(
                f"the broker may not read {str(path)!r}", reason="FILE_UNREADABLE"
            ) from error
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"cannot open {str(path)!r}: {error}", reason="BAD_FILE"
            ) from error
        try:
            identity = cls._identify(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, identity)

    @classmethod
    def adopt(cls, path: Path, fd: int, *, own: bool = True) -> "ModelFile":
        """The file that somebody opened as `path`. The fd is ours from now on, also after an error.

        Raises:
            NotAllowed: reason FILE_UNREADABLE; it is not open for reading.
            InvalidRequest: reason BAD_FILE; as `open`.
        """
        try:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
                raise NotAllowed(
                    f"the descriptor of {str(path)!r} is not open for reading",
                    reason="FILE_UNREADABLE",
                )
            file = cls(path, fd, cls._identify(path, fd))
        except BaseException:
            os.close(fd)
            raise
        file.own = own
        return file

    @staticmethod
    def _identify(path: Path, fd: int) -> FileIdentity:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            kinds = {
                stat.S_IFDIR: "a directory",
                stat.S_IFIFO: "a FIFO",
                stat.S_IFSOCK: "a socket",
                stat.S_IFCHR: "a device",
                stat.S_IFBLK: "a device",
            }
            kind = kinds.get(stat.S_IFMT(info.st_mode), "something else")
            raise InvalidRequest(f"a model file wanted, {str(path)!r} is {kind}", reason="BAD_FILE")
        if info.st_size == 0:
            raise InvalidRequest(f"the file {str(path)!r} is empty", reason="BAD_FILE")
        return FileIdentity(
            info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
        )

    @property
    def size_bytes(self) -> int:
        """Length of the range."""
        return self.identity.size_bytes if self.identity.length < 0 else self.identity.length

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset` of the range; b"" at its end."""
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        try:
            return os.pread(self.fd, length, self.identity.offset + offset)
        except OSError as error:
            raise InvalidRequest(
                f"cannot read {str(self.path)!r}: {error.strerror}", reason="BAD_FILE"
            ) from error

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """All of the range: (offset, bytes), the bytes good until the next piece. Blocks.

        Raises:
            InvalidRequest: reason BAD_FILE; it cannot be read. A file that shrank just ends early.
        """
        done, buffer = 0, bytearray(min(PIECE_BYTES, self.size_bytes))
        view = memoryview(buffer)
        while left := min(len(buffer), self.size_bytes - done):
            try:
                count = os.preadv(self.fd, [view[:left]], self.identity.offset + done)
            except OSError as error:
                raise InvalidRequest(
                    f"cannot read {str(self.path)!r}: {error.strerror}", reason="BAD_FILE"
                ) from error
            if not count:
                return
            yield done, view[:count]
            done += count

    def hash_unheld(self) -> str:
        """Hex digest of the range, of a file that nobody holds. Reads it all: blocks.

        Raises:
            InvalidRequest: reason BAD_FILE; it was written since it was opened.
        """
        digest = hashlib.sha256()
        for _, piece in self.pieces():
            digest.update(piece)
        self.check_unchanged()
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Refuses when the file was written since it was opened.

        Raises:
            InvalidRequest: reason BAD_FILE.
        """
        if self.look().content != self.identity.content:
            raise self.changed()

    def look(self) -> FileIdentity:
        """What the file is now, of the range that is meant."""
        now = self._identify(self.path, self.fd)
        return replace(now, offset=self.identity.offset, length=self.identity.length)

    def changed(self) -> InvalidRequest:
        """The error for a file that is no longer what it was."""
        return InvalidRequest(
            f"{str(self.path)!r} was changed while it was loaded", reason="BAD_FILE"
        )

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "ModelFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class FileBytes:
    """A file's bytes by index and slice, read as they are asked for, a window at a time.

    For looking around in a file of gigabytes that nobody holds: one that shrinks or is written
    meanwhile is an exception, not a signal. Threads: any, one at a time.

    Raises:
        InvalidRequest: reason BAD_FILE; it cannot be read, or is shorter than it was.
    """

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._start, self._window = 0, b""

    def __len__(self) -> int:
        return self._file.size_bytes

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...

    def __getitem__(self, at: int | slice, /) -> int | bytes:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            return self._bytes(start, max(0, stop - start))
        return self._bytes(at, 1)[0]

    def _bytes(self, start: int, length: int) -> bytes:
        offset = start - self._start
        if offset < 0 or offset + length > len(self._window):
            self._window = self._file.read(start, max(length, WINDOW_BYTES))
            self._start, offset = start, 0
            if len(self._window) < length:
                raise self._file.changed()
        return self._window[offset : offset + length]


@dataclass
class _Hashing:
    """A hash under way, and how many wait for it."""

    task: "asyncio.Task[str]"
    given_up: threading.Event
    waiters: int = 0


class HashCache:
    """sha256 of files, remembered by identity; equal requests under way are one.

    A file that has just been written is not remembered: its identity may not tell a next version.
    """

    #: Identities remembered; the oldest goes.
    MAX_ENTRIES = 1024

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._known: dict[FileIdentity, str] = {}
        self._under_way: dict[FileIdentity, _Hashing] = {}
        self.hashed_bytes = 0

    @property
    def threads(self) -> Executor:
        """Where hashing runs."""
        return self._threads

    def known(self, identity: FileIdentity) -> str:
        """The hash of that version of a file, if it was remembered; else ""."""
        return self._known.get(identity, "")

    def remember(self, identity: FileIdentity, digest: str) -> None:
        """For later; the oldest is forgotten when there are too many."""
        if len(self._known) >= self.MAX_ENTRIES:
            del self._known[next(iter(self._known))]
        self._known[identity] = digest

    async def sha256(self, file: ModelFile, progress: Progress) -> str:
        """Hex digest of the file's content. The file may be closed while it is computed."""
        identity = file.identity
        if known := self._known.get(identity):
            progress(file.size_bytes, file.size_bytes)
            return known
        hashing = self._under_way.get(identity)
        if hashing is None:
            given_up = threading.Event()
            task = asyncio.create_task(self._hash(file.duplicate(), progress, given_up))
            hashing = self._under_way[identity] = _Hashing(task, given_up)
            task.add_done_callback(lambda done: self._ended(identity, done))
        hashing.waiters += 1
        try:
            # One waiter's cancellation is not the others'.
            return await asyncio.shield(hashing.task)
        finally:
            hashing.waiters -= 1
            if not hashing.waiters and not hashing.task.done():
                hashing.given_up.set()
                del self._under_way[identity]  # who comes now begins anew

    def _ended(self, identity: FileIdentity, task: "asyncio.Task[str]") -> None:
        if not task.cancelled():
            task.exception()  # seen: maybe nobody waits for it
        found = self._under_way.get(identity)
        if found is not None and found.task is task:
            del self._under_way[identity]

    async def _hash(self, opened: ModelFile, progress: Progress, given_up: threading.Event) -> str:
        loop = asyncio.get_running_loop()
        settled = time.time_ns() - opened.identity.ctime_ns > SETTLED_NS

        def work() -> str:
            digest, told = hashlib.sha256(), 0
            for offset, piece in opened.pieces():
                if given_up.is_set():
                    raise SubmissionCancelled("nobody waits for this load any more")
                digest.update(piece)
                done = offset + len(piece)
                if done - told >= CHUNK_BYTES or done == opened.size_bytes:
                    loop.call_soon_threadsafe(progress, done, opened.size_bytes)
                    told = done
            opened.check_unchanged()
            return digest.hexdigest()

        try:
            result = await loop.run_in_executor(self._threads, work)
        finally:
            opened.close()
        self.hashed_bytes += opened.size_bytes
        if settled:
            self.remember(opened.identity, result)
        return result
