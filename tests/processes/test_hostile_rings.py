# SPDX-License-Identifier: Apache-2.0
"""Clients that lie in shared memory: their session ends, or they are told; nobody else notices."""

import contextlib
import fcntl
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.bound_ring import Bound, MakeBound
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel, adder, numbers
from tests.raw_ring import CQ_HEAD, CQ_TAIL, HEADER_BYTES, SQ_HEAD, SQ_TAIL
from tests.waiting import wait_until

from qnnbroker.client import connect
from qnnbroker.protos.errors import ProtocolError
from qnnbroker.v1 import control_pb2 as pb

BINDING_UNKNOWN, STALE, CREDITS, CANCELLED = 2, 3, 5, 9


@pytest.fixture
def bystander(make_bound: MakeBound) -> Iterator[Bound]:
    """A good client, whose runs are right before and after."""
    one = make_bound()
    one.check_run(1)
    yield one
    one.check_run(2)
    one.check_run(3)


@pytest.fixture
def liar(bystander: Bound, make_bound: MakeBound) -> Bound:
    """A client that was good so far."""
    one = make_bound()
    one.check_run()
    return one


# --- what ends the session


@pytest.mark.parametrize("jump", [17, 1000, 2**31, -1, -2])
def test_a_tail_that_jumps_ends_the_session(liar: Bound, jump: int) -> None:
    liar.set(SQ_TAIL, liar.seen(SQ_HEAD) + jump)
    liar.ring()
    error = liar.thrown_out()
    assert isinstance(error, ProtocolError)
    assert error.reason == "BAD_SLOT"


@pytest.mark.parametrize(
    "slot", [{"flags": 2}, {"flags": 3}, {"flags": 2**31}, {"reserved": 1}, {"reserved": 2**31}]
)
def test_flags_and_reserved_bits_that_mean_nothing_end_the_session(
    liar: Bound, slot: dict[str, int]
) -> None:
    liar.submit(liar.binding, **slot)
    assert liar.thrown_out().reason == "BAD_SLOT"


@pytest.mark.parametrize("jump", [1, 8, 2**31, -9])
def test_a_head_of_completions_that_makes_no_sense_ends_the_session(liar: Bound, jump: int) -> None:
    liar.set(CQ_HEAD, liar.get(CQ_HEAD) + jump)
    liar.submit(liar.binding)
    assert liar.thrown_out().reason == "BAD_SLOT"


def test_completions_that_nobody_takes_end_the_session(liar: Bound) -> None:
    # Each is done before the next comes, so the limit of what is in flight is never reached.
    for n in range(liar.cq_slots):
        head = liar.get(CQ_HEAD)
        liar.submit(liar.binding)
        wait_until(lambda n=n, head=head: liar.seen(64) - head > n, "it is complete")  # type: ignore[misc]
    liar.submit(liar.binding)
    assert liar.thrown_out().reason == "BAD_SLOT"


def test_refusals_that_nobody_takes_end_the_session_too(liar: Bound) -> None:
    for _ in range(liar.cq_slots + 1):
        liar.submit(12345)
    assert liar.thrown_out().reason == "BAD_SLOT"


# --- what is refused, and the session goes on


def test_bindings_that_are_not_ones_own_are_refused(liar: Bound, bystander: Bound) -> None:
    liar.call("ReleaseBinding", pb.ReleaseBindingRequest(binding_id=liar.binding))
    again = liar.bind(liar.graph, *liar.places)
    for wrong, status in (
        (liar.binding, STALE),
        (0, BINDING_UNKNOWN),
        (2**64 - 1, BINDING_UNKNOWN),
        (again + 1, BINDING_UNKNOWN),
        (again + (1 << 32), BINDING_UNKNOWN),
    ):
        liar.submit(wrong)
        assert liar.take()[0][1] == status, hex(wrong)
    liar.binding = again
    liar.check_run()
    # Ids are a session's own: the bystander's numbers lead nowhere else but to one's own bindings.
    assert bystander.binding != again


def test_more_than_the_limit_in_flight_is_refused(
    shared_broker: BrokerProcess, liar: Bound, bystander: Bound
) -> None:
    shared_broker.set_faults("hang=graphExecute@g:1")
    first = liar.submit(liar.binding)
    shared_broker.wait_hanging(1)
    others = [liar.submit(liar.binding) for _ in range(8)]
    ((ticket, status, *_),) = liar.take()
    assert (ticket, status) == (others[-1], CREDITS)
    shared_broker.set_faults("unhang")
    found = liar.take(8)
    assert [(t, s) for t, s, *_ in found] == [(t, 0) for t in [first, *others[:-1]]]


def test_cancels_of_what_is_not_there_are_nothing(liar: Bound) -> None:
    for ticket in (0, 1, liar.tickets, 2**64 - 1):
        liar.cancel(ticket)
    liar.check_run()


# --- doorbells and memory


def test_a_doorbell_that_is_filled_made_blocking_or_emptied_harms_only_its_owner(
    liar: Bound,
) -> None:
    flags = fcntl.fcntl(liar.doorbell, fcntl.F_GETFL)
    fcntl.fcntl(liar.doorbell, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    os.read(liar.doorbell, 8)  # what was rung so far; the broker never reads it
    os.write(liar.doorbell, (2**64 - 2).to_bytes(8, "little"))
    with pytest.raises(BlockingIOError):
        os.write(liar.doorbell, (1).to_bytes(8, "little"))
    fcntl.fcntl(liar.doorbell, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    assert os.read(liar.doorbell, 8)
    for _ in range(2000):
        liar.ring()
    fcntl.fcntl(liar.doorbell, fcntl.F_SETFL, flags)
    liar.check_run()


def test_a_bell_that_is_closed_or_never_read_blocks_nobody(liar: Bound) -> None:
    # A few hundred rings fit; each completion rings, since "sleeping" is always set.
    for _ in range(1000):
        liar.submit(liar.binding)
        wait_until(lambda: liar.seen(64) != liar.get(CQ_HEAD), "it is complete", pause=0)
        liar.set(CQ_HEAD, liar.seen(64))
    os.close(liar.bell)
    liar.ring_fds.remove(liar.bell)
    liar.submit(liar.binding)
    wait_until(lambda: liar.seen(64) != liar.get(CQ_HEAD), "it is complete")


def splice_it(liar: Bound, full: socket.socket) -> None:
    """Would hold the lock of a pipe while it waits for room elsewhere."""
    with contextlib.suppress(OSError):  # EINVAL: it is no pipe
        os.splice(liar.bell, full.fileno(), 1)


def wait_for_more(liar: Bound, full: socket.socket) -> None:
    """A reader that the next byte does not satisfy."""
    with socket.socket(fileno=os.dup(liar.bell)) as bell:
        bell.recv(1 << 20, socket.MSG_WAITALL)


def fill_the_other_way(liar: Bound, full: socket.socket) -> None:
    """The broker never reads what a client sends."""
    with socket.socket(fileno=os.dup(liar.bell)) as bell, contextlib.suppress(OSError):
        while True:
            bell.send(bytes(65536))


@pytest.mark.parametrize("hold", [splice_it, wait_for_more, fill_the_other_way])
def test_no_call_on_its_bell_keeps_the_broker_waiting(
    liar: Bound, bystander: Bound, hold: Callable[[Bound, socket.socket], None]
) -> None:
    full, far = socket.socketpair()
    with full, far:
        full.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(bytes(65536))
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(b"x")
        full.setblocking(True)
        liar.submit(liar.binding)
        wait_until(lambda: liar.seen(CQ_TAIL) == liar.get(SQ_TAIL), "it is complete, and has rung")
        thread = threading.Thread(target=hold, args=(liar, full))
        thread.start()
        # Whether or not the call is under way already: one of these runs comes beside it.
        for n in range(200):
            liar.set(CQ_HEAD, liar.seen(CQ_TAIL))
            liar.submit(liar.binding)
            bystander.check_run(n)
        liar.sock.close()  # what waits on the bell ends with the session
        far.close()
        thread.join(60)
    assert not thread.is_alive()


def test_a_client_without_its_doorbell_end_is_like_one_that_is_silent(liar: Bound) -> None:
    os.close(liar.doorbell)
    liar.ring_fds.remove(liar.doorbell)


def test_neither_file_can_be_resized_and_the_brokers_cannot_be_written(liar: Bound) -> None:
    mine, theirs = liar.ring_fds[:2]
    before = liar.theirs[:]
    for fd in (mine, theirs):
        for size in (0, 1, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with pytest.raises(OSError, match="not permitted"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with pytest.raises(PermissionError):
        mmap.mmap(theirs, 4096)
    again = os.open(f"/proc/self/fd/{theirs}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(again, bytes(64), 0)
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        with pytest.raises(PermissionError):
            punch(again, 0, 4096)
    finally:
        os.close(again)
    assert liar.theirs[:] == before
    liar.check_run()


def test_a_hole_in_ones_own_file_is_zeros_to_the_broker(liar: Bound) -> None:
    for _ in range(3):
        liar.check_run()
    punch(liar.ring_fds[0], 0, 4096)
    liar.ring()
    # A tail of 0 is behind what was taken.
    assert liar.thrown_out().reason == "BAD_SLOT"


def punch(fd: int, offset: int, size: int) -> None:
    """Takes pages out of a file, so that they read as zeros."""
    import ctypes

    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(fd, keep_size | punch_hole, offset, size):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("seed", range(4))
def test_memory_that_changes_while_the_broker_reads_it_ends_one_session_at_most(
    make_bound: MakeBound, bystander: Bound, seed: int
) -> None:
    rng = random.Random(seed)
    stop = threading.Event()
    liar = make_bound()
    words = [0, 1, 2, 8, 2**31, 2**32 - 1, liar.binding & 0xFFFFFFFF, 1 << 4]

    def scribble() -> None:
        slots = HEADER_BYTES + liar.sq_slots * 32
        while not stop.is_set():
            for _ in range(100):
                at = rng.choice([SQ_TAIL, CQ_HEAD, 128, rng.randrange(HEADER_BYTES, slots, 4)])
                if at == SQ_TAIL:
                    value = liar.seen(SQ_HEAD) + rng.randrange(3)
                elif at == CQ_HEAD:
                    value = liar.seen(64) - rng.randrange(2)
                else:
                    value = rng.choice(words)
                struct.pack_into("<I", liar.mine, at, value % 2**32)
            liar.ring()

    thread = threading.Thread(target=scribble)
    thread.start()
    end = time.monotonic() + 0.3
    runs = 0
    while time.monotonic() < end or runs < 20:
        bystander.check_run(runs)
        runs += 1
    stop.set()
    thread.join()


def test_hostile_clients_beside_good_ones_for_a_while(
    shared_broker: BrokerProcess, make_bound: MakeBound, make_model: MakeModel
) -> None:
    with (
        connect(shared_broker.runtime_dir) as session,
        session.load(make_model("adder", adder("g"))) as model,
        model.graph.bind() as binding,
    ):
        for n in range(15):
            liar = make_bound()
            liar.set([SQ_TAIL, CQ_HEAD][n % 2], n * 1000 + 100)
            liar.submit(liar.binding)
            a, b = numbers(n)
            binding.inputs["a"][...], binding.inputs["b"][...] = a, b
            binding.run()
            assert (binding.outputs["y"] == a + b).all()
            assert liar.thrown_out().reason == "BAD_SLOT"
