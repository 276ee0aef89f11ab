# SPDX-License-Identifier: Apache-2.0
"""A client without manners: frames and calls as the test wants them, right or wrong."""

import array
import itertools
import mmap
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import pytest
from google.protobuf.message import Message
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.protos import attach as frames
from qnnbroker.protos.attach import Frame, Kind, pack, unpack
from qnnbroker.protos.errors import BrokerError
from qnnbroker.protos.status import (
    ERROR_METADATA_KEY,
    SESSION_METADATA_KEY,
    from_detail,
    from_grpc,
)
from qnnbroker.v1 import attach_pb2, control_pb2_grpc, types_pb2
from qnnbroker.v1 import control_pb2 as pb

Metadata = tuple[tuple[str, str | bytes], ...]


def refusal(call: Callable[[], object]) -> BrokerError:
    """The error that a gRPC call failed with, as the client package would raise it."""
    with pytest.raises(grpc.RpcError) as failed:
        call()
    error = failed.value
    assert isinstance(error, grpc.Call)
    details = [v for k, v in error.trailing_metadata() or () if k == ERROR_METADATA_KEY]
    assert details, f"no typed detail: {error.code()} {error.details()}"
    assert isinstance(details[0], bytes)
    return from_grpc(error.code().value[0], error.details() or "", details[0])


class RawAttach:
    """One attach connection. Frames are sent as they are; what comes back is read with patience."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_SECONDS)
        try:
            self.sock.connect(str(path))
        except BaseException:
            self.sock.close()
            raise
        self.fds: list[int] = []
        self._numbers = itertools.count(1)

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """One datagram, with fds if any."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        self.sock.sendmsg([data], [rights] if fds else [])

    def receive(self) -> Frame | None:
        """The next frame; None at the end. Its fds are added to `fds`."""
        try:
            data, control, _, _ = self.sock.recvmsg(
                frames.MAX_FRAME_BYTES, socket.CMSG_SPACE(16 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return None
        for level, kind, content in control:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            got = array.array("i")
            got.frombytes(content[: len(content) // 4 * 4])
            self.fds.extend(got)
        return unpack(data) if data else None

    def ask(self, kind: int, body: Message | bytes = b"", *, flags: int = 0) -> Frame:
        """A request and its answer, which may be an error."""
        number = next(self._numbers)
        data = body if isinstance(body, bytes) else body.SerializeToString()
        self.send(pack(kind, number, data, flags))
        answer = self.receive()
        assert answer is not None, "the broker closed the connection"
        assert answer.is_answer
        assert answer.request in (number, 0)
        return answer

    def hello(self, **changes: Any) -> attach_pb2.HelloResponse:
        """The handshake; `changes` to fields of the request."""
        answer = self.ask(Kind.HELLO, hello_request(**changes))
        assert not answer.is_error, error_of(answer)
        return attach_pb2.HelloResponse.FromString(answer.body)

    def refused(self, kind: int, body: Message | bytes = b"") -> BrokerError:
        """The error that the request is answered with; the connection stays."""
        answer = self.ask(kind, body)
        assert answer.request != 0
        return error_of(answer)

    def thrown_out(self) -> BrokerError:
        """The error that the broker says before it ends the connection, which it does."""
        answer = self.receive()
        assert answer is not None, "the broker closed the connection without a word"
        while (answer.kind, answer.request) != (0, 0):
            answer = self.receive()
            assert answer is not None, "the broker closed the connection without a word"
        assert self.receive() is None
        return error_of(answer)

    def alloc(self, size: int) -> tuple[int, mmap.mmap]:
        """A buffer: its id, and a mapping."""
        answer = self.ask(Kind.ALLOC, attach_pb2.AllocRequest(size_bytes=size))
        assert not answer.is_error, error_of(answer)
        made = attach_pb2.AllocResponse.FromString(answer.body)
        fd = self.fds.pop()
        try:
            return made.buffer_id, mmap.mmap(fd, made.size_bytes)
        finally:
            os.close(fd)

    def release(self, buffer_id: int) -> None:
        answer = self.ask(Kind.RELEASE, attach_pb2.ReleaseRequest(buffer_id=buffer_id))
        assert not answer.is_error, error_of(answer)

    def close(self) -> None:
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def hello_request(**changes: Any) -> attach_pb2.HelloRequest:
    """A good HELLO, with changes."""
    return attach_pb2.HelloRequest(
        **{
            "protocol_min": frames.PROTOCOL_MIN,
            "protocol_max": frames.PROTOCOL_MAX,
            "abi_version": frames.ABI_VERSION,
            "client_name": "raw",
            **changes,
        }
    )


def error_of(answer: Frame) -> BrokerError:
    assert answer.is_error, answer
    return from_detail(types_pb2.ErrorDetail.FromString(answer.body))


class RawPeer(RawAttach):
    """An attached client with its gRPC calls."""

    def __init__(self, path: Path, stub: control_pb2_grpc.ControlServiceStub) -> None:
        super().__init__(path)
        self.stub = stub
        answer = self.hello()
        self.session_id = answer.session_id
        self.token = answer.session_token
        while self.fds:  # a ring's, which this client does not use
            os.close(self.fds.pop())

    @property
    def metadata(self) -> Metadata:
        return ((SESSION_METADATA_KEY, self.token),)

    def call(self, method: str, request: Message, timeout: float = PATIENCE_SECONDS) -> Any:
        """A unary call with the session's token."""
        return getattr(self.stub, method)(request, metadata=self.metadata, timeout=timeout)

    def refused_call(self, method: str, request: Message) -> BrokerError:
        return refusal(lambda: self.call(method, request))

    def refused_call_status(self, method: str, request: Message, timeout: float) -> grpc.StatusCode:
        """The status of a call that fails, which may be gRPC's own doing."""
        with pytest.raises(grpc.RpcError) as failed:
            self.call(method, request, timeout)
        assert isinstance(failed.value, grpc.Call)
        return failed.value.code()

    def load(self, path: Path | str, **options: Any) -> pb.LoadModelResponse:
        """The last message of a load."""
        return list(
            self.stub.LoadModel(
                pb.LoadModelRequest(path=str(path), **options),
                metadata=self.metadata,
                timeout=PATIENCE_SECONDS,
            )
        )[-1]

    def refused_load(self, path: Path | str, **options: Any) -> BrokerError:
        return refusal(lambda: self.load(path, **options))

    def bind(self, graph_id: int, inputs: "Regions", outputs: "Regions") -> int:
        answer = self.call("CreateBinding", binding_request(graph_id, inputs, outputs))
        return int(answer.binding_id)

    def execute(self, binding_id: int) -> pb.Timing:
        answer = self.call("Execute", pb.ExecuteRequest(binding_id=binding_id))
        assert isinstance(answer, pb.ExecuteResponse)
        return answer.timing


#: (tensor, buffer id, offset, size)
Regions = Iterable[tuple[str, int, int, int]]


def binding_request(graph_id: int, inputs: Regions, outputs: Regions) -> pb.CreateBindingRequest:
    def region(tensor: str, buffer_id: int, offset: int, size: int) -> pb.TensorRegion:
        place = types_pb2.BufferRef(buffer_id=buffer_id, offset_bytes=offset, size_bytes=size)
        return pb.TensorRegion(tensor=tensor, region=place)

    return pb.CreateBindingRequest(
        graph_id=graph_id,
        inputs=[region(*i) for i in inputs],
        outputs=[region(*o) for o in outputs],
    )
