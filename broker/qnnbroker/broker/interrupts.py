# SPDX-License-Identifier: Apache-2.0
"""SIGINT of a process that has nothing to clean up yet, or any more: it ends at once, in silence.

Python would raise KeyboardInterrupt out of whatever import is under way: a traceback for the user,
or an exception that is swallowed, where imports call back. Who has SIGINT ignored keeps it so.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

#: What asks a process to end, and unwinds a command like an exception.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """From here on SIGINT ends the process; one that was held back does so now.

    Main thread only.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def raise_exception() -> None:
    """From here on SIGINT raises KeyboardInterrupt, as Python has it. Main thread only."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold_back() -> None:
    """From here on SIGINT waits, in the program too that this process becomes.

    Raises:
        KeyboardInterrupt: there was one just before.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Exceptions of signals that ask us to end come after the block: it is done as a whole.

    Main thread only.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.getsignal(number) for number in _ENDING}
    taken = {number: handler for number, handler in before.items() if callable(handler)}
    for number in taken:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        for asked in came:
            signal.raise_signal(asked)
