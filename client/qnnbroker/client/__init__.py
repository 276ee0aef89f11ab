# SPDX-License-Identifier: Apache-2.0
"""The client: `connect()` to a broker, load a model, run its graphs over shared memory.

    with connect() as session, session.load("model_ctx.onnx") as model:
        outputs = model.graph.run({"input": array})

It loads neither a QNN library nor onnx nor onnxruntime.
"""

from qnnbroker.protos.errors import (
    AlreadyExists,
    BackendError,
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    DeadlineExpired,
    InvalidRequest,
    LeaseRevoked,
    LimitExceeded,
    NotAllowed,
    NotFound,
    NpuRestarted,
    ProtocolError,
    SessionClosed,
    SubmissionCancelled,
    Unsupported,
    VersionMismatch,
    WouldBlock,
)
from qnnbroker.protos.tensors import Quantization, TensorSpec

from .attach import Limits
from .bindings import Binding
from .buffers import Buffer
from .connecting import connect
from .control import LoadProgress, LoadStage
from .graphs import Graph
from .models import Model
from .session import Session
from .submissions import Submission
from .timing import Timing

__all__ = [
    "AlreadyExists",
    "BackendError",
    "Binding",
    "BrokerError",
    "BrokerLost",
    "BrokerUnavailable",
    "Buffer",
    "DeadlineExpired",
    "Graph",
    "InvalidRequest",
    "LeaseRevoked",
    "Limits",
    "LimitExceeded",
    "LoadProgress",
    "LoadStage",
    "Model",
    "NotAllowed",
    "NotFound",
    "NpuRestarted",
    "ProtocolError",
    "Quantization",
    "Session",
    "SessionClosed",
    "Submission",
    "SubmissionCancelled",
    "TensorSpec",
    "Timing",
    "Unsupported",
    "VersionMismatch",
    "WouldBlock",
    "connect",
]
