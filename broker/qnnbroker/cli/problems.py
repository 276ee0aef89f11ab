# SPDX-License-Identifier: Apache-2.0
"""What the command line ends with: exit codes, its own errors, and one description of any error."""

import os
from dataclasses import dataclass, field

from qnnbroker.protos.errors import BrokerError, BrokerUnavailable

DONE, FAILED, USAGE, NO_BROKER = 0, 1, 2, 3
INTERRUPTED = 130
#: As a shell shows a writer whose reader went away.
NO_READER = 141

#: Reasons of BrokerUnavailable that mean: nobody is there to answer.
_NOBODY = frozenset({"NO_SOCKET", "STARTING", "STOPPING"})


class WrongUsage(Exception):
    """The command line or the configuration is wrong; exit code 2.

    `reason` is OPTION, CONFIG or INPUT.
    """

    def __init__(self, message: str, *, reason: str = "OPTION") -> None:
        super().__init__(message)
        self.reason = reason


class Failure(Exception):
    """The operation failed in a way that is the command line's own; exit code 1."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as it leaves the process: `message` is one line."""

    exit_code: int
    type: str
    reason: str
    message: str
    ids: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """`{"error": {"type", "reason", "message", "ids"}}`."""
        return {
            "error": {
                "type": self.type,
                "reason": self.reason,
                "message": self.message,
                "ids": self.ids,
            }
        }


def one_line(text: str) -> str:
    """`text` without line breaks and without what would steer a terminal."""
    return " ".join(printable(part) for part in text.split())


def printable(text: str) -> str:
    """`text` with control characters, and bytes that are no text, as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def describe(error: BaseException) -> Problem:
    """Any exception as a problem; the most specific rule first."""
    message = one_line(str(error)) or type(error).__name__
    if isinstance(error, BrokerError):
        nobody = isinstance(error, BrokerUnavailable) and error.reason in _NOBODY
        code = NO_BROKER if nobody else FAILED
        return Problem(code, type(error).__name__, error.reason, message, dict(error.ids))
    if isinstance(error, WrongUsage):
        return Problem(USAGE, "WrongUsage", error.reason, message)
    if isinstance(error, Failure):
        return Problem(FAILED, "Failure", error.reason, message)
    if isinstance(error, KeyboardInterrupt):
        return Problem(INTERRUPTED, "Interrupted", "INTERRUPTED", "interrupted")
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{os.fsdecode(error.filename)!r}: " if error.filename is not None else ""
        text = one_line(f"{where}{error.strerror or message}")
        return Problem(FAILED, type(error).__name__, "OS_ERROR", text)
    if isinstance(error, UnicodeEncodeError):  # an argument of bytes that are no text
        text = f"UTF-8 text wanted, found {error.object!r}"
        return Problem(FAILED, "InvalidRequest", "INVALID_ARGUMENT", one_line(text))
    if isinstance(error, MemoryError):
        return Problem(FAILED, "MemoryError", "MEMORY", "not enough memory for this")
    name = type(error).__name__
    return Problem(FAILED, name, "BUG", f"a bug in qnnbroker: {name}: {message}")
