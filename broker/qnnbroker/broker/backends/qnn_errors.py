# SPDX-License-Identifier: Apache-2.0
"""The one place where a QNN code becomes one of our exceptions."""

from qnnbroker.native.qnn_error import QnnError
from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    BrokerUnavailable,
    DeadlineExpired,
    InvalidRequest,
    LimitExceeded,
    NpuRestarted,
    SubmissionCancelled,
    Unsupported,
    VersionMismatch,
)
from qnnbroker.protos.status import COMPLETION_NUMBER, completion_advice

#: QNN code -> (exception, reason). Others become BackendError.
_ERRORS: dict[int, tuple[type[BrokerError], str]] = {
    1000: (Unsupported, "BACKEND_LACKS"),
    1002: (LimitExceeded, "NPU_MEMORY"),
    1010: (LimitExceeded, "NPU_MEMORY"),
    1005: (VersionMismatch, "LIBRARY_VERSION"),
    1006: (VersionMismatch, "LIBRARY_VERSION"),
    1007: (NpuRestarted, "NPU_RESTARTED"),
    1008: (VersionMismatch, "LIBRARY_VERSION"),
    1011: (BrokerUnavailable, "NPU_LOST"),
    5004: (VersionMismatch, "CONTEXT_BINARY_VERSION"),
    5005: (InvalidRequest, "BAD_FILE"),
    5008: (VersionMismatch, "CONTEXT_BINARY_VERSION"),
    5011: (VersionMismatch, "CONTEXT_BINARY_VERSION"),
    5012: (SubmissionCancelled, "BY_CALLER"),
    5013: (DeadlineExpired, "RUNNING"),
    6031: (SubmissionCancelled, "BY_CALLER"),
    6033: (DeadlineExpired, "RUNNING"),
    30001: (InvalidRequest, "BAD_FILE"),
    30010: (InvalidRequest, "BAD_FILE"),
}

#: Of handles that we hold: they are invalid only because the NPU restarted.
_GONE = frozenset({5002, 6001})


def translate(error: QnnError, doing: str) -> BrokerError:
    """The exception of ours for a QNN error; `doing` says what was asked."""
    cls, reason = _ERRORS.get(error.code, (BackendError, "QNN_ERROR"))
    if error.code in _GONE:
        cls, reason = NpuRestarted, "NPU_RESTARTED"
    advice = completion_advice(COMPLETION_NUMBER.get((cls, reason), 0))
    return cls(
        f"{doing}: {error}{advice}",
        reason=reason,
        qnn_code=error.code,
        qnn_name=error.name,
        operation=error.operation,
    )


def error_of_code(code: int, message: str) -> BrokerError:
    """The exception for a code that a trial child met."""
    cls, reason = _ERRORS.get(code, (InvalidRequest, "BAD_FILE"))
    return cls(message, reason=reason, qnn_code=code)
