# SPDX-License-Identifier: Apache-2.0
"""The one table: exception <-> gRPC status <-> completion code; used in both directions.

Only `grpc.StatusCode` numbers appear here, not grpc itself, so that a reader of completion slots
need not import it.
"""

from google.protobuf.message import DecodeError

from qnnbroker.v1 import types_pb2

from . import errors
from .errors import BrokerError

#: Metadata key of the typed detail, trailing, of every failed call.
ERROR_METADATA_KEY = "qnnbroker-error-bin"
#: Metadata key of the session token in every call of an attached client.
SESSION_METADATA_KEY = "qnnbroker-session-bin"

#: An ErrorDetail, serialised. gRPC fails a call whose trailing metadata is over 8 KiB with a status
#: of its own, so detail (base64) and status text (percent-encoded) together must stay below that.
MAX_DETAIL_BYTES = 4096
_MAX_MESSAGE_BYTES = 2000
_MAX_ID_BYTES = 256
_MAX_STATUS_TEXT_BYTES = 600

#: Exception class -> number of the gRPC status code.
GRPC_STATUS: dict[type[BrokerError], int] = {
    errors.InvalidRequest: 3,
    errors.NotFound: 5,
    errors.AlreadyExists: 6,
    errors.NotAllowed: 7,
    errors.LimitExceeded: 8,
    errors.VersionMismatch: 9,
    errors.LeaseRevoked: 9,
    errors.DeadlineExpired: 4,
    errors.SubmissionCancelled: 1,
    errors.NpuRestarted: 10,
    errors.BrokerUnavailable: 14,
    errors.Unsupported: 12,
    errors.BackendError: 13,
    errors.ProtocolError: 13,
}

#: Completion code -> (exception class, reason). 0 is success. Never renumber; append.
COMPLETION: dict[int, tuple[type[BrokerError], str]] = {
    1: (errors.InvalidRequest, "INVALID_ARGUMENT"),
    2: (errors.NotFound, "BINDING_UNKNOWN"),
    3: (errors.LeaseRevoked, "STALE_GENERATION"),
    4: (errors.LeaseRevoked, "LEASE_REVOKED"),
    5: (errors.LimitExceeded, "CREDITS"),
    6: (errors.LimitExceeded, "NPU_MEMORY"),
    7: (errors.DeadlineExpired, "QUEUED"),
    8: (errors.DeadlineExpired, "RUNNING"),
    9: (errors.SubmissionCancelled, "BY_CALLER"),
    10: (errors.SubmissionCancelled, "SESSION_CLOSED"),
    11: (errors.NpuRestarted, "NPU_RESTARTED"),
    12: (errors.BrokerUnavailable, "STOPPING"),
    13: (errors.BrokerUnavailable, "NPU_LOST"),
    14: (errors.Unsupported, "BACKEND_LACKS"),
    15: (errors.BackendError, "QNN_ERROR"),
    16: (errors.ProtocolError, "BAD_SLOT"),
    17: (errors.VersionMismatch, "CONTEXT_BINARY_VERSION"),
    18: (errors.BackendError, "INTERNAL"),
}
COMPLETION_NUMBER = {pair: number for number, pair in COMPLETION.items()}
_FIRST_OF_CLASS = {cls: number for number, (cls, _) in reversed(COMPLETION.items())}

_BY_NAME = {c.__name__: c for c in errors.all_error_types()}
_BY_STATUS = {
    1: errors.SubmissionCancelled,
    3: errors.InvalidRequest,
    4: errors.DeadlineExpired,
    5: errors.NotFound,
    6: errors.AlreadyExists,
    7: errors.NotAllowed,
    8: errors.LimitExceeded,
    9: errors.VersionMismatch,
    10: errors.NpuRestarted,
    12: errors.Unsupported,
    13: errors.BackendError,
    14: errors.BrokerUnavailable,
}


def grpc_status(error: BrokerError) -> int:
    """Number of the gRPC status code that carries `error`; INTERNAL for a class of its own."""
    for cls in type(error).__mro__:
        if cls in GRPC_STATUS:
            return GRPC_STATUS[cls]
    return 13


def _clip(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes of UTF-8; surrogates (odd file names) are escaped."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > limit:
        data = data[: limit - 3] + b"..."
    return data.decode("utf-8", "ignore")


def grpc_text(error: BrokerError) -> str:
    """The text of the gRPC status that carries `error`: the message, short enough for a status."""
    return _clip(error.message, _MAX_STATUS_TEXT_BYTES)


def to_detail(error: BrokerError) -> types_pb2.ErrorDetail:
    """The message that travels for `error`: at most MAX_DETAIL_BYTES, whatever the error holds."""
    detail = types_pb2.ErrorDetail(
        reason=_clip(error.reason, _MAX_ID_BYTES),
        message=_clip(error.message, _MAX_MESSAGE_BYTES),
        type=type(error).__name__,
    )
    room = MAX_DETAIL_BYTES - detail.ByteSize()
    for key, value in error.ids.items():
        key, value = _clip(key, _MAX_ID_BYTES), _clip(value, _MAX_ID_BYTES)
        room -= len(key.encode()) + len(value.encode()) + 12  # tags and lengths of a map entry
        if room < 0:
            break
        detail.ids[key] = value
    return detail


def from_detail(detail: types_pb2.ErrorDetail) -> BrokerError:
    """The exception that `detail` describes; an unknown type becomes a plain BrokerError."""
    error = _BY_NAME.get(detail.type, BrokerError)(detail.message, reason=detail.reason)
    error.ids = dict(detail.ids)
    return error


def from_grpc(status: int, message: str, detail: bytes | None) -> BrokerError:
    """The exception of a failed call: from the typed detail when it came, else from the status.

    Args:
        status: number of the gRPC status code.
        message: the status' text.
        detail: value of `ERROR_METADATA_KEY` in the trailing metadata, if any.
    """
    if detail is not None:
        try:
            return from_detail(types_pb2.ErrorDetail.FromString(detail))
        except DecodeError:  # a peer that sends rubbish still gets its status reported
            pass
    if status == 4:
        return errors.DeadlineExpired(message or "the call's deadline expired", reason="CALL")
    if status == 13:
        return errors.BackendError(message or "internal error", reason="INTERNAL")
    return _BY_STATUS.get(status, BrokerError)(message or f"gRPC status {status}")


_COMPLETION_ADVICE = {
    11: "; nothing runs any more until the backend is reset (`qnnbroker reset`)",
}
_COMPLETION_TEXTS = {
    2: "the binding is not known",
    3: "the binding is gone",
    4: "the binding was released, or a reset of the backend lost its context",
    5: "the session has as many submissions in flight as it may",
    7: "the deadline passed before it ran",
    9: "it was cancelled",
    10: "the session was closed",
    11: "the NPU restarted",
    12: "the broker is stopping",
    13: "the NPU is lost",
    15: "the QNN library refused the execute; the broker's log and statistics say more",
}


def completion_text(code: int) -> str:
    """A clause for people about a completion code that is not 0."""
    known = _COMPLETION_TEXTS.get(code)
    if known is None:
        _, reason = COMPLETION.get(code, (None, "INTERNAL"))
        known = f"the execute failed: {reason} (completion code {code})"
    return known + completion_advice(code)


def completion_advice(code: int) -> str:
    """What is to be done after that completion code, to be put behind a message; mostly nothing."""
    return _COMPLETION_ADVICE.get(code, "")


def from_completion(code: int, message: str) -> BrokerError:
    """The exception of a completion whose status is `code` (not 0)."""
    cls, reason = COMPLETION.get(code, (errors.BackendError, "INTERNAL"))
    return cls(message or f"the submission ended with {reason}", reason=reason, completion=code)


def completion_number(error: BrokerError) -> int:
    """The completion code that says most about `error`: of its reason, else of its class."""
    for cls in type(error).__mro__:
        if number := COMPLETION_NUMBER.get((cls, error.reason)):
            return number
        if number := _FIRST_OF_CLASS.get(cls):
            return number
    return COMPLETION_NUMBER[errors.BackendError, "INTERNAL"]
