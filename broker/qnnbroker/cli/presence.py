# SPDX-License-Identifier: Apache-2.0
"""Whether a broker is on a runtime directory, told without talking to it."""

import os
from pathlib import Path

from qnnbroker.protos.errors import BrokerUnavailable
from qnnbroker.protos.paths import LOCK_FILE


def no_broker(directory: Path) -> BrokerUnavailable:
    """The error for a directory on which nobody answers; one that is starting is told apart."""
    if (pid := lock_holder(directory)) is not None:
        return BrokerUnavailable(
            f"the broker (pid {pid}) on {str(directory)!r} does not answer yet: "
            "it is starting or stopping",
            reason="STARTING",
            pid=pid,
        )
    return BrokerUnavailable(
        f"no broker runs on {str(directory)!r}; start one with `qnnbroker serve`, "
        "or name another directory with --runtime-dir",
        reason="NO_SOCKET",
        runtime_dir=directory,
    )


def lock_holder(directory: Path) -> int | None:
    """The pid in the lock file, if somebody holds the lock.

    The kernel's table is read: trying the lock would make a broker that starts just now fail.
    """
    try:
        with open(directory / LOCK_FILE) as file:
            info = os.fstat(file.fileno())
            text = file.read(32).strip()
        with open("/proc/locks") as table:
            rows = [row.split() for row in table]
    except OSError:
        return None
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    for row in rows:
        # "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF"; one that waits has "->" before.
        if len(row) >= 6 and row[1] == "FLOCK":
            place, _, inode = row[5].rpartition(":")
            # Some file systems show another device number here than to stat(2).
            if inode == str(info.st_ino) and (place == device or row[4] == text):
                return int(text) if text.isdigit() else 0
    return None
