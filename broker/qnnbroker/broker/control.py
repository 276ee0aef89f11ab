# SPDX-License-Identifier: Apache-2.0
"""The gRPC servicer: unpack, call, pack. No decisions, and errors leave in one place."""

import asyncio
import contextlib
import errno
import functools
import logging
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, TypeVar

import grpc

from qnnbroker.protos.errors import BrokerError, InvalidRequest, LimitExceeded, NotAllowed, NotFound
from qnnbroker.protos.status import (
    ERROR_METADATA_KEY,
    SESSION_METADATA_KEY,
    grpc_status,
    grpc_text,
    to_detail,
)
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import control_pb2_grpc

from .bindings import RegionRef
from .service import BrokerService, memory_path
from .sessions import Session

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
_STATUS = {code.value[0]: code for code in grpc.StatusCode}
#: How long ReleaseBinding waits for what runs, before it answers that it still does.
RELEASE_WAIT_SECONDS = 0.005
T = TypeVar("T")
R = TypeVar("R")


#: Arguments of `context.abort`.
Failure = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes]]]


def failure(error: Exception, method: str) -> Failure:
    """What the caller is told: status, text and typed detail. Holds nothing of the error itself.

    Our exceptions go as they are; anything else is INTERNAL, logged here and not on the wire.
    """
    if isinstance(error, BrokerError):
        log.debug("%s: %s: %s", method, type(error).__name__, error)
        told = error
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        log.warning("%s: no file descriptor left", method)
        told = LimitExceeded(
            f"{method}: the broker has no file descriptor left, of "
            f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        )
    else:
        log.error("%s failed", method, exc_info=error)
        told = BrokerError(f"{method} failed inside the broker; its log says why")
    detail = to_detail(told).SerializeToString()
    return _STATUS[grpc_status(told)], grpc_text(told), ((ERROR_METADATA_KEY, detail),)


def unary(
    handler: Callable[[Any, T, Context], Awaitable[R]],
) -> Callable[[Any, T, Context], Awaitable[R]]:
    """The one wrapper that maps exceptions, for calls with one answer."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: T, context: Context) -> R:
        try:
            return await handler(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            failed = failure(error, handler.__name__)
        # gRPC keeps the exception of an abort, and with it this frame, until the garbage collector
        # comes by: it must hold neither the error's frames nor a request of megabytes.
        del request
        await context.abort(*failed)
        raise AssertionError("abort raises")

    return wrapped


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """qnnbroker.v1.ControlService over a BrokerService."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service

    def _session(self, context: Context) -> Session | None:
        for key, value in context.invocation_metadata() or ():
            if key == SESSION_METADATA_KEY:
                token = value if isinstance(value, bytes) else value.encode()
                try:
                    return self._service.sessions.by_token(token)
                except NotFound:
                    self._service.check_running()  # then that is why
                    raise
        return None

    def _own_session(self, context: Context, method: str) -> Session:
        session = self._session(context)
        if session is None:
            raise NotAllowed(
                f"{method} needs an attached session: its buffers are shared memory that a client "
                f"gets on the attach socket, and its token goes into {SESSION_METADATA_KEY!r}; "
                "without one use Infer",
                reason="SESSION_REQUIRED",
            )
        return session

    @unary
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return self._service.server_info()

    async def LoadModel(
        self, request: pb.LoadModelRequest, context: Context
    ) -> AsyncIterator[pb.LoadModelResponse]:
        try:
            async with contextlib.aclosing(self._load(request, context)) as updates:
                async for update in updates:
                    yield update
            return
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            failed = failure(error, "LoadModel")
        await context.abort(*failed)

    async def _load(
        self, request: pb.LoadModelRequest, context: Context
    ) -> AsyncGenerator[pb.LoadModelResponse, None]:
        updates: asyncio.Queue[pb.LoadModelResponse | None] = asyncio.Queue()

        def progress(stage: "pb.LoadStage.ValueType", done: int, total: int) -> None:
            updates.put_nowait(
                pb.LoadModelResponse(stage=stage, bytes_done=done, bytes_total=total)
            )

        session = self._session(context)
        task = asyncio.create_task(self._service.load(session, request, progress))
        task.add_done_callback(lambda _: updates.put_nowait(None))
        delivered = False
        try:
            while (update := await updates.get()) is not None:
                yield update
            model, shared = await task
            yield pb.LoadModelResponse(
                stage=pb.LOAD_STAGE_READY,
                bytes_done=model.context.size_bytes,
                bytes_total=model.context.size_bytes,
                model=model.to_proto(),
                shared=shared,
            )
            delivered = True
        finally:
            # The caller went away or cancelled: its share must not stay behind.
            if not delivered:
                self._service.abandon_load(task)
            del task  # the frames of an error in it hold this one: a cycle would keep them all

    @unary
    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        self._service.unload(self._session(context), request.model_id, request.name)
        return pb.UnloadModelResponse()

    @unary
    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(contexts=self._service.context_infos(history=request.all))

    @unary
    async def DescribeModel(
        self, request: pb.DescribeModelRequest, context: Context
    ) -> pb.DescribeModelResponse:
        model = self._service.model(self._session(context), request.model_id, request.name)
        return pb.DescribeModelResponse(model=model.to_proto())

    @unary
    async def CreateBinding(
        self, request: pb.CreateBindingRequest, context: Context
    ) -> pb.CreateBindingResponse:
        session = self._own_session(context, "CreateBinding")
        self._service.check_running()
        graph = self._service.models.graph(request.graph_id, session.session_id)
        binding = await session.bindings.create(
            graph,
            regions(request.inputs),
            regions(request.outputs),
            session.buffers,
            session.band if request.band == pb.BAND_UNSPECIFIED else band_of(request.band),
            zero_copy_of(request.zero_copy),
        )
        bound = binding.bound
        return pb.CreateBindingResponse(
            binding_id=binding.binding_id,
            memory_path=memory_path(bound),
            memory_detail=bound.memory_detail,
        )

    @unary
    async def ReleaseBinding(
        self, request: pb.ReleaseBindingRequest, context: Context
    ) -> pb.ReleaseBindingResponse:
        session = self._own_session(context, "ReleaseBinding")
        bound = session.bindings.release(request.binding_id)
        return pb.ReleaseBindingResponse(
            still_running=not await bound.wait_gone(RELEASE_WAIT_SECONDS)
        )

    @unary
    async def DescribeBinding(
        self, request: pb.DescribeBindingRequest, context: Context
    ) -> pb.DescribeBindingResponse:
        session = self._own_session(context, "DescribeBinding")
        return self._service.describe_binding(session, request.binding_id)

    @unary
    async def Execute(self, request: pb.ExecuteRequest, context: Context) -> pb.ExecuteResponse:
        session = self._own_session(context, "Execute")
        timing = await self._service.execute(session, request.binding_id, deadline(context))
        return pb.ExecuteResponse(timing=timing)

    @unary
    async def Infer(self, request: pb.InferRequest, context: Context) -> pb.InferResponse:
        return await self._service.infer(self._session(context), request, deadline(context))

    @unary
    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        return pb.ListSessionsResponse(sessions=self._service.session_infos())

    @unary
    async def GetStatistics(
        self, request: pb.GetStatisticsRequest, context: Context
    ) -> pb.GetStatisticsResponse:
        return self._service.statistics()

    @unary
    async def ParkBindings(
        self, request: pb.ParkBindingsRequest, context: Context
    ) -> pb.ParkBindingsResponse:
        return pb.ParkBindingsResponse(parked_count=self._service.park(request.model))

    @unary
    async def ResetBackend(
        self, request: pb.ResetBackendRequest, context: Context
    ) -> pb.ResetBackendResponse:
        return await self._service.reset_backend()

    @unary
    async def StopServer(
        self, request: pb.StopServerRequest, context: Context
    ) -> pb.StopServerResponse:
        self._service.request_stop("asked to by a client")
        return pb.StopServerResponse()


def regions(given: Iterable[pb.TensorRegion]) -> list[tuple[str, RegionRef]]:
    """The named regions of a request, as plain values."""
    return [
        (r.tensor, RegionRef(r.region.buffer_id, r.region.offset_bytes, r.region.size_bytes))
        for r in given
    ]


def zero_copy_of(number: int) -> str:
    """Our word for it; empty for the broker's own choice.

    Raises:
        InvalidRequest: no such choice.
    """
    if not pb.ZERO_COPY_UNSPECIFIED <= number <= pb.ZERO_COPY_OFF:
        raise InvalidRequest(f"zero_copy of 1 (auto) to 3 (off) wanted, found {number}")
    return ("", "auto", "require", "off")[number]


def band_of(number: int) -> int:
    """The executor's number of a band.

    Raises:
        InvalidRequest: no such band.
    """
    if not pb.BAND_LOW <= number <= pb.BAND_HIGH:
        raise InvalidRequest(f"a band of 1 (low) to 3 (high) wanted, found {number}")
    return number - pb.BAND_LOW


def deadline(context: Context) -> float | None:
    """Seconds left to the caller's deadline; None when it set none."""
    left = context.time_remaining()
    return None if left is None or left > 1e8 else max(left, 0.0)
