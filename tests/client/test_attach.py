# SPDX-License-Identifier: Apache-2.0
"""The attach connection against brokers that are absent, slow, wrong or lying."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qnnbroker.client import attach
from qnnbroker.native import fds
from qnnbroker.protos import attach as frames
from qnnbroker.protos import paths, status
from qnnbroker.protos.errors import (
    BrokerError,
    BrokerLost,
    BrokerUnavailable,
    DeadlineExpired,
    InvalidRequest,
    LimitExceeded,
    NotAllowed,
    ProtocolError,
    SessionClosed,
    VersionMismatch,
)
from qnnbroker.v1 import attach_pb2

ANSWER, ERROR = frames.FLAG_ANSWER, frames.FLAG_ERROR


@pytest.fixture(autouse=True)
def nothing_is_left(no_leaks: None) -> None:
    """Of any of these."""


@pytest.fixture
def pair() -> Iterator[tuple[attach.AttachConnection, socket.socket]]:
    """A connection whose broker is the test."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    connection = attach.AttachConnection(ours, "/run/attach.sock")
    with theirs:
        yield connection, theirs
        connection.close()


Pair = tuple[attach.AttachConnection, socket.socket]


def answering(theirs: socket.socket, *answers: Callable[[frames.Frame], None]) -> threading.Thread:
    """A thread that meets each request with the next of `answers`."""

    def work() -> None:
        for answer in answers:
            data, _ = fds.recv_frame(theirs.fileno(), frames.MAX_FRAME_BYTES, 16)
            answer(frames.unpack(data))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def good_hello(**changes: object) -> attach_pb2.HelloResponse:
    fields: dict[str, object] = {
        "protocol": frames.PROTOCOL_MAX,
        "abi_version": frames.ABI_VERSION,
        "session_token": bytes(16),
        "session_id": 7,
    }
    return attach_pb2.HelloResponse(**(fields | changes))  # type: ignore[arg-type]


def hello(pair: Pair, response: attach_pb2.HelloResponse, numbers: list[int]) -> attach.Hello:
    connection, theirs = pair

    def answer(frame: frames.Frame) -> None:
        body = response.SerializeToString()
        data = frames.pack(frame.kind, frame.request, body, ANSWER)
        fds.send_frame(theirs.fileno(), data, numbers)

    thread = answering(theirs, answer)
    try:
        return connection.hello(attach.Wishes("test"), 30)
    finally:
        thread.join()


# --- finding it


def test_without_a_broker_the_error_names_the_path_and_the_command(runtime_dir: Path) -> None:
    for directory in (runtime_dir, runtime_dir / "missing", runtime_dir / "missing" / "twice"):
        with pytest.raises(BrokerUnavailable, match="qnnbroker serve") as info:
            attach.open_connection(directory, 0)
        assert info.value.reason == "NO_SOCKET"
        assert info.value.__suppress_context__  # one message, not two tracebacks
        assert str(directory / "attach.sock") in str(info.value)


def test_the_socket_of_a_dead_broker_is_no_broker(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(runtime_dir / paths.ATTACH_SOCKET))
    with pytest.raises(BrokerUnavailable, match="no broker listens"):
        attach.open_connection(runtime_dir, 0)


def test_a_socket_of_another_kind_is_no_broker(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(runtime_dir / paths.ATTACH_SOCKET))
        other.listen()
        with pytest.raises(BrokerUnavailable, match="wrong type"):
            attach.open_connection(runtime_dir, 0)


def test_a_directory_that_others_can_enter_is_not_trusted(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime_dir / paths.ATTACH_SOCKET))
        listener.listen()
        runtime_dir.chmod(0o755)
        with pytest.raises(NotAllowed, match="0755"):
            attach.open_connection(runtime_dir, 0)


def test_a_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="107"):
        attach.open_connection(Path("/tmp") / ("x" * 100), 0)


def test_a_broker_that_accepts_nobody_is_unavailable(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(runtime_dir / paths.ATTACH_SOCKET))
        listener.listen(0)
        first = attach.open_connection(runtime_dir, 0)
        with pytest.raises(BrokerUnavailable, match="Resource temporarily"):
            attach.open_connection(runtime_dir, 0)
        first.close()


# --- the handshake


def test_a_good_handshake_tells_session_and_limits(pair: Pair) -> None:
    limits = attach_pb2.Limits(max_buffers=3)
    told = hello(pair, good_hello(grpc_path="/x", limits=limits), [])
    assert told.session_id == 7
    assert told.session_token == bytes(16)
    assert told.grpc_path == "/x"
    assert told.limits == attach.Limits(0, 0, 3, 0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "error", "reason", "message"),
    [
        ({"protocol": 9}, VersionMismatch, "PROTOCOL_VERSION", "attach protocol 9"),
        ({"protocol": 0}, VersionMismatch, "PROTOCOL_VERSION", "attach protocol 0"),
        ({"abi_version": 9}, VersionMismatch, "ABI_VERSION", "memory layout 9"),
        ({"session_token": b"short"}, ProtocolError, "BAD_FRAME", "token of 5 bytes"),
    ],
)
def test_a_broker_that_does_not_fit_is_refused(
    pair: Pair,
    changes: dict[str, object],
    error: type[BrokerError],
    reason: str,
    message: str,
) -> None:
    with pytest.raises(error, match=message) as info:
        hello(pair, good_hello(**changes), [])
    assert info.value.reason == reason


def test_fds_that_nobody_asked_for_are_closed(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="2 fds") as info:
        hello(pair, good_hello(), [0, 0])
    assert info.value.reason == "FD_COUNT"


# --- requests


def alloc(pair: Pair, timeout: float = 30.0) -> tuple[bytes, list[int]]:
    return pair[0].request(frames.Kind.ALLOC, b"", timeout, fd_count=1)


def test_an_error_frame_is_raised_as_the_exception_it_names(pair: Pair) -> None:
    def refuse(frame: frames.Frame) -> None:
        error = LimitExceeded("too many buffers", reason="BUFFERS", wanted=2)
        body = status.to_detail(error).SerializeToString()
        data = frames.pack(frame.kind, frame.request, body, ANSWER | ERROR)
        fds.send_frame(pair[1].fileno(), data, [0])  # an fd that has no business here

    thread = answering(pair[1], refuse)
    with pytest.raises(LimitExceeded, match="too many buffers") as info:
        alloc(pair)
    thread.join()
    assert info.value.reason == "BUFFERS"
    assert info.value.ids == {"wanted": "2"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"?", "1 bytes"),
        (b"NOPE" + bytes(12), "NOPE"),
        (frames.pack(2, 1, b"", ANSWER)[:-1], "15 bytes"),
        (frames.pack(3, 1, b"", ANSWER), "kind 3"),
        (frames.pack(2, 1, b"\xff\xff", ANSWER | ERROR), "ErrorDetail"),
        (bytes(frames.MAX_FRAME_BYTES + 1), "exceeds 65536 bytes"),
    ],
)
def test_rubbish_from_the_broker_is_a_protocol_error_and_leaks_no_fd(
    pair: Pair, raw: bytes, message: str
) -> None:
    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    thread = answering(pair[1], lambda _: fds.send_frame(pair[1].fileno(), raw, [0]))
    with pytest.raises(ProtocolError, match=message):
        alloc(pair)
    thread.join()


def test_a_buffer_that_comes_too_late_goes_straight_back(pair: Pair) -> None:
    connection, theirs = pair
    with pytest.raises(DeadlineExpired) as info:
        alloc(pair, timeout=0)
    assert info.value.reason == "CALL"
    late = frames.unpack(fds.recv_frame(theirs.fileno(), 1000, 0)[0])
    body = attach_pb2.AllocResponse(buffer_id=12).SerializeToString()
    fds.send_frame(theirs.fileno(), frames.pack(2, late.request, body, ANSWER), [0])
    released: list[int] = []

    def second(frame: frames.Frame) -> None:
        back = frames.unpack(fds.recv_frame(theirs.fileno(), 1000, 0)[0])
        assert back.kind == frames.Kind.RELEASE
        released.append(attach_pb2.ReleaseRequest.FromString(back.body).buffer_id)
        for one in (back, frame):
            fds.send_frame(theirs.fileno(), frames.pack(one.kind, one.request, b"", ANSWER))

    thread = answering(theirs, second)
    assert connection.request(frames.Kind.RELEASE, b"", 30, fd_count=0) == (b"", [])
    thread.join()
    assert released == [12]


def test_a_broker_that_goes_away_during_a_request_is_lost(pair: Pair) -> None:
    thread = answering(pair[1], lambda _: pair[1].shutdown(socket.SHUT_RDWR))
    assert not pair[0].is_lost()
    with pytest.raises(BrokerLost, match=r"/run/attach\.sock"):
        alloc(pair)
    thread.join()
    assert pair[0].is_lost()
    with pytest.raises(BrokerLost):
        alloc(pair)


def test_closing_ends_a_request_in_another_thread(pair: Pair) -> None:
    thread = answering(pair[1], lambda _: pair[0].close())
    with pytest.raises(SessionClosed, match="closed during the call"):
        alloc(pair)
    thread.join()
    with pytest.raises(SessionClosed):
        alloc(pair)


def test_requests_of_several_threads_do_not_mix(pair: Pair) -> None:
    def echo(frame: frames.Frame) -> None:
        data = frames.pack(frame.kind, frame.request, frame.body, ANSWER)
        fds.send_frame(pair[1].fileno(), data)

    broker = answering(pair[1], *[echo] * 80)
    wrong: list[bytes] = []

    def ask(number: int) -> None:
        for i in range(20):
            body = b"%d %d" % (number, i)
            if pair[0].request(frames.Kind.RELEASE, body, 30, fd_count=0)[0] != body:
                wrong.append(body)

    threads = [threading.Thread(target=ask, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in [*threads, broker]:
        thread.join()
    assert wrong == []
