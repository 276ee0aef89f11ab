# SPDX-License-Identifier: Apache-2.0
"""Buffers: views without copies that no release can pull away."""

import gc
import os
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

from qnnbroker.client import (
    BrokerError,
    InvalidRequest,
    LeaseRevoked,
    LimitExceeded,
    ProtocolError,
    Session,
    SessionClosed,
    Unsupported,
    attach,
)
from qnnbroker.native import fds
from qnnbroker.native.counters import live_counts
from qnnbroker.native.region import Region
from qnnbroker.protos import attach as frames
from qnnbroker.v1 import attach_pb2

from .conftest import held


def test_a_buffer_is_zeroed_whole_pages_and_writable(session: Session) -> None:
    with session.alloc(5000) as buffer:
        assert buffer.size_bytes == 8192
        assert bytes(memoryview(buffer.region)) == bytes(8192)
        buffer.numpy(np.float32, (2, 3), 128)[:] = 7
        assert buffer.numpy(np.uint8, 8192).any()
        assert held(session)["buffers"] == 1
    assert held(session)["buffers"] == 0
    assert buffer.released


def test_an_array_covers_exactly_its_bytes(session: Session) -> None:
    with session.alloc(4096) as buffer:
        array = buffer.numpy("int16", [2, 2], offset=4088)
        array[:] = [[1, 2], [3, -1]]
        assert bytes(buffer.region.view(4088, 8)) == b"\1\0\2\0\3\0\xff\xff"
        assert buffer.numpy(np.bool_, (0, 5)).shape == (0, 5)
        assert buffer.numpy(np.float64, ()).shape == ()
        del array


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ((np.float32, 1025), InvalidRequest, "BAD_OFFSET"),
        ((np.float32, 1, 4096), InvalidRequest, "BAD_OFFSET"),
        ((np.float32, (2**40, 2**40)), InvalidRequest, "BAD_OFFSET"),
        ((np.float32, 1, -4), InvalidRequest, "BAD_OFFSET"),
        ((np.float32, 1, 2), InvalidRequest, "BAD_ALIGNMENT"),
        ((np.float32, -1), InvalidRequest, "INVALID_ARGUMENT"),
        ((np.complex64, 1), Unsupported, "DTYPE"),
        ((object, 1), Unsupported, "DTYPE"),
    ],
)
def test_an_array_that_is_not_in_the_buffer_is_refused(
    session: Session, arguments: tuple[object, ...], error: type[BrokerError], reason: str
) -> None:
    with session.alloc(4096) as buffer, pytest.raises(error) as info:
        buffer.numpy(*arguments)  # type: ignore[arg-type]
    assert info.value.reason == reason


def test_a_buffer_with_a_live_view_refuses_to_be_released(session: Session) -> None:
    buffer = session.alloc(10)
    array = buffer.numpy(np.uint8, 10)
    with pytest.raises(BufferError, match="live view"):
        buffer.release()
    assert not buffer.released
    assert held(session)["buffers"] == 1
    array[:] = 1
    del array
    buffer.release()
    buffer.release()
    with pytest.raises(LeaseRevoked, match=f"buffer {buffer.buffer_id} is released"):
        buffer.numpy(np.uint8, 1)


def test_a_dropped_buffer_leaves_its_views_readable(session: Session) -> None:
    gc.collect()
    before = live_counts()["regions"]
    buffer = session.alloc(10)
    array = buffer.numpy(np.uint8, 10)
    array[:] = 5
    buffer.drop()
    buffer.drop()
    assert held(session)["buffers"] == 0
    assert array.sum() == 50
    del array
    assert live_counts()["regions"] == before


def test_views_outlive_the_session_readable(session: Session) -> None:
    buffer = session.alloc(10)
    array = buffer.numpy(np.uint8, 10)
    array[:] = 3
    session.close()
    assert array.sum() == 30
    assert buffer.released
    buffer.release()
    with pytest.raises(SessionClosed):
        buffer.numpy(np.uint8, 1)


def test_an_error_inside_with_is_not_hidden_by_a_live_view(session: Session) -> None:
    kept = []

    def fail() -> None:
        kept.append(buffer.numpy(np.uint8, 10))
        raise RuntimeError("the cause")

    with pytest.raises(RuntimeError, match="the cause"), session.alloc(10) as buffer:
        fail()
    assert kept[0].sum() == 0


@pytest.mark.parametrize("size", [0, -1, 2**64])
def test_a_size_that_makes_no_sense_is_refused_here(session: Session, size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{size} bytes"):
        session.alloc(size)


def test_more_than_the_limit_is_refused_by_the_broker(session: Session) -> None:
    limit = session.limits.max_buffer_bytes
    with pytest.raises(LimitExceeded) as info:
        session.alloc(limit + 1)
    assert info.value.reason == "BUFFER_BYTES"


def test_a_forgotten_buffer_goes_with_the_session(session: Session) -> None:
    gc.collect()
    before = live_counts()["regions"]
    session.alloc(10).numpy(np.uint8, 10)[:] = 1
    assert live_counts()["regions"] == before + 1
    session.close()
    assert live_counts()["regions"] == before - 2  # the buffer, and the two files of the ring


# --- a broker that lies


Lender = Callable[[], tuple[int, int]]


def lend_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.close(writer)
    return reader, 4096


def lend_unsealed() -> tuple[int, int]:
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096)
    return memory, 4096


def lend_too_little() -> tuple[int, int]:
    with Region.create(4096) as region:
        return os.dup(region.fileno()), 8192


def lend_less_than_asked_for() -> tuple[int, int]:
    with Region.create(4096) as region:
        return os.dup(region.fileno()), 4096


@pytest.mark.parametrize(
    ("lender", "message"),
    [
        (lend_pipe, "seals"),
        (lend_unsealed, "seals 0x0"),
        (lend_too_little, "4096 bytes; 8192 are wanted"),
        (lend_less_than_asked_for, "4096 bytes; 5000 are wanted"),
    ],
)
def test_memory_that_is_not_what_it_should_be_is_refused(lender: Lender, message: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    number, size_bytes = lender()

    def lend() -> None:
        asked = frames.unpack(fds.recv_frame(theirs.fileno(), 1000, 0)[0])
        body = attach_pb2.AllocResponse(buffer_id=1, size_bytes=size_bytes).SerializeToString()
        data = frames.pack(asked.kind, asked.request, body, frames.FLAG_ANSWER)
        fds.send_frame(theirs.fileno(), data, [number])

    thread = threading.Thread(target=lend)
    thread.start()
    limits = attach.Limits(0, 0, 0, 0, 0, 0)
    connection = attach.AttachConnection(ours, "/run/attach.sock")
    with Session(connection, attach.Hello(1, bytes(16), "/none", limits, "", 1, ())) as session:
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(ProtocolError, match=message):
            session.alloc(5000)
        assert sorted(os.listdir("/proc/self/fd")) == before
    thread.join()
    theirs.close()
    os.close(number)
