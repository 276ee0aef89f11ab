# SPDX-License-Identifier: Apache-2.0
"""Frames with file descriptors: what arrives, what is refused, and that no fd is ever left over."""

import array
import errno
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from qnnbroker.native import fds

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(autouse=True)
def no_fd_leaks() -> Iterator[None]:
    """The open fds after each test are those before it."""
    before = sorted(os.listdir("/proc/self/fd"))
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        yield left, right


@pytest.fixture
def some_fds() -> Iterator[list[int]]:
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
    yield opened
    for fd in opened:
        os.close(fd)


def close_all(numbers: list[int]) -> None:
    for fd in numbers:
        os.close(fd)


def test_a_frame_arrives_whole_and_alone(pair: Pair) -> None:
    left, right = pair
    fds.send_frame(left.fileno(), b"first")
    fds.send_frame(left.fileno(), b"second")
    assert fds.recv_frame(right.fileno(), 100, 0) == (b"first", [])
    assert fds.recv_frame(right.fileno(), 6, 0) == (b"second", [])


def test_fds_arrive_as_close_on_exec_duplicates_and_the_sender_keeps_its_own(
    pair: Pair,
) -> None:
    left, right = pair
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    fds.send_frame(left.fileno(), b"x", [writer, writer])
    data, got = fds.recv_frame(right.fileno(), 10, 2)
    assert data == b"x"
    assert len({*got, writer}) == 3
    assert not any(os.get_inheritable(fd) for fd in got)
    for fd in [*got, writer]:
        os.write(fd, b"!")
        os.close(fd)
    assert os.read(reader, 10) == b"!!!"
    assert os.read(reader, 10) == b""  # no writer is left anywhere
    os.close(reader)


def test_as_many_fds_as_the_kernel_takes_go_in_one_frame(pair: Pair, some_fds: list[int]) -> None:
    left, right = pair
    many = (some_fds * 20)[: fds.MAX_FDS]
    fds.send_frame(left.fileno(), b"x", many)
    _, got = fds.recv_frame(right.fileno(), 1, fds.MAX_FDS)
    assert len(set(got)) == fds.MAX_FDS
    close_all(got)
    with pytest.raises(ValueError, match=f"at most {fds.MAX_FDS} fds, not {fds.MAX_FDS + 1}"):
        fds.send_frame(left.fileno(), b"x", [*many, 0])


def test_more_fds_than_allowed_are_all_closed(pair: Pair, some_fds: list[int]) -> None:
    left, right = pair
    fds.send_frame(left.fileno(), b"x", some_fds[:4])
    with pytest.raises(fds.FrameTruncated, match="3 fds") as info:
        fds.recv_frame(right.fileno(), 10, 3)
    assert isinstance(info.value, OSError)
    assert info.value.errno == errno.EMSGSIZE
    fds.send_frame(left.fileno(), b"next")
    assert fds.recv_frame(right.fileno(), 10, 0) == (b"next", [])


def test_a_frame_that_is_too_long_is_lost_and_its_fds_closed(
    pair: Pair, some_fds: list[int]
) -> None:
    left, right = pair
    fds.send_frame(left.fileno(), b"12345", some_fds[:2])
    with pytest.raises(fds.FrameTruncated, match="exceeds 4 bytes"):
        fds.recv_frame(right.fileno(), 4, 16)


def test_fds_that_the_process_has_no_room_for_are_a_truncation() -> None:
    # In a child, because the limit stays: it leaves room for 3 of 20.
    program = (
        "import os, resource, socket; from qnnbroker.native import fds\n"
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "fds.send_frame(a.fileno(), b'x', [0] * 20)\n"
        "n = len(os.listdir('/proc/self/fd'))\n"
        "top = os.dup(0); os.close(top)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (top + 3, top + 3))\n"
        "try: fds.recv_frame(b.fileno(), 10, 20)\n"
        "except fds.FrameTruncated as e: assert '3 fds came' in str(e), e\n"
        "else: raise SystemExit('not refused')\n"
        "assert len(os.listdir('/proc/self/fd')) == n\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_a_closed_peer_is_an_end_of_file(pair: Pair) -> None:
    left, right = pair
    left.close()
    assert fds.recv_frame(right.fileno(), 10, 0) == (b"", [])


def test_fds_of_an_empty_frame_are_closed(pair: Pair, some_fds: list[int]) -> None:
    left, right = pair
    left.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", some_fds[:2]))])
    assert fds.recv_frame(right.fileno(), 10, 2) == (b"", [])


def test_credentials_beside_the_fds_are_stepped_over(pair: Pair, some_fds: list[int]) -> None:
    left, right = pair
    right.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    fds.send_frame(left.fileno(), b"x", some_fds[:2])
    data, got = fds.recv_frame(right.fileno(), 10, 2)
    assert (data, len(got)) == (b"x", 2)
    close_all(got)


def test_sending_to_a_closed_peer_is_a_broken_pipe_and_no_signal(pair: Pair) -> None:
    left, right = pair
    right.close()
    old = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # would end the process
    try:
        with pytest.raises(BrokenPipeError):
            fds.send_frame(left.fileno(), b"x")
    finally:
        signal.signal(signal.SIGPIPE, old)


def test_a_peer_that_closed_with_data_unread_is_a_reset(pair: Pair) -> None:
    left, right = pair
    fds.send_frame(left.fileno(), b"unread")
    right.close()
    with pytest.raises(ConnectionResetError):
        fds.recv_frame(left.fileno(), 10, 0)


def test_a_socket_that_does_not_block_says_so(pair: Pair) -> None:
    left, right = pair
    left.setblocking(False)
    right.setblocking(False)
    with pytest.raises(BlockingIOError):
        fds.recv_frame(right.fileno(), 10, 0)

    def fill() -> None:
        while True:
            fds.send_frame(left.fileno(), bytes(1000))

    with pytest.raises(BlockingIOError):
        fill()


def test_an_empty_frame_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        fds.send_frame(pair[0].fileno(), b"")


@pytest.mark.parametrize(("max_bytes", "max_fds"), [(0, 0), (-1, 0), (2**40, 0), (1, -1), (1, 254)])
def test_limits_that_make_no_sense_are_refused(pair: Pair, max_bytes: int, max_fds: int) -> None:
    with pytest.raises(ValueError, match="must be from"):
        fds.recv_frame(pair[0].fileno(), max_bytes, max_fds)


def test_bad_fds_are_os_errors(pair: Pair) -> None:
    for call in (
        lambda: fds.send_frame(1_000_000, b"x"),
        lambda: fds.send_frame(pair[0].fileno(), b"x", [1_000_000]),
        lambda: fds.recv_frame(1_000_000, 10, 0),
        lambda: fds.peer_credentials(1_000_000),
    ):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call()


def test_other_threads_run_while_one_waits_for_a_frame(pair: Pair) -> None:
    left, right = pair
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(fds.recv_frame(right.fileno(), 10, 0)[0]))
    waiter.start()
    fds.send_frame(left.fileno(), b"late")  # a wait that held the GIL would stop us here
    waiter.join(30)
    assert got == [b"late"]


def test_a_signal_handler_runs_during_the_wait_and_the_wait_goes_on(pair: Pair) -> None:
    left, right = pair

    def send(*_: object) -> None:
        fds.send_frame(left.fileno(), b"from the handler")

    old = signal.signal(signal.SIGALRM, send)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert fds.recv_frame(right.fileno(), 100, 0) == (b"from the handler", [])
    finally:
        signal.signal(signal.SIGALRM, old)


def test_a_signal_handler_that_raises_ends_the_wait(pair: Pair) -> None:
    def refuse(*_: object) -> None:
        raise InterruptedError("enough")

    old = signal.signal(signal.SIGALRM, refuse)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(InterruptedError, match="enough"):
            fds.recv_frame(pair[1].fileno(), 100, 0)
    finally:
        signal.signal(signal.SIGALRM, old)


def test_peer_credentials_are_those_of_the_peer(pair: Pair) -> None:
    assert fds.peer_credentials(pair[0].fileno()) == (os.getpid(), os.getuid(), os.getgid())


def test_a_pidfd_is_readable_when_its_process_ends() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        fd = fds.pidfd_open(child.pid)
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(0) == []
        child.kill()
        assert poll.poll(30_000) == [(fd, select.POLLIN)]
        os.close(fd)


def test_a_process_that_is_gone_has_no_pidfd() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        with pytest.raises(ProcessLookupError):
            fds.pidfd_open(child.pid)
