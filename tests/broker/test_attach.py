# SPDX-License-Identifier: Apache-2.0
"""The attach socket's own parts: listeners, versions, requests, and peers that do not read."""

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broker.inside import go, until
from tests.raw_peer import hello_request

from qnnbroker.broker import attach
from qnnbroker.broker.attach import Connection, bind_listener, inherit_listener
from qnnbroker.broker.attach_frames import check_request, check_versions, parse
from qnnbroker.protos.attach import (
    ABI_VERSION,
    MAX_FRAME_BYTES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Frame,
    Kind,
    pack,
    unpack,
)
from qnnbroker.protos.errors import ProtocolError, VersionMismatch
from qnnbroker.v1 import attach_pb2

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_a_listener_takes_the_place_of_a_dead_one(runtime_dir: Path) -> None:
    path = runtime_dir / "attach.sock"
    for _ in range(2):
        listener = bind_listener(path)
        info = path.lstat()
        assert stat.S_ISSOCK(info.st_mode)
        assert stat.S_IMODE(info.st_mode) == 0o600
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
        listener.close()
    assert os.listdir(runtime_dir) == ["attach.sock"]


def test_a_listener_that_cannot_be_bound_leaves_nothing(runtime_dir: Path) -> None:
    (runtime_dir / "attach.sock").mkdir()
    with pytest.raises(OSError, match="directory"):
        bind_listener(runtime_dir / "attach.sock")
    assert os.listdir(runtime_dir) == ["attach.sock"]


def test_an_inherited_listener_is_not_inherited_further(runtime_dir: Path) -> None:
    with bind_listener(runtime_dir / "attach.sock") as owner:
        fd = os.dup(owner.fileno())
        os.set_inheritable(fd, True)
        with inherit_listener(fd) as listener:
            assert listener.fileno() == fd
            assert not os.get_inheritable(fd)


def test_what_is_no_listener_stays_with_its_owner(
    pair: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    with open(tmp_path / "file", "w") as file:
        for fd in (pair[0].fileno(), file.fileno()):
            with pytest.raises(ProtocolError, match=f"fd {fd} "):
                inherit_listener(fd)
            os.fstat(fd)
    with pytest.raises(ProtocolError, match="not a socket"):
        inherit_listener(10_000)


@pytest.mark.parametrize(
    ("low", "high", "older"),
    [
        (PROTOCOL_MAX + 1, PROTOCOL_MAX + 5, "the broker"),
        (0, PROTOCOL_MIN - 1, "the client"),
        (2**32 - 1, 2**32 - 1, "the broker"),
    ],
)
def test_a_version_error_names_both_sides_and_the_older_one(
    low: int, high: int, older: str
) -> None:
    with pytest.raises(VersionMismatch) as wrong:
        check_versions(hello_request(protocol_min=low, protocol_max=high))
    assert f"upgrade {older}" in str(wrong.value)
    assert wrong.value.ids == {"wanted": f"{PROTOCOL_MIN}-{PROTOCOL_MAX}", "found": f"{low}-{high}"}


def test_another_memory_layout_is_refused() -> None:
    for number, older in ((ABI_VERSION - 1, "the client"), (ABI_VERSION + 1, "the broker")):
        with pytest.raises(VersionMismatch, match=f"upgrade {older}") as wrong:
            check_versions(hello_request(abi_version=number))
        assert wrong.value.reason == "ABI_VERSION"
    check_versions(hello_request())


def test_only_a_request_is_a_request() -> None:
    assert check_request(Frame(1, 0, 1, b"")).request == 1
    for flags, number in ((1, 1), (2, 1), (3, 1), (0x8000, 1), (0, 0)):
        with pytest.raises(ProtocolError) as wrong:
            check_request(Frame(1, flags, number, b""))
        assert wrong.value.reason == "BAD_FRAME"


@pytest.mark.parametrize("body", [b"\x08", b"\x0a\xff", b"\x2a\x01\xff"])
def test_a_body_that_is_no_message_breaks_the_protocol(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        parse(attach_pb2.HelloRequest, Frame(1, 0, 1, body))


def test_a_connection_knows_its_peer_and_when_it_ends(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    async def work() -> None:
        connection = Connection(pair[0].dup())
        assert (connection.peer.pid, connection.peer.uid) == (os.getpid(), os.getuid())
        pair[1].send(pack(Kind.ALLOC, 7, b"body"))
        assert await connection.receive() == Frame(Kind.ALLOC, 0, 7, b"body")
        waiting = asyncio.create_task(connection.receive())
        await asyncio.sleep(0)
        pair[1].close()
        assert await waiting is None
        connection.close()
        connection.close()

    go(work)


def test_an_answer_waits_for_room_and_not_for_ever(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        connection = Connection(pair[0].dup())
        request = Frame(Kind.ALLOC, 0, 3, b"")
        body = bytes(MAX_FRAME_BYTES - 16)
        sent = 0

        async def fill() -> None:
            nonlocal sent
            while True:
                await connection.send(request, body)
                sent += 1

        filling = asyncio.create_task(fill())
        await until(lambda: sent, "something is sent")
        last = -1
        while last != sent:  # until it waits
            last = sent
            await asyncio.sleep(0)
        for _ in range(last):  # a socket has room again when most of it is read
            assert unpack(pair[1].recv(MAX_FRAME_BYTES)).request == 3
        await until(lambda: sent > last, "there was room again")
        filling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await filling
        monkeypatch.setattr(attach, "SEND_TIMEOUT_SECONDS", 0.05)
        with pytest.raises(TimeoutError):
            await fill()
        await connection.refuse(ProtocolError("never fails"))
        connection.close()

    go(work)
