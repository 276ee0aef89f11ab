# SPDX-License-Identifier: Apache-2.0
"""File leases: the kernel holds back whoever would change a file while we use it, at no copy.

A read lease is refused while anybody has the file open for writing or mapped writable. Once it is
held, an open for writing or truncating waits until we give it up, at most
/proc/sys/fs/lease-break-time seconds. Leases concern the inode, so other names of the file (hard
links) are covered; replacing a name by renaming needs none, since we have the old file open.
"""

import contextlib
import errno
import fcntl
import os
import signal
from pathlib import Path

#: File systems on which every change goes through this kernel and through the very inode that we
#: hold. Elsewhere (network, FUSE, overlays, a host's directory) a lease proves nothing.
LOCAL_FILE_SYSTEMS = frozenset(
    {"bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "ramfs", "squashfs", "tmpfs"}
    | {"xfs", "zfs"}
)
#: A break time below this could end in the middle of creating a context.
MIN_BREAK_SECONDS = 10
_BREAK_TIME = Path("/proc/sys/fs/lease-break-time")


class LeaseRefused(Exception):
    """No lease is to be had.

    Attributes:
        owner_only: it is so because the file is another user's, which says nothing about writers.
    """

    def __init__(self, why: str, *, owner_only: bool = False) -> None:
        super().__init__(why)
        self.owner_only = owner_only


class FileLease:
    """A read lease on an open file description of ours. Release it, or close the fd.

    The fd must be opened read-only, by us: a description that a client shares is the client's to
    unlock, too. Threads: any.

    Raises:
        LeaseRefused: says why.
    """

    def __init__(self, fd: int) -> None:
        kind = file_system_of(fd)
        if kind not in LOCAL_FILE_SYSTEMS:
            raise LeaseRefused(f"leases on {kind or 'an unknown file system'} prove nothing")
        if 0 < (seconds := break_seconds()) < MIN_BREAK_SECONDS:
            raise LeaseRefused(f"the kernel breaks leases after {seconds} s")
        try:
            # The default signal would end the process. This one is ignored unless handled, and we
            # need no signal: what counts is whether the lease is still held.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            why = {
                errno.EACCES: "the file is another user's",
                errno.EPERM: "the file is another user's",
                errno.EAGAIN: "somebody has the file open for writing",
            }.get(error.errno or 0, error.strerror or str(error))
            raise LeaseRefused(
                why, owner_only=error.errno in (errno.EACCES, errno.EPERM)
            ) from error
        self._fd = fd

    @property
    def held(self) -> bool:
        """False once somebody waits for us to let go, or the kernel took it from us."""
        return self._fd >= 0 and fcntl.fcntl(self._fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK

    def release(self) -> None:
        """Lets go of whoever waits. Idempotent; before the fd is closed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(BlockingIOError):  # its time was over: the kernel took it
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def break_seconds() -> int:
    """How long the kernel lets a lease hold somebody back; 0 means for ever."""
    try:
        return int(_BREAK_TIME.read_text())
    except (OSError, ValueError):
        return 1  # unknown: too short to rely on


def file_system_of(fd: int) -> str:
    """The type of the file system that an open file is on, as mount(8) calls it; "" if unknown."""
    try:
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        mount = next(line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            if before.split(" ", 1)[0] == mount:
                return after.split(" ", 1)[0]
    except (OSError, StopIteration, IndexError):
        pass
    return ""


def reopen_read_only(fd: int) -> int:
    """A description of our own on the same file.

    Raises:
        OSError: this process may not read the file by itself.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
