# SPDX-License-Identifier: Apache-2.0
"""A session's rings: the client's end, alone and with an executor behind the broker's end."""

import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.native.executor_stage import CANCELLED, CREDITS, LATE, OK, Hang, Stage
from tests.native.ring_stage import RingStage, bare_rings, complete
from tests.waiting import wait_until

from qnnbroker.native.ring import BrokerRing, ClientRing, RingLost

UNKNOWN, STALE_GENERATION, LEASE_REVOKED = 2, 3, 4


# --- the memory


def test_the_clients_files_can_neither_be_resized_nor_the_brokers_written() -> None:
    with bare_rings() as (ring, _, _):
        mine, theirs = ring.client_file.fileno(), ring.broker_file.fileno()
        for fd in (mine, theirs):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 4096 * 16)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
        with pytest.raises(PermissionError):
            mmap.mmap(theirs, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(theirs, b"x", 0)
        mmap.mmap(theirs, 4096, prot=mmap.PROT_READ).close()


@pytest.mark.parametrize("limit", [1, 3, 64, 100, 32768])
def test_the_slots_fit_the_limit_and_cancels_have_as_many_again(limit: int) -> None:
    with bare_rings(limit) as (ring, client, _):
        assert ring.cq_slots >= limit > ring.cq_slots // 2
        assert ring.sq_slots == 2 * ring.cq_slots
        assert client.in_flight == 0


@pytest.mark.parametrize("limit", [0, 32769])
def test_an_impossible_limit_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        BrokerRing(limit)


def test_a_file_of_another_layout_is_refused_and_every_fd_closed(no_leaks: None) -> None:
    ring = BrokerRing(4)
    fds = [os.dup(fd) for fd in ring.client_fds()]
    with pytest.raises(OSError, match="layout") as refused:  # nobody wrote the header yet
        ClientRing(*fds, limit=4)
    assert refused.value.errno == errno.EPROTO
    del refused
    ring.close()


def test_a_limit_beyond_the_slots_is_refused(stage: Stage) -> None:
    session = stage.session()
    ring = BrokerRing(4)
    session.open_ring(ring)
    fds = [os.dup(fd) for fd in ring.client_fds()]
    with pytest.raises(OSError, match="layout"):
        ClientRing(*fds, limit=5)


# --- one submission


def test_a_run_comes_back_with_its_times(rings: RingStage) -> None:
    _, name = rings.bind("short")
    done = rings.client.run(name)
    assert isinstance(done, tuple)
    status, queue_ns, execute_ns, copied = done
    assert (status, copied) == (OK, 0)
    assert queue_ns > 0
    assert execute_ns >= 300_000


@pytest.mark.parametrize("spin_ns", [0, 20_000])
def test_many_runs_one_after_the_other(stage: Stage, spin_ns: int) -> None:
    rings = RingStage(stage, spin_ns=spin_ns)
    _, name = rings.bind()
    for _ in range(500):
        done = rings.client.run(name, 20_000_000_000)
        assert isinstance(done, tuple)
        assert done[0] == OK
    assert rings.session.statistics()["run_count"] == 500
    assert rings.client.in_flight == 0


def test_completions_may_be_taken_in_any_order(rings: RingStage) -> None:
    _, name = rings.bind()
    tickets = [rings.submit(name) for _ in range(16)]
    assert rings.client.submit(name) == -1  # as many as it may have
    for ticket in reversed(tickets):
        assert rings.status(ticket) == OK
    with pytest.raises(ValueError, match="ticket"):
        rings.client.wait(tickets[0])  # taken already


def test_waiting_for_no_time_sees_what_has_come(rings: RingStage) -> None:
    _, name = rings.bind()
    ticket = rings.submit(name)
    found = wait_until(lambda: rings.client.wait(ticket, 0), "a look finds the completion")
    assert found is not None
    assert found[0] == OK


def test_a_foreign_or_stale_binding_is_refused_and_the_session_goes_on(rings: RingStage) -> None:
    binding, name = rings.bind()
    for wrong in (0, 1, 1 << 32, (1 << 32) + 77, (2 << 32) | 1, 2**64 - 1):
        assert rings.status(rings.submit(wrong)) == UNKNOWN, hex(wrong)
    assert rings.status(rings.submit(name)) == OK
    binding.release()
    assert rings.status(rings.submit(name)) == STALE_GENERATION
    again, _ = rings.bind()
    again.publish(2 << 32 | 1)  # the same place, the next generation
    assert rings.status(rings.submit(name)) == STALE_GENERATION
    assert rings.status(rings.submit(2 << 32 | 1)) == OK


def test_a_late_submission_completes_without_executing(rings: RingStage) -> None:
    hang = Hang()
    _, slow = rings.bind("slow")
    _, name = rings.bind()
    running = rings.submit(slow)
    hang.wait()
    runs = rings.stage.context.graph("add").statistics()["run_count"]
    end = time.monotonic_ns() + 20_000_000
    late = rings.submit(name, end)
    wait_until(lambda: time.monotonic_ns() > end, "the deadline has passed")
    hang.end()
    assert rings.status(late) == LATE
    assert rings.status(running) == OK
    assert rings.stage.context.graph("add").statistics()["run_count"] == runs


def test_cancel_spares_what_runs_and_takes_what_is_queued(rings: RingStage) -> None:
    hang = Hang()
    _, slow = rings.bind("slow")
    running, queued = rings.submit(slow), rings.submit(slow)
    hang.wait()
    assert rings.client.cancel(running)
    assert rings.client.cancel(queued)
    assert rings.client.cancel(queued)  # once more does no harm
    assert rings.status(queued) == CANCELLED
    assert not rings.client.cancel(queued)
    hang.end()
    assert rings.status(running) == OK


def test_cancels_never_take_the_room_of_executes(rings: RingStage) -> None:
    hang = Hang()
    _, slow = rings.bind("slow")
    for _ in range(20):
        tickets = [rings.submit(slow) for _ in range(16)]
        hang.wait()
        for ticket in tickets * 4:
            rings.client.cancel(ticket)
        hang.end()
        assert {rings.status(t) for t in tickets} <= {OK, CANCELLED}
        hang = Hang()
    hang.end()


def test_the_limit_counts_submissions_by_call_too(rings: RingStage) -> None:
    hang = Hang()
    binding, slow = rings.bind("slow")
    rings.stage.submit(binding)
    hang.wait()
    tickets = [rings.submit(slow) for _ in range(16)]
    refused = tickets.pop()
    assert rings.status(refused) == CREDITS
    hang.end()
    assert [rings.status(t) for t in tickets] == [OK] * 15


# --- many threads


def in_threads(count: int, work: Callable[[int], Any]) -> None:
    """Runs `work(number)` in that many threads; fails when one does."""
    wrong: list[BaseException] = []

    def call(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=[n]) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


@pytest.mark.parametrize("spin_ns", [0, 20_000])
def test_threads_share_a_ring_that_is_too_small_for_them(stage: Stage, spin_ns: int) -> None:
    rings = RingStage(stage, limit=2, spin_ns=spin_ns)
    names = [rings.bind()[1] for _ in range(5)]

    def work(number: int) -> None:
        done = 0
        while done < 200:
            found = rings.client.run(names[number], 20_000_000_000)
            if found == -1:
                assert rings.client.wait_room(20_000_000_000)
                continue
            assert isinstance(found, tuple)
            assert found[0] == OK
            done += 1

    in_threads(5, work)
    assert rings.session.statistics()["run_count"] == 1000


def test_a_ticket_given_back_makes_room_for_a_thread_that_waits(stage: Stage) -> None:
    rings = RingStage(stage, limit=1)
    _, name = rings.bind()
    held = rings.submit(name)
    wait_until(lambda: stage.stats(rings.session)[0] == 0, "it is complete, and not taken")
    woken = threading.Event()

    def wait() -> None:
        assert rings.client.wait_room(20_000_000_000)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    # The completion is taken in by whoever waits, and does not make room by itself.
    assert not woken.wait(0.2)
    assert rings.status(held) == OK
    assert woken.wait(10)
    thread.join()


def test_closing_ends_every_wait_at_once_though_the_broker_says_nothing(rings: RingStage) -> None:
    hang = Hang()
    _, slow = rings.bind("slow")
    tickets = [rings.submit(slow) for _ in range(16)]
    hang.wait()
    ends: list[type[BaseException]] = []

    def wait(number: int) -> None:
        try:
            if number < 3:
                rings.client.wait(tickets[number])
            else:
                rings.client.wait_room()
        except ValueError as error:
            ends.append(type(error))

    threads = [threading.Thread(target=wait, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    rings.client.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert ends == [ValueError] * 4
    with pytest.raises(ValueError, match="closed"):
        rings.client.submit(slow)
    hang.end()


@pytest.mark.parametrize("known", [False, True], ids=["unknown binding", "short binding"])
def test_a_broker_that_hangs_up_ends_every_wait_and_is_lost(known: bool) -> None:
    with bare_rings() as (ring, client, memory):
        ticket = client.submit(1)
        if known:  # then the wait begins with a nap
            complete(memory, ticket)
            client.wait(ticket)
            ticket = client.submit(1)
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises(RingLost):
                client.wait(ticket)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        ring.hang_up()
        assert ended.wait(10)
        thread.join()
        assert client.lost
        with pytest.raises(RingLost):
            client.wait(ticket)


@pytest.mark.parametrize("offset", [64, 128], ids=["completions", "submissions"])
def test_indexes_of_the_broker_that_make_no_sense_lose_the_ring(offset: int) -> None:
    with bare_rings() as (_, client, memory):
        memory[offset : offset + 4] = (1000).to_bytes(4, "little")
        with pytest.raises(RingLost):
            client.wait(client.submit(1), 1_000_000_000)


def test_completions_nobody_asked_for_are_dropped() -> None:
    with bare_rings() as (_, client, memory):
        ticket = client.submit(1)
        complete(memory, ticket + 1, 0, ticket)
        assert client.wait(ticket, 1_000_000_000) == (0, 0, 0, 0)
        assert client.in_flight == 0
