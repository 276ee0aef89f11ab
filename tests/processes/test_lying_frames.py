# SPDX-License-Identifier: Apache-2.0
"""Peers that lie on the attach socket: each is told why, ends alone, and leaves nothing behind."""

import contextlib
import os
import random
import socket
import struct
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.processes.conftest import Attach, Connect
from tests.raw_peer import RawAttach, RawPeer, error_of, hello_request
from tests.waiting import wait_until

from qnnbroker.protos.attach import MAX_FRAME_BYTES, Kind, pack
from qnnbroker.protos.errors import (
    InvalidRequest,
    LeaseRevoked,
    LimitExceeded,
    NotFound,
    ProtocolError,
    Unsupported,
    VersionMismatch,
)
from qnnbroker.v1 import attach_pb2

HELLO = pack(Kind.HELLO, 1, hello_request().SerializeToString())
ALLOC = pack(Kind.ALLOC, 2, attach_pb2.AllocRequest(size_bytes=4096).SerializeToString())

BROKEN = {
    "one byte": b"Q",
    "half a header": HELLO[:8],
    "zeros": bytes(16),
    "another magic": b"KBNQ" + HELLO[4:],
    "a longer body than it says": HELLO + b"x",
    "a shorter body than it says": HELLO[:-1],
    "a length that wraps": struct.pack("<4sHHII", b"QNBK", 1, 0, 1, 2**32 - 1),
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "one byte too many": b"QNBK" + bytes(MAX_FRAME_BYTES - 3),
    "far too long": random.Random(1).randbytes(150_000),
    "an answer": pack(Kind.HELLO, 1, b"", 1),
    "an error": pack(Kind.HELLO, 1, b"", 3),
    "flags of the future": pack(Kind.HELLO, 1, b"", 0x8000),
    "no request number": pack(Kind.HELLO, 0, hello_request().SerializeToString()),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_first_frame_is_told_and_ends_the_connection(connect: Connect, name: str) -> None:
    peer = connect()
    peer.send(BROKEN[name])
    error = peer.thrown_out()
    assert isinstance(error, ProtocolError)
    assert error.reason == "BAD_FRAME"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_later_frame_ends_the_session_and_gives_its_buffers_back(
    attach: Attach, shared_broker: BrokerProcess, name: str
) -> None:
    peer = attach()
    sessions = shared_broker.counters()["sessions"]
    _, memory = peer.alloc(1 << 20)
    peer.send(BROKEN[name])
    assert isinstance(peer.thrown_out(), ProtocolError)
    shared_broker.wait_counters(sessions=sessions - 1, buffers=0)
    memory.close()


@pytest.mark.parametrize("kind", [Kind.ALLOC, Kind.RELEASE, 4, 99, 0, 65535])
def test_whatever_comes_before_hello_is_refused(connect: Connect, kind: int) -> None:
    peer = connect()
    peer.send(pack(kind, 1, b""))
    error = peer.thrown_out()
    assert isinstance(error, ProtocolError)
    assert "HELLO" in str(error)


@pytest.mark.parametrize("body", [b"\xff" * 9, b"\x2a\x02\xff\xfe", b"\x0a\xff\xff\xff\x7f"])
@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.ALLOC, Kind.RELEASE])
def test_a_body_that_is_no_message_ends_the_connection(
    connect: Connect, kind: Kind, body: bytes
) -> None:
    peer = connect()
    if kind != Kind.HELLO:
        peer.hello()
        body = b"\x08" + b"\xff" * 11
    peer.send(pack(kind, 9, body))
    error = peer.thrown_out()
    assert isinstance(error, ProtocolError)
    assert error.reason == "BAD_FRAME"


def test_a_second_hello_ends_the_session(attach: Attach) -> None:
    peer = attach()
    peer.send(HELLO)
    error = peer.thrown_out()
    assert isinstance(error, ProtocolError)
    assert "second HELLO" in str(error)


@pytest.mark.parametrize("count", [1, 16, 17, 100])
@pytest.mark.parametrize("greeted", [False, True])
def test_fds_that_nobody_asked_for_are_closed(connect: Connect, count: int, greeted: bool) -> None:
    peer = connect()
    if greeted:
        peer.hello()
    fd = os.open("/dev/null", os.O_RDONLY)
    peer.send(ALLOC if greeted else HELLO, [fd] * count)
    os.close(fd)
    error = peer.thrown_out()
    assert isinstance(error, ProtocolError)
    assert error.reason == ("FD_COUNT" if count <= 16 else "BAD_FRAME")


@pytest.mark.parametrize(
    ("numbers", "reason", "who"),
    [
        ({"protocol_min": 0, "protocol_max": 0}, "PROTOCOL_VERSION", "the client"),
        ({"protocol_min": 9000, "protocol_max": 9001}, "PROTOCOL_VERSION", "the broker"),
        ({"protocol_min": 9001, "protocol_max": 9000}, "PROTOCOL_VERSION", ""),
        ({"abi_version": 0}, "ABI_VERSION", "the client"),
        ({"abi_version": 2**32 - 1}, "ABI_VERSION", "the broker"),
    ],
)
def test_versions_that_do_not_meet_are_refused_and_say_who_is_to_upgrade(
    connect: Connect, numbers: dict[str, int], reason: str, who: str
) -> None:
    peer = connect()
    peer.send(pack(Kind.HELLO, 1, hello_request(**numbers).SerializeToString()))
    error = peer.thrown_out()
    assert isinstance(error, VersionMismatch)
    assert error.reason == reason
    assert f"upgrade {who}" in str(error)
    assert {"wanted", "found"} <= set(error.ids)


def test_a_client_that_speaks_more_than_we_do_gets_what_both_speak(connect: Connect) -> None:
    assert connect().hello(protocol_min=0, protocol_max=9000).protocol >= 1


@pytest.mark.parametrize("kind", [4, 99, 0, 65535])
def test_an_unknown_kind_is_refused_and_the_session_goes_on(attach: Attach, kind: int) -> None:
    peer = attach()
    assert isinstance(peer.refused(kind, b"anything"), Unsupported)
    peer.alloc(1)[1].close()


@pytest.mark.parametrize(
    ("size", "kind", "reason"),
    [
        (0, InvalidRequest, "INVALID_ARGUMENT"),
        ((1 << 24) + 1, LimitExceeded, "BUFFER_BYTES"),
        (2**63, LimitExceeded, "BUFFER_BYTES"),
        (2**64 - 1, LimitExceeded, "BUFFER_BYTES"),
    ],
)
def test_a_buffer_of_an_impossible_size_is_refused(
    attach: Attach, size: int, kind: type[Exception], reason: str
) -> None:
    peer = attach()
    error = peer.refused(Kind.ALLOC, attach_pb2.AllocRequest(size_bytes=size))
    assert isinstance(error, kind)
    assert error.reason == reason
    peer.alloc(1 << 24)[1].close()


def test_an_rpcmem_buffer_is_not_silently_something_else(attach: Attach) -> None:
    request = attach_pb2.AllocRequest(size_bytes=1, buffer_kind=attach_pb2.BUFFER_KIND_RPCMEM)
    assert isinstance(attach().refused(Kind.ALLOC, request), Unsupported)


def test_a_session_has_no_more_bytes_and_buffers_than_it_may(attach: Attach) -> None:
    peer = attach()
    for _ in range(4):
        peer.alloc(1 << 24)[1].close()
    error = peer.refused(Kind.ALLOC, attach_pb2.AllocRequest(size_bytes=1))
    assert isinstance(error, LimitExceeded)
    assert error.reason == "BUFFER_BYTES"
    other = attach()  # another session has limits of its own
    made = [other.alloc(1) for _ in range(40)]
    error = other.refused(Kind.ALLOC, attach_pb2.AllocRequest(size_bytes=1))
    assert error.reason == "BUFFERS"
    other.release(made[7][0])
    made.append(other.alloc(1))
    for _, memory in made:
        memory.close()


def test_ids_of_nobody_of_others_and_of_the_past_cannot_be_released(attach: Attach) -> None:
    peer, other = attach(), attach()
    theirs = [other.alloc(1)[0] for _ in range(3)]
    mine, memory = peer.alloc(1)
    for id in (0, 1, 2**32, 2**64 - 1, mine + 1, mine + 2**32, theirs[-1]):
        error = peer.refused(Kind.RELEASE, attach_pb2.ReleaseRequest(buffer_id=id))
        assert isinstance(error, NotFound), id
        assert error.reason == "BUFFER_UNKNOWN"
    peer.release(mine)
    error = peer.refused(Kind.RELEASE, attach_pb2.ReleaseRequest(buffer_id=mine))
    assert isinstance(error, LeaseRevoked)
    assert error.reason == "STALE_GENERATION"
    for id in theirs:
        other.release(id)
    memory.close()


def test_many_requests_in_one_go_are_answered_in_order(connect: Connect) -> None:
    peer = connect()
    peer.send(HELLO)
    for number in range(2, 60):
        peer.send(pack(99, number, b""))
    answers = [peer.receive() for _ in range(59)]
    assert [a and a.request for a in answers] == list(range(1, 60))


def test_a_peer_that_never_reads_holds_up_nobody(
    attach: Attach, shared_broker: BrokerProcess
) -> None:
    deaf, other = attach(), attach()
    deaf.sock.settimeout(0)
    ask = pack(Kind.ALLOC, 9, attach_pb2.AllocRequest(size_bytes=1).SerializeToString())
    with contextlib.suppress(BlockingIOError):
        while True:
            deaf.send(ask)
    for _ in range(20):
        id, memory = other.alloc(1)
        other.release(id)
        memory.close()
        assert shared_broker.counters()["sessions"] == 2


def test_connections_that_come_and_go_at_once_leave_nothing(
    connect: Connect, shared_broker: BrokerProcess
) -> None:
    for turn in range(100):
        peer = connect()
        if turn % 4 == 1:
            peer.send(HELLO)
        elif turn % 4 == 2:
            peer.send(HELLO)
            peer.send(ALLOC)
        elif turn % 4 == 3:
            peer.send(HELLO)
            peer.sock.shutdown(socket.SHUT_RD)
        peer.close()


def test_a_half_closed_connection_is_at_its_end(attach: Attach) -> None:
    peer = attach()
    peer.sock.shutdown(socket.SHUT_WR)
    assert peer.receive() is None


def test_an_empty_datagram_is_the_end(attach: Attach) -> None:
    peer = attach()
    peer.send(b"")
    assert peer.receive() is None


def test_a_name_cannot_forge_lines_of_the_log(
    connect: Connect, shared_broker: BrokerProcess
) -> None:
    name = "x\n2026-01-01 ERROR forged\x1b[2J" + "y" * 300
    connect().hello(client_name=name)
    wait_until(lambda: "forged" in shared_broker.log(), "the session is in the log")
    line = next(x for x in shared_broker.log().splitlines() if "forged" in x)
    assert line.count("x?2026-01-01") == 1
    assert "\x1b" not in line
    assert "y" * 120 not in line


def test_one_that_says_nothing_is_given_up(start_broker: StartBroker) -> None:
    broker = start_broker(hello_timeout_seconds=0.2)
    before = broker.gauges()
    with RawAttach(broker.attach_path) as silent, RawAttach(broker.attach_path) as talker:
        talker.hello()
        assert silent.receive() is None
        talker.alloc(1)[1].close()
    broker.wait_gauges(before)


def test_there_are_no_more_sessions_than_allowed(start_broker: StartBroker) -> None:
    broker = start_broker(max_sessions=2)
    with RawPeer(broker.attach_path, broker.stub), RawAttach(broker.attach_path) as refused:
        second = RawPeer(broker.attach_path, broker.stub)
        answer = refused.ask(Kind.HELLO, hello_request())
        error = error_of(answer)
        assert isinstance(error, LimitExceeded)
        assert error.reason == "SESSIONS"
        assert refused.receive() is None
        second.close()
        broker.wait_counters(sessions=1)
        RawPeer(broker.attach_path, broker.stub).close()


def test_five_hundred_random_frames_hurt_nobody_else(
    attach: Attach, shared_broker: BrokerProcess, adder_path: Path
) -> None:
    rng = random.Random(20)
    bystander = attach()
    graph = bystander.load(adder_path).model.graphs[0]
    buffer, memory = bystander.alloc(4096)
    binding = bystander.bind(
        graph.graph_id, [("a", buffer, 0, 128), ("b", buffer, 128, 128)], [("y", buffer, 256, 128)]
    )
    good = [
        HELLO,
        ALLOC,
        pack(Kind.RELEASE, 3, attach_pb2.ReleaseRequest(buffer_id=1 << 32 | 1).SerializeToString()),
        pack(99, 4, rng.randbytes(50)),
    ]
    liar: RawAttach | None = None
    for turn in range(500):
        if liar is None or rng.random() < 0.1:
            if liar is not None:
                liar.close()
            liar = RawAttach(shared_broker.attach_path)
            liar.sock.settimeout(0)
            if rng.random() < 0.8:
                liar.send(HELLO)
        random_bytes = rng.randbytes(rng.randrange(99))
        frame = bytearray(rng.choice(good) if rng.random() < 0.9 else random_bytes)
        for _ in range(rng.randrange(4)):
            if frame:
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            liar.send(bytes(frame))
            while liar.receive() is not None:
                pass
        except BlockingIOError:
            pass
        except OSError:
            liar.close()
            liar = None
        if turn % 50 == 0:
            bystander.execute(binding)
    if liar is not None:
        liar.close()
    bystander.execute(binding)
    memory.close()
