# SPDX-License-Identifier: Apache-2.0
"""SteadyFile: the bytes of a model file, held so that nobody can change or take them meanwhile.

By a lease where one is to be had, which costs nothing; else by a copy in a memfd that is sealed
against everything, ours included. Mapped bytes of a file that somebody truncates are a SIGBUS,
which no process survives; bytes that change between hashing and loading are another model.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qnnbroker.native.region import Region
from qnnbroker.protos.errors import InvalidRequest, LimitExceeded, SubmissionCancelled

from .files import CHUNK_BYTES, FileIdentity, HashCache, ModelFile, Progress
from .leases import FileLease, LeaseRefused, reopen_read_only

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A file without a lease is known by its times only when they are older than this: a mapping that
#: is being written to shows in them no later than the kernel writes its pages back.
QUIET_NS = 60_000_000_000
_ALL_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass
class HoldingCounts:
    """How often files were held, by which means, in this process."""

    leased: int = 0
    copied: int = 0


holding = HoldingCounts()


class SteadyFile:
    """A range of a file, opened, that is to be hashed, parsed and loaded as one and the same bytes.

    Made over a ModelFile, which it takes over. `hold` comes first. It is counted: `share` for
    another holder, `close` by each.

    Threads: any; `hold` and `copy` one at a time, before anybody calls `ensure`.
    """

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        self._original: ModelFile | None = None  # while a copy stands in for it
        self.owner_only = False
        self._lease: FileLease | None = None
        #: The hash of what it was while it was held: (hex digest, identity).
        self.verified: tuple[str, FileIdentity | None] = ("", None)
        #: The bytes that were wanted last could not be had.
        self.gone = False
        self._users = 1
        self._lock = threading.Lock()
        self._ensuring = threading.Lock()

    @property
    def path(self) -> Path:
        """What it was opened as; for people."""
        return self.file.path

    @property
    def size_bytes(self) -> int:
        return self.file.size_bytes

    @property
    def copied(self) -> bool:
        """Whether a copy stands in for the file."""
        return self._original is not None

    def original(self) -> ModelFile:
        """The file itself, also while a copy stands in for it."""
        return self._original or self.file

    @property
    def safe(self) -> bool:
        """Whether the bytes are held now, by lease or by copy."""
        return self.copied or (self._lease is not None and self._lease.held)

    def hold(self) -> bool:
        """Takes the lease, if it is to be had; whether it was. What the file is now is meant.

        Raises:
            InvalidRequest: reason BAD_FILE; a range of it is meant, and it was written since.
        """
        if self.safe:
            return True
        try:
            self._release()
            if not self.file.own:
                fd = reopen_read_only(self.file.fd)
                os.close(self.file.fd)
                self.file.fd, self.file.own = fd, True
            self._lease = FileLease(self.file.fd)
            holding.leased += 1
        except LeaseRefused as refused:
            self.owner_only = refused.owner_only
            log.debug("no lease on %s: %s", self.file.path, refused)
            return False
        except OSError as error:  # the client could read it, we could not
            log.debug("no description of our own of %s: %s", self.file.path, error)
            return False
        try:
            now = self.file.look()
            # Of a range we know where it lies from what the file was then.
            if self.file.identity.length >= 0 and now.content != self.file.identity.content:
                raise self.changed()
        except BaseException:
            self._release()
            raise
        self.file.identity = now
        return True

    def copy(
        self, progress: Progress | None = None, *, then: Callable[[int], None] | None = None
    ) -> str:
        """From now on a sealed copy is meant. Returns its sha256, hex. Blocks.

        Args:
            then: called with the fd of the copy, while the file is still held.

        Raises:
            InvalidRequest: reason BAD_FILE; it shrank meanwhile.
            LimitExceeded: reason MEMORY.
        """
        size, digest = self.size_bytes, ""
        try:
            fd = os.memfd_create("qnnbroker-binary", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise LimitExceeded(
                f"no memory file for a copy of {str(self.file.path)!r}: {error.strerror}",
                reason="MEMORY",
            ) from error
        try:
            digest = self._copy_to(fd, size, progress)
            if self.file.identity.length >= 0:  # where a range lies was read before
                self.file.check_unchanged()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _ALL_SEALS)
            # Read-only: older kernels let nobody map a write-sealed memfd that is open for writing.
            sealed = reopen_read_only(fd)
        finally:
            os.close(fd)
        holding.copied += 1
        copy = ModelFile.adopt(self.file.path, sealed)
        if then is not None:
            try:
                then(sealed)
            except BaseException:
                copy.close()
                raise
        self._release()
        if self._original is None:
            self._original = self.file
        else:
            self.file.close()
        self.file = copy
        return digest

    def _copy_to(self, fd: int, size: int, progress: Progress | None) -> str:
        digest, done, told = hashlib.sha256(), 0, 0
        try:
            os.posix_fallocate(fd, 0, size)
            for offset, piece in self.file.pieces():
                digest.update(piece)
                while piece:
                    count = os.pwrite(fd, piece, offset)
                    offset, piece = offset + count, piece[count:]
                if progress is not None and (offset - told >= CHUNK_BYTES or offset == size):
                    progress(offset, size)
                    told = offset
                done = offset
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise LimitExceeded(
                f"no memory for a copy of {size} bytes of {str(self.file.path)!r}",
                reason="MEMORY",
            ) from error
        if done != size:
            raise self.changed()
        return digest.hexdigest()

    def ensure(self, digest: str, *, then: Callable[[int], None] | None = None) -> None:
        """Makes sure that the bytes of that hash are held. May copy, so it blocks.

        Args:
            then: called with the fd of a copy, before whoever waits to write the file goes on.

        Raises:
            InvalidRequest: reason BAD_FILE; they are gone.
        """
        with self._ensuring:
            self._ensure(digest, then)

    def _ensure(self, digest: str, then: Callable[[int], None] | None) -> None:
        if self.safe:
            return
        # Let go since, and held again? Not while somebody waits for us to let go.
        if self._lease is None and self.verified[0] == digest:
            with contextlib.suppress(InvalidRequest):
                if self.hold() and self.verified == (digest, self.file.identity):
                    return
        log.info("%s: no lease on it (any more); going on with a copy", self.file.path)
        self.gone = True
        if self.copy(then=then) != digest:
            raise self.changed()
        self.gone = False

    def changed(self) -> InvalidRequest:
        """The error for a file that is no longer what it was."""
        return self.file.changed()

    def map(self) -> Region:
        """The range, mapped read-only; safe to touch as long as this is held."""
        return self.file.map()

    def hash_held(self) -> str:
        """Holds the bytes and tells their sha256. Reads them all: blocks.

        Raises:
            BrokerError: it changed since it was opened, or there is no memory for a copy.
        """
        if not self.hold():
            return self.copy()
        digest = hashlib.sha256()
        for _, piece in self.file.pieces():
            digest.update(piece)
        if not self.safe:
            raise self.changed()
        return digest.hexdigest()

    def settle(self, *, keep: bool) -> None:
        """The bytes were loaded. Unless they are still needed, whoever waits to write goes on, and
        a copy goes; the file stays open, as one that may change."""
        if keep:
            return
        self._release()
        original, self._original = self._original, None
        if original is not None:
            self.file.close()
            self.file = original

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def share(self) -> "SteadyFile":
        """Itself, with one more holder."""
        with self._lock:
            self._users += 1
        return self

    def close(self) -> None:
        """One holder less; the last one lets the file go."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._release()
            self.file.close()
            if self._original is not None:
                self._original.close()

    def __enter__(self) -> "SteadyFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def to_its_end(work: "asyncio.Future[T]", give_up: Callable[[], None] | None = None) -> T:
    """A thread's work, waited for when the caller is cancelled, too: it uses a file that whoever
    called is about to close. `give_up` makes it end sooner."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if give_up is not None:
            give_up()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


async def content_hash(
    steady: SteadyFile,
    hashes: HashCache,
    progress: Progress,
    is_resident: Callable[[str], bool],
) -> str:
    """The sha256 of the file, hex. Afterwards its bytes are held, or are resident already.

    A file without a lease is copied first. Only when it is another user's (which says nothing about
    writers, and is how packages install files), and its bytes are resident, its times will do.

    Raises:
        BrokerError: it changed, it cannot be read, or there is no memory for a copy.
    """
    loop = asyncio.get_running_loop()
    # Not on the threads that hash, which would keep a resident model waiting for somebody's file.
    if await to_its_end(loop.run_in_executor(None, steady.hold)):
        digest = await hashes.sha256(steady.file, progress)
        steady.verified = digest, steady.file.identity
        if not steady.safe:
            await to_its_end(loop.run_in_executor(hashes.threads, steady.ensure, digest))
        return digest
    identity = steady.file.identity
    if steady.owner_only and is_resident(digest := hashes.known(identity)):
        progress(steady.size_bytes, steady.size_bytes)
        return digest

    given_up = threading.Event()

    def tell(done: int, total: int) -> None:
        if given_up.is_set():
            raise SubmissionCancelled("nobody waits for this load any more")
        loop.call_soon_threadsafe(progress, done, total)

    copying = loop.run_in_executor(hashes.threads, steady.copy, tell)
    digest = await to_its_end(copying, given_up.set)
    if steady.owner_only and time.time_ns() - identity.ctime_ns > QUIET_NS:
        hashes.remember(identity, digest)
    return digest
