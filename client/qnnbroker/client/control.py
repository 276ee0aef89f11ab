# SPDX-License-Identifier: Apache-2.0
"""Typed calls of the control service: token and deadline in, exceptions out."""

import enum
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc

from qnnbroker.protos import status
from qnnbroker.protos.errors import BrokerError, ProtocolError, SessionClosed
from qnnbroker.v1 import control_pb2 as pb

from .attach import AttachConnection
from .channel import RestingChannel
from .timing import Timing

if TYPE_CHECKING:
    from qnnbroker.v1.control_pb2_grpc import ControlServiceStub

#: How long a call that failed as unavailable waits for the attach socket to show that the broker
#: is gone for good: the kernel closes the sockets of a dead process one after the other.
_LOST_WAIT_SECONDS = 0.25

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class LoadStage(enum.IntEnum):
    """Where a load is."""

    HASHING = pb.LOAD_STAGE_HASHING
    MAPPING = pb.LOAD_STAGE_MAPPING
    VERIFYING = pb.LOAD_STAGE_VERIFYING
    CREATING = pb.LOAD_STAGE_CREATING
    READY = pb.LOAD_STAGE_READY


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One report of a load. `bytes_total` is 0 when it is not known."""

    stage: LoadStage
    bytes_done: int
    bytes_total: int


class Control:
    """The control service of one broker, over one channel.

    With a token the calls belong to that session; without, to nobody. With `attach` they go to the
    broker of that connection and to no other, even when its socket was moved or removed.

    Threads: any. Fork: unusable in the child (gRPC's own rule); `Session` sees to that.

    Raises (every call):
        BrokerError: the exception that the broker raised.
        BrokerLost: the broker behind `attach` is gone.
        DeadlineExpired: reason CALL; no answer within the timeout.
        SessionClosed: closed here.
    """

    def __init__(
        self,
        grpc_path: str,
        *,
        token: bytes | None = None,
        attach: AttachConnection | None = None,
        max_message_bytes: int = 0,
    ) -> None:
        self._grpc_path = grpc_path
        self._resting = RestingChannel(
            grpc_path, max_message_bytes or -1, pinned=attach is not None
        )
        self._metadata = None if token is None else ((status.SESSION_METADATA_KEY, token),)
        self._attach = attach
        self._closed = False

    def server_info(self, timeout: float) -> pb.GetServerInfoResponse:
        return self._call(lambda stub: stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)

    def load_model(
        self, request: pb.LoadModelRequest, timeout: float
    ) -> Generator[pb.LoadModelResponse]:
        """The reports of a load. Closing the iterator early gives up our share of it."""
        if self._attach is not None and self._attach.is_lost(0.0):
            raise self._attach.lost()
        try:
            with self._resting.stub() as stub:
                call = stub.LoadModel(request, timeout=timeout, metadata=self._metadata)
                try:
                    yield from call
                finally:
                    call.cancel()
        except (grpc.RpcError, ValueError) as exc:
            error, cause = self._error(exc)
            raise error from cause

    def unload_model(self, request: pb.UnloadModelRequest, timeout: float) -> None:
        self._call(lambda stub: stub.UnloadModel, request, timeout)

    def list_models(self, timeout: float, *, all: bool = False) -> pb.ListModelsResponse:
        return self._call(lambda stub: stub.ListModels, pb.ListModelsRequest(all=all), timeout)

    def describe_model(self, request: pb.DescribeModelRequest, timeout: float) -> pb.Model:
        return self._call(lambda stub: stub.DescribeModel, request, timeout).model

    def create_binding(
        self, request: pb.CreateBindingRequest, timeout: float
    ) -> pb.CreateBindingResponse:
        return self._call(lambda stub: stub.CreateBinding, request, timeout)

    def release_binding(self, binding_id: int, timeout: float) -> bool:
        """False while a run of it is still under way; asking again is fine."""
        request = pb.ReleaseBindingRequest(binding_id=binding_id)
        return not self._call(lambda stub: stub.ReleaseBinding, request, timeout).still_running

    def describe_binding(self, binding_id: int, timeout: float) -> pb.DescribeBindingResponse:
        request = pb.DescribeBindingRequest(binding_id=binding_id)
        return self._call(lambda stub: stub.DescribeBinding, request, timeout)

    def last_error(self, binding_id: int, timeout: float) -> tuple[int, str]:
        """QNN code and name of the last execute of a binding that failed; 0 when none did."""
        answer = self.describe_binding(binding_id, timeout)
        return answer.last_error_code, answer.last_error_name

    def execute(self, binding_id: int, timeout: float) -> Timing:
        request = pb.ExecuteRequest(binding_id=binding_id)
        timing = self._call(lambda stub: stub.Execute, request, timeout).timing
        return Timing(timing.queue_ns, timing.execute_ns, timing.copied_bytes)

    def infer(self, request: pb.InferRequest, timeout: float) -> pb.InferResponse:
        return self._call(lambda stub: stub.Infer, request, timeout)

    def list_sessions(self, timeout: float) -> pb.ListSessionsResponse:
        return self._call(lambda stub: stub.ListSessions, pb.ListSessionsRequest(), timeout)

    def statistics(self, timeout: float) -> pb.GetStatisticsResponse:
        return self._call(lambda stub: stub.GetStatistics, pb.GetStatisticsRequest(), timeout)

    def park_bindings(self, model: str, timeout: float) -> pb.ParkBindingsResponse:
        """Those of one model, by name or hash prefix; of all, when that is empty."""
        return self._call(
            lambda stub: stub.ParkBindings, pb.ParkBindingsRequest(model=model), timeout
        )

    def reset_backend(self, timeout: float) -> pb.ResetBackendResponse:
        return self._call(lambda stub: stub.ResetBackend, pb.ResetBackendRequest(), timeout)

    def stop_server(self, timeout: float) -> None:
        self._call(lambda stub: stub.StopServer, pb.StopServerRequest(), timeout)

    def close(self) -> None:
        """Closes the channel; calls under way fail as SessionClosed."""
        self._closed = True
        self._resting.close()

    def channel(self) -> grpc.Channel | None:
        """The channel, for who must keep it from being touched after a fork."""
        return self._resting.held

    def _call(
        self,
        method: "Callable[[ControlServiceStub], Callable[..., _Response]]",
        request: object,
        timeout: float,
    ) -> _Response:
        if self._attach is not None and self._attach.is_lost(0.0):
            raise self._attach.lost()  # another broker may answer on that socket now
        try:
            with self._resting.stub() as stub:
                return method(stub)(request, timeout=timeout, metadata=self._metadata)
        except (grpc.RpcError, ValueError) as exc:
            error, cause = self._error(exc)
            raise error from cause

    def _error(self, exc: grpc.RpcError | ValueError) -> tuple[BaseException, BaseException | None]:
        """The exception for a failed call, and its cause where that says more: not for an error
        that the broker answered."""
        if self._closed:
            return SessionClosed("the session was closed during the call"), None
        if not isinstance(exc, grpc.Call):
            # A ValueError of grpc: the channel cannot take the call.
            return (exc, None) if isinstance(exc, ValueError) else (ProtocolError(str(exc)), exc)
        code = exc.code()
        wait = _LOST_WAIT_SECONDS if code is grpc.StatusCode.UNAVAILABLE else 0.0
        if self._attach is not None and self._attach.is_lost(wait):
            return self._attach.lost(), None
        detail: bytes | None = None
        for key, value in exc.trailing_metadata() or ():
            if key == status.ERROR_METADATA_KEY and isinstance(value, bytes):
                detail = value
        text = exc.details() or ""
        if wait and self._attach is not None and not detail and not os.path.exists(self._grpc_path):
            text = (
                "the broker of this session lives, and runs go on, but its socket "
                f"{self._grpc_path!r} is gone: its runtime directory was removed or replaced. "
                "Restart that broker"
            )
        error: BrokerError = status.from_grpc(code.value[0], text, detail)
        return error, None if detail else exc
