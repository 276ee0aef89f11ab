# SPDX-License-Identifier: Apache-2.0
"""SIGINT of a process that has nothing to clean up yet, or any more: it ends at once, in silence.

Python would raise KeyboardInterrupt out of whatever import is under way: a traceback for the user,
or an exception that is swallowed, where imports call back. Who has SIGINT ignored keeps it so.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator

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

    Any thread: Python raises them in the main thread only, so another has nothing to defer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    with contextlib.ExitStack() as after:
        after.callback(_raise_again, came)
        for number in _ENDING:
            handler = signal.getsignal(number)
            if callable(handler):
                after.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: came.append(number))
        yield


def _raise_again(numbers: list[int]) -> None:
    for number in numbers:
        signal.raise_signal(number)
