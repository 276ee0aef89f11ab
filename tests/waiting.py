# SPDX-License-Identifier: Apache-2.0
"""Waiting, with a deadline, for what others do in their own time; and the deadline of a test."""

import contextlib
import faulthandler
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

import pytest

T = TypeVar("T")

#: How long anything in a test may take that has no reason to take long.
PATIENCE_SECONDS = 20.0
#: What a test may take altogether.
TEST_SECONDS = 90.0
SLOW_TEST_SECONDS = 600.0
#: After that the process ends: the test is stuck where no signal handler runs.
GRACE_SECONDS = 30.0


def wait_until(
    condition: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS, pause: float = 0.005
) -> T:
    """The first true value of `condition`; fails, saying `what`, when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            pytest.fail(f"after {seconds:g} s it never came to this: {what}; found {value!r}")
        time.sleep(pause)
    return value


def wait_readable(fd: int, what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Until `fd` has something to read or is at its end."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(seconds * 1000):
        pytest.fail(f"nothing to read after {seconds:g} s: {what}")


def wait_exit(pid: int, what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Until the process is no more than a zombie."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        wait_readable(pidfd, what, seconds)
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def deadline(seconds: float, name: str, dump_to: int) -> Iterator[None]:
    """Fails the block after `seconds`; ends the process if even that is not possible.

    Main thread only.
    """

    def too_late(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(dump_to)
        pytest.fail(f"{name} took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + GRACE_SECONDS, exit=True, file=dump_to)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
