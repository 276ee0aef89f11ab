# SPDX-License-Identifier: Apache-2.0
"""Requests as they come: unpacked here, and what is none is refused with a status.

gRPC would write a traceback to the log for each, and tell the caller UNKNOWN.
"""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from qnnbroker.protos.errors import InvalidRequest
from qnnbroker.v1 import control_pb2 as pb

from .control import Context, ControlServicer, Failure, failure

log = logging.getLogger(__name__)

#: How often a line is written that any client can cause as often as it likes.
SELDOM_SECONDS = 60.0


class Seldom:
    """How often something is worth a line in the log."""

    def __init__(
        self, seconds: float = SELDOM_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._next = float("-inf")
        self._count = 0

    def due(self) -> int:
        """It happened: how often since the last line, if now is the time for one; else 0."""
        self._count += 1
        if (now := self._clock()) < self._next:
            return 0
        self._next = now + self._seconds
        count, self._count = self._count, 0
        return count


class _Method:
    """One method of the service, and what its requests are."""

    def __init__(self, method: MethodDescriptor, servicer: ControlServicer) -> None:
        self._name = method.name
        self._wanted = method.input_type.full_name
        self._unpack: Callable[[bytes], Message] = GetMessageClass(method.input_type).FromString
        self._handle: Callable[[Message, Context], Any] = getattr(servicer, method.name)
        self._worth_a_line = Seldom()

    def _start(self, raw: bytes, context: Context) -> Any:
        """What the servicer makes of the request; or why there is none. Keeps neither."""
        try:
            request = self._unpack(raw)
        except DecodeError:
            return self._refusal(len(raw))
        return self._handle(request, context)

    def _refusal(self, size: int) -> Failure:
        if count := self._worth_a_line.due():
            more = f" ({count - 1} more since the last line)" if count > 1 else ""
            log.warning(
                "%s: refused %d bytes that are no %s%s", self._name, size, self._wanted, more
            )
        return failure(
            InvalidRequest(
                f"{self._name}: a {self._wanted} wanted, found {size} bytes that are none"
            ),
            self._name,
        )

    async def unary(self, raw: bytes, context: Context) -> Message:
        """Handles a call with one answer."""
        started: Awaitable[Message] | Failure = self._start(raw, context)
        del raw  # the exception of an abort keeps this frame, see control.py
        if isinstance(started, tuple):
            await context.abort(*started)
        answer: Message = await started
        return answer

    async def streamed(self, raw: bytes, context: Context) -> AsyncIterator[Message]:
        """Handles a call with many answers."""
        started: AsyncGenerator[Message, None] | Failure = self._start(raw, context)
        del raw
        if isinstance(started, tuple):
            await context.abort(*started)
        async with contextlib.aclosing(started) as answers:
            async for answer in answers:
                yield answer


def add_servicer(servicer: ControlServicer, server: grpc.aio.Server) -> None:
    """Makes the server serve all methods of the service."""
    service = pb.DESCRIPTOR.services_by_name["ControlService"]
    methods: Iterable[MethodDescriptor] = service.methods
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in methods:
        serialize = GetMessageClass(method.output_type).SerializeToString
        ours = _Method(method, servicer)
        if method.server_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                ours.streamed, None, serialize
            )
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(ours.unary, None, serialize)
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))
