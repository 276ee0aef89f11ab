# SPDX-License-Identifier: Apache-2.0
"""Only one broker on a runtime directory: an flock, not the existence of a socket."""

import fcntl
import os
from pathlib import Path

from qnnbroker.protos.errors import AlreadyExists


class BrokerLock:
    """Holds the lock file until closed. The file stays: removing it would race with a newcomer.

    Raises:
        AlreadyExists: reason BROKER_RUNNING; names the pid that holds it.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise AlreadyExists(
                f"a broker{f' (pid {holder})' if holder else ''} is already running on "
                f"{str(path.parent)!r}; use it, stop it with `qnnbroker stop`, "
                "or choose another runtime directory",
                reason="BROKER_RUNNING",
                pid=holder,
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def is_of(self, path: Path) -> bool:
        """Whether that is still the file that was locked, not another one by its name."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path, follow_symlinks=False))
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
