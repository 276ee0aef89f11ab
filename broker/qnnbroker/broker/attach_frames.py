# SPDX-License-Identifier: Apache-2.0
"""What the frames of the attach socket ask for: checked, done, answered."""

import os
from typing import TypeVar

from google.protobuf.message import Message

from qnnbroker.protos.attach import ABI_VERSION, PROTOCOL_MAX, PROTOCOL_MIN, Frame, Kind
from qnnbroker.protos.errors import InvalidRequest, ProtocolError, Unsupported, VersionMismatch
from qnnbroker.v1 import attach_pb2

from .sessions import Session

#: How many fds may come with a frame of a kind; none with the others.
FDS_OF_REQUESTS = {int(Kind.LOADFD): 1}


async def answer_to(session: Session, frame: Frame, received: list[int]) -> tuple[bytes, list[int]]:
    """Does what a frame asks for: the body of the answer, and fds that stay their owner's.

    Args:
        received: what came with it; ours to close.

    Raises:
        ProtocolError: the session has to end.
        BrokerError: to be told to the client.
    """
    try:
        if frame.kind == Kind.LOADFD:
            return await load_fd(session, frame, received), []
    finally:
        while received:
            os.close(received.pop())
    if frame.kind == Kind.ALLOC:
        alloc = parse(attach_pb2.AllocRequest, frame)
        buffer = await session.buffers.allocate(alloc.size_bytes, alloc.buffer_kind)
        answer = attach_pb2.AllocResponse(
            buffer_id=buffer.buffer_id,
            size_bytes=buffer.size_bytes,
            buffer_kind=buffer.kind,  # type: ignore[arg-type]
        )
        return answer.SerializeToString(), [buffer.region.fileno()]
    if frame.kind == Kind.RELEASE:
        session.buffers.release(parse(attach_pb2.ReleaseRequest, frame).buffer_id)
        return b"", []
    if frame.kind == Kind.HELLO:
        raise ProtocolError("a second HELLO on one connection")
    raise Unsupported(f"this broker knows no attach frame of kind {frame.kind}")


async def load_fd(session: Session, frame: Frame, received: list[int]) -> bytes:
    """A model file that the client opened; what else is wanted of it.

    Raises:
        BrokerError: by what is wrong with it.
    """
    request = parse(attach_pb2.LoadFdRequest, frame)
    fd = received.pop() if received else None
    if request.file_id:
        file_id, wanted = request.file_id, session.files.add(request.file_id, request.path, fd)
    elif fd is None:
        raise InvalidRequest("a model file is handed over as a descriptor, found none")
    else:
        file_id, wanted = await session.files.begin(request.path, fd)
    return attach_pb2.LoadFdResponse(
        file_id=file_id,
        wanted=[attach_pb2.WantedFile(name=name, optional=may) for name, may in wanted],
    ).SerializeToString()


def check_request(frame: Frame) -> Frame:
    """A frame that may be asked of us.

    Raises:
        ProtocolError: reason BAD_FRAME; flags, or no request number (an answer to it would look
            like an error about the connection).
    """
    if frame.flags:
        raise ProtocolError(f"a request has no flags, found {frame.flags:#x}")
    if not frame.request:
        raise ProtocolError("a request needs a number that is not 0")
    return frame


M = TypeVar("M", bound=Message)


def parse(kind: type[M], frame: Frame) -> M:
    """The body of a frame.

    Raises:
        ProtocolError: reason BAD_FRAME.
    """
    message = kind()
    try:
        message.ParseFromString(frame.body)
    except Exception as error:  # protobuf's DecodeError, or text that is not UTF-8
        raise ProtocolError(f"the body of a frame of kind {frame.kind} is malformed") from error
    return message


def check_versions(hello: attach_pb2.HelloRequest) -> None:
    """Refuses a client that shares no protocol number or memory layout with us.

    Raises:
        VersionMismatch: says both sides' numbers and which one to upgrade.
    """
    low, high = hello.protocol_min, hello.protocol_max
    if low > high or low > PROTOCOL_MAX or high < PROTOCOL_MIN:
        older = "the client" if high < PROTOCOL_MIN else "the broker"
        raise VersionMismatch(
            f"the broker speaks attach protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}, the client "
            f"{low} to {high}: upgrade {older}",
            wanted=f"{PROTOCOL_MIN}-{PROTOCOL_MAX}",
            found=f"{low}-{high}",
        )
    if hello.abi_version != ABI_VERSION:
        older = "the client" if hello.abi_version < ABI_VERSION else "the broker"
        raise VersionMismatch(
            f"the broker has shared-memory layout {ABI_VERSION}, the client {hello.abi_version}: "
            f"upgrade {older}",
            reason="ABI_VERSION",
            wanted=ABI_VERSION,
            found=hello.abi_version,
        )
