# SPDX-License-Identifier: Apache-2.0
"""The client's end of the attach socket: finding it, the handshake, requests and their fds.

The connection is the session: the broker gives everything back when it sees it end.
"""

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from qnnbroker.native import fds
from qnnbroker.protos import attach as frames
from qnnbroker.protos import paths, status
from qnnbroker.protos.errors import (
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    DeadlineExpired,
    NotAllowed,
    ProtocolError,
    SessionClosed,
    VersionMismatch,
)
from qnnbroker.protos.version import VERSION
from qnnbroker.v1 import attach_pb2, types_pb2

#: Pause between tries while the broker is not there or its queue of connections is full.
RETRY_SECONDS = 0.02

#: Keeps what is open out of the garbage, where a socket may be finalised (and complain) before the
#: session that would have closed it.
_open: "set[AttachConnection]" = set()

#: Client file, broker file, doorbell, bell (WIRE.md).
RING_FDS = 4

_Message = TypeVar("_Message", bound=Message)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may hold, as the broker said. 0 means no limit."""

    max_buffer_bytes: int
    max_session_bytes: int
    max_buffers: int
    max_bindings: int
    max_in_flight: int
    max_message_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """What the broker told in the handshake."""

    session_id: int
    session_token: bytes
    grpc_path: str
    limits: Limits
    broker_version: str
    broker_pid: int
    #: The four fds of the rings; empty when the broker has none. Ours to close.
    ring_fds: tuple[int, ...]
    #: Whether it takes files that we opened.
    takes_files: bool = False


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a client asks for in the handshake."""

    client_name: str
    weight: int = 1
    band: int = 0
    ring: bool = True
    perf_mode: str = ""


class AttachConnection:
    """One attach connection, after its handshake.

    Threads: any; one request at a time is under way, the others wait.
    Fork: `abandon` it in the child, which closes the inherited fd, so that the broker sees the end
    of the parent.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._path = path
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._closing = False
        _open.add(self)

    def hello(self, wishes: Wishes, timeout: float) -> Hello:
        """The handshake; the first request of a connection.

        Raises:
            VersionMismatch: the two sides share no protocol or memory layout.
            BrokerError: what the broker answered instead.
        """
        request = attach_pb2.HelloRequest(
            protocol_min=frames.PROTOCOL_MIN,
            protocol_max=frames.PROTOCOL_MAX,
            abi_version=frames.ABI_VERSION,
            client_name=wishes.client_name,
            client_version=VERSION,
            capabilities=frames.CAPABILITY_RING if wishes.ring else 0,
            weight=wishes.weight,
            band=wishes.band,
            perf_mode=wishes.perf_mode,
        )
        body, got = self.request(
            frames.Kind.HELLO, request.SerializeToString(), timeout, fd_count=(0, RING_FDS)
        )
        try:
            return self._check_hello(parse(attach_pb2.HelloResponse, body), got)
        except BaseException:
            _close_all(got)
            raise

    def _check_hello(self, answer: attach_pb2.HelloResponse, got: list[int]) -> Hello:
        if not frames.PROTOCOL_MIN <= answer.protocol <= frames.PROTOCOL_MAX:
            raise VersionMismatch(
                f"the broker speaks attach protocol {answer.protocol}; this client speaks "
                f"{frames.PROTOCOL_MIN} to {frames.PROTOCOL_MAX}"
            )
        if answer.abi_version != frames.ABI_VERSION:
            raise VersionMismatch(
                f"the broker has memory layout {answer.abi_version}; this client has "
                f"{frames.ABI_VERSION}",
                reason="ABI_VERSION",
            )
        if len(answer.session_token) != frames.TOKEN_BYTES:
            raise ProtocolError(
                f"a session token of {len(answer.session_token)} bytes instead of "
                f"{frames.TOKEN_BYTES}"
            )
        if bool(answer.capabilities & frames.CAPABILITY_RING) != bool(got):
            raise ProtocolError(
                f"{len(got)} fds with capabilities {answer.capabilities:#x} in the handshake",
                reason="FD_COUNT",
            )
        limits = answer.limits
        return Hello(
            session_id=answer.session_id,
            session_token=answer.session_token,
            grpc_path=answer.grpc_path,
            limits=Limits(
                max_buffer_bytes=limits.max_buffer_bytes,
                max_session_bytes=limits.max_session_bytes,
                max_buffers=limits.max_buffers,
                max_bindings=limits.max_bindings,
                max_in_flight=limits.max_in_flight,
                max_message_bytes=limits.max_message_bytes,
            ),
            broker_version=answer.broker_version,
            broker_pid=answer.broker_pid,
            ring_fds=tuple(got),
            takes_files=bool(answer.capabilities & frames.CAPABILITY_LOAD_FD),
        )

    def request(
        self,
        kind: frames.Kind,
        body: bytes,
        timeout: float,
        *,
        fd_count: int | tuple[int, ...],
        send_fds: Sequence[int] = (),
    ) -> tuple[bytes, list[int]]:
        """One request and its answer: the body, and as many fds as `fd_count` says (or one of its
        numbers), which are the caller's. So are `send_fds`, which go along with the request.

        Raises:
            SessionClosed: closed here.
            BrokerLost: the broker closed the connection.
            DeadlineExpired: no answer within `timeout` seconds.
            BrokerError: the error that the broker answered.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            number = next(self._numbers)
            try:
                self._send(frames.pack(kind, number, body), deadline, send_fds)
                while True:
                    frame, got = self._receive(deadline)
                    # Request 0: an error about the connection, the last thing the broker says.
                    if frame.is_answer and frame.request in (number, 0):
                        break
                    self._drop_late(frame, got)
            except ProtocolError:
                self._end()
                raise
            except BrokerError:  # some of them are OSErrors too
                raise
            except OSError as exc:
                raise self._lost(exc) from exc
        if frame.is_error:
            _close_all(got)
            raise status.from_detail(parse(types_pb2.ErrorDetail, frame.body))
        wanted = (fd_count,) if isinstance(fd_count, int) else fd_count
        if frame.kind != kind or len(got) not in wanted:
            _close_all(got)
            raise ProtocolError(
                f"an answer of kind {frame.kind} with {len(got)} fds to a request of kind "
                f"{int(kind)}, which wants {' or '.join(map(str, wanted))}",
                reason="FD_COUNT" if frame.kind == kind else None,
            )
        return frame.body, got

    def _send(self, data: bytes, deadline: float, send_fds: Sequence[int] = ()) -> None:
        while True:
            try:
                return fds.send_frame(self._fileno(), data, send_fds)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def _receive(self, deadline: float) -> tuple[frames.Frame, list[int]]:
        while True:
            try:
                data, got = fds.recv_frame(
                    self._fileno(), frames.MAX_FRAME_BYTES, frames.MAX_FRAME_FDS
                )
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except fds.FrameTruncated as exc:
                raise ProtocolError(f"from the broker: {exc.strerror}") from exc
            if not data:
                raise self._lost(None)
            try:
                return frames.unpack(data), got
            except ProtocolError:
                _close_all(got)
                raise

    def _drop_late(self, frame: frames.Frame, got: list[int]) -> None:
        """The answer to a request that was given up; a buffer in it goes straight back."""
        _close_all(got)
        if frame.kind == frames.Kind.ALLOC and frame.is_answer and not frame.is_error:
            late = parse(attach_pb2.AllocResponse, frame.body)
            back = attach_pb2.ReleaseRequest(buffer_id=late.buffer_id).SerializeToString()
            data = frames.pack(frames.Kind.RELEASE, next(self._numbers), back)
            with contextlib.suppress(BlockingIOError):  # then it goes with the session
                fds.send_frame(self._fileno(), data)

    def _wait(self, events: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._fileno(), events)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DeadlineExpired("the broker did not answer on its attach socket", reason="CALL")

    def _fileno(self) -> int:
        number = self._sock.fileno()
        if number < 0:
            raise SessionClosed("the session is closed")
        return number

    def _lost(self, exc: OSError | None) -> BrokerLost | SessionClosed:
        if self._closing:
            return SessionClosed("the session was closed during the call")
        detail = f" ({exc.strerror})" if exc is not None else ""
        return BrokerLost(
            f"the broker behind {self._path!r} closed this session's connection{detail}"
        )

    def is_lost(self, wait: float = 0.0) -> bool:
        """Whether the broker has closed its end; waits up to `wait` seconds for that."""
        number = self._sock.fileno()
        if number < 0:
            return False
        poll = select.poll()
        poll.register(number, select.POLLRDHUP)
        return bool(poll.poll(wait * 1000))

    def lost(self) -> BrokerLost | SessionClosed:
        """The error for a caller that found `is_lost`."""
        return self._lost(None)

    def close(self) -> None:
        """Ends the session. Does nothing when closed; a request under way in a thread fails."""
        self._closing = True
        self._end()
        with self._lock:
            self._sock.close()
        _open.discard(self)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits

    def abandon(self) -> None:
        """Closes this process' fd and nothing else: the parent keeps the connection."""
        with contextlib.suppress(OSError):
            os.close(self._sock.detach())
        _open.discard(self)


def open_connection(directory: str | os.PathLike[str] | None, deadline: float) -> AttachConnection:
    """Connects to the broker of `directory` (None: the default one); no handshake yet.

    Raises:
        BrokerUnavailable: reason NO_SOCKET; nobody listens there.
        NotAllowed: the directory, or the process behind the socket, is somebody else's.
        InvalidRequest: the path is too long for a socket.
    """
    found = paths.runtime_dir() if directory is None else paths.absolute(directory)
    paths.check_socket_path(found)
    path = os.path.join(found, paths.ATTACH_SOCKET)
    return AttachConnection(_connect(found, path, deadline), path)


def _connect(directory: str, path: str, deadline: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        paths.check_private(directory)
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # the queue of connections is full
                if time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_SECONDS)
        _, uid, _ = fds.peer_credentials(sock.fileno())
        if uid not in (0, os.getuid()):
            raise NotAllowed(
                f"the broker behind {path!r} runs as uid {uid}; wanted are we "
                f"(uid {os.getuid()}) or root",
                reason="PEER_UID",
            )
        return sock
    except BaseException as exc:
        sock.close()
        if isinstance(exc, BrokerError) or not isinstance(exc, OSError):
            raise
        if isinstance(exc, (FileNotFoundError, NotADirectoryError, ConnectionRefusedError)):
            raise BrokerUnavailable(
                f"no broker listens at {path!r}; start one with `qnnbroker serve`"
            ) from None
        if isinstance(exc, PermissionError):
            raise NotAllowed(f"we may not connect to {path!r}: {exc.strerror}") from None
        raise BrokerUnavailable(f"cannot connect to {path!r}: {exc.strerror}") from exc


def parse(kind: type[_Message], body: bytes) -> _Message:
    """The message in a body that the broker sent.

    Raises:
        ProtocolError
    """
    try:
        return kind.FromString(body)
    except DecodeError as exc:
        raise ProtocolError(f"the broker sent a body that is no {kind.DESCRIPTOR.name}") from exc


def _close_all(numbers: list[int]) -> None:
    for fd in numbers:
        os.close(fd)
