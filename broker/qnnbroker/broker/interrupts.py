# SPDX-License-Identifier: Apache-2.0
"""SIGINT of a process that has nothing to clean up yet, or any more: it ends at once, in silence.

Python would raise KeyboardInterrupt out of whatever import is under way: a traceback for the user,
or an exception that is swallowed, where imports call back. Who has SIGINT ignored keeps it so.
"""

import signal


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
