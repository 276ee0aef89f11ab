# SPDX-License-Identifier: Apache-2.0
"""Every exception that qnnbroker raises, and the reasons that programs may test.

    BrokerError
    +-- InvalidRequest (ValueError)        fix the call
    +-- NotFound (LookupError)             fix the name, or load
    +-- AlreadyExists                      choose another name
    +-- NotAllowed (PermissionError)       ask the administrator
    +-- LimitExceeded                      back off, release
    +-- VersionMismatch                    upgrade one side, recompile
    +-- LeaseRevoked                       acquire again
    +-- DeadlineExpired (TimeoutError)     retry or give up
    +-- SubmissionCancelled                nothing
    +-- NpuRestarted                       redo if the work may be repeated
    +-- BrokerUnavailable (ConnectionError)  retry with backoff
    +-- Unsupported (NotImplementedError)  choose another way
    +-- BackendError                       report
    +-- ProtocolError                      report; the session is ended
    +-- SessionClosed          local: you closed it
    +-- BrokerLost (ConnectionResetError)  local: the broker died; in-flight outcome unknown
    +-- WouldBlock             local: the ring is full, for `_nowait` calls

`status.py` says how they travel.
"""

from collections.abc import Mapping


class BrokerError(Exception):
    """Base of all.

    Attributes:
        reason: stable, UPPER_SNAKE; what programs test.
        message: one sentence for people: what was wanted and what was found.
        ids: ids and values concerned, as text.
    """

    default_reason = "INTERNAL"
    #: Reasons this class may carry; status.py numbers them.
    reasons: tuple[str, ...] = ("INTERNAL",)

    def __init__(self, message: str, *, reason: str | None = None, **ids: object) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.ids: Mapping[str, str] = {k: str(v) for k, v in ids.items()}

    def __str__(self) -> str:
        return self.message


class InvalidRequest(BrokerError, ValueError):
    """The call itself is wrong."""

    default_reason = "INVALID_ARGUMENT"
    reasons = (
        "INVALID_ARGUMENT",
        "TENSOR_MISMATCH",
        "BAD_OFFSET",
        "BAD_ALIGNMENT",
        "OVERLAP",
        "BAD_FILE",
    )


class NotFound(BrokerError, LookupError):
    """A name or id that the broker does not know."""

    default_reason = "NOT_FOUND"
    reasons = (
        "NOT_FOUND",
        "CONTEXT_UNKNOWN",
        "GRAPH_UNKNOWN",
        "BUFFER_UNKNOWN",
        "SESSION_UNKNOWN",
        "MODEL_UNKNOWN",
        "BINDING_UNKNOWN",
        "FILE_MISSING",
    )


class AlreadyExists(BrokerError):
    """A name that is taken."""

    default_reason = "NAME_TAKEN"
    reasons = ("NAME_TAKEN", "BROKER_RUNNING")


class NotAllowed(BrokerError, PermissionError):
    """The peer may not do this."""

    default_reason = "NOT_THE_OWNER"
    reasons = ("NOT_THE_OWNER", "PEER_UID", "FILE_UNREADABLE", "SESSION_REQUIRED")

    def __str__(self) -> str:  # PermissionError would print an errno tuple
        return self.message


class LimitExceeded(BrokerError):
    """A limit of the broker, the session or the device."""

    default_reason = "LIMIT"
    reasons = (
        "LIMIT",
        "SESSIONS",
        "BUFFER_BYTES",
        "BUFFERS",
        "BINDINGS",
        "CREDITS",
        "NPU_MEMORY",
        "MEMORY",
        "MESSAGE_BYTES",
    )


class VersionMismatch(BrokerError):
    """Two sides, or a file and a library, that do not fit together."""

    default_reason = "PROTOCOL_VERSION"
    reasons = (
        "PROTOCOL_VERSION",
        "ABI_VERSION",
        "CONTEXT_BINARY_VERSION",
        "WRONG_CHIP",
        "BINARY_CLASS",
        "LIBRARY_VERSION",
    )


class LeaseRevoked(BrokerError):
    """What the id named is gone: released, revoked, or of an earlier generation."""

    default_reason = "LEASE_REVOKED"
    reasons = ("LEASE_REVOKED", "STALE_GENERATION")


class DeadlineExpired(BrokerError, TimeoutError):
    """Too late: before it ran (QUEUED) or while it ran (RUNNING)."""

    default_reason = "QUEUED"
    reasons = ("QUEUED", "RUNNING", "CALL")

    def __str__(self) -> str:
        return self.message


class SubmissionCancelled(BrokerError):
    """Cancelled before it ran."""

    default_reason = "BY_CALLER"
    reasons = ("BY_CALLER", "SESSION_CLOSED")


class NpuRestarted(BrokerError):
    """The NPU restarted; the broker has tried once itself."""

    default_reason = "NPU_RESTARTED"
    reasons = ("NPU_RESTARTED",)


class BrokerUnavailable(BrokerError, ConnectionError):
    """No broker there, or not now."""

    default_reason = "NO_SOCKET"
    reasons = ("NO_SOCKET", "STARTING", "STOPPING", "NPU_LOST")

    def __str__(self) -> str:
        return self.message


class Unsupported(BrokerError, NotImplementedError):
    """Something this backend, build or version does not do."""

    default_reason = "BACKEND_LACKS"
    reasons = ("BACKEND_LACKS", "DTYPE", "SHARED_WEIGHTS", "LAYOUT", "NOT_A_MODEL")


class BackendError(BrokerError):
    """The QNN library refused, with its own code."""

    default_reason = "QNN_ERROR"
    reasons = ("QNN_ERROR", "INTERNAL")


class ProtocolError(BrokerError):
    """The peer broke the protocol; its session is ended."""

    default_reason = "BAD_FRAME"
    reasons = ("BAD_FRAME", "BAD_SLOT", "FD_COUNT")


class SessionClosed(BrokerError):
    """The session was closed by this process, or belongs to another one (after a fork)."""

    default_reason = "CLOSED"
    reasons = ("CLOSED", "FORKED")


class BrokerLost(BrokerError, ConnectionResetError):
    """The broker went away; what was in flight has an unknown outcome."""

    default_reason = "BROKER_LOST"
    reasons = ("BROKER_LOST",)

    def __str__(self) -> str:
        return self.message


class WouldBlock(BrokerError):
    """No room now; only from `_nowait` calls."""

    default_reason = "RING_FULL"
    reasons = ("RING_FULL",)


def all_error_types() -> tuple[type[BrokerError], ...]:
    """Every class of the tree, the base first."""
    return (BrokerError, *BrokerError.__subclasses__())
