# SPDX-License-Identifier: Apache-2.0
"""The native executor: nothing that can start waits while its threads sleep."""

import os
import select
import threading
from pathlib import Path

import pytest
from tests.native.executor_stage import (
    CANCELLED,
    OK,
    Hang,
    MakeStage,
    Stage,
    calls_after,
    executed,
    last_call,
)
from tests.native.ring_stage import RingStage, bare_rings
from tests.waiting import wait_until

from qnnbroker.native.executor import BAND_HIGH, BAND_LOW, BAND_NORMAL
from qnnbroker.native.fake import control_loaded

#: How long no submission that can start takes.
NOTICED_NS = 10_000_000_000


def bind_all_bands(rings: RingStage, normal: str) -> tuple[int, int, int]:
    """A binding of the low, the normal and the high band, each of another graph."""
    graphs = (("short", BAND_LOW), (normal, BAND_NORMAL), ("other", BAND_HIGH))
    low, middle, high = (rings.bind(graph, band=band)[1] for graph, band in graphs)
    return low, middle, high


def send_to_the_doorbells(rings: RingStage, *names: int) -> None:
    """One binding of each band executes at once; after that all threads sleep on the doorbells."""
    hang = Hang()
    control_loaded("hang=graphExecute:*")
    tickets = [rings.submit(name) for name in names]
    hang.wait(len(names))
    control_loaded("clear", "unhang")
    assert [rings.status(t) for t in tickets] == [OK] * len(names)


def run_noticed(rings: RingStage, name: int) -> None:
    """A submission that can start does, whatever hangs beside it."""
    done = rings.client.run(name, NOTICED_NS)
    assert isinstance(done, tuple), "nobody noticed the submission"
    assert done[0] == OK


def test_a_high_band_that_was_held_back_goes_on_beside_an_endless_low_execute(
    make_stage: MakeStage,
) -> None:
    control_loaded(concurrency=2)
    stage = make_stage(ageing_ns=20_000_000, ageing_slice_ns=20_000_000)
    session = stage.session(max_in_flight=0)
    hang = Hang()
    low = stage.submit(stage.bind(session, "slow", band=BAND_LOW))
    hang.wait()
    high = stage.bind(session, "short", band=BAND_HIGH)
    # 200 times 0.3 ms: the low band ages past its limit at least twice.
    tickets = [stage.submit(high) for _ in range(200)]
    assert [stage.status(t) for t in tickets] == [OK] * 200
    assert low not in stage.completed()
    hang.end()
    assert stage.status(low) == OK


def all_others_sleep() -> bool:
    """No other thread of this process runs, or has been woken and has not run yet."""
    states = []
    for task in set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}:
        stat = Path(f"/proc/self/task/{task}/stat").read_text()
        states.append(stat.rpartition(")")[2].split()[0])
    return set(states) <= {"S"}


def test_the_end_of_a_hold_is_noticed_by_threads_that_slept_before_it_began(
    make_stage: MakeStage,
) -> None:
    control_loaded(concurrency=2)
    # Whatever the high band runs while a lower one waits is followed by a hold; and no graph is
    # short, so that there is no deputy who looks now and then.
    stage = make_stage(spin_limit_ns=0, ageing_ns=1, ageing_slice_ns=100_000_000)
    session = stage.session()
    hang = Hang()
    first = stage.submit(stage.bind(session, "slow", band=BAND_HIGH))
    hang.wait()
    # One cannot start because its band is full, the other because its graph runs for another band.
    held = stage.submit(stage.bind(session, "add", band=BAND_HIGH))
    low = stage.submit(stage.bind(session, "slow", band=BAND_LOW))
    wait_until(all_others_sleep, "nobody sleeps with an eye on the clock")
    # The thread at whose end the hold begins goes on with the low one, and that hangs too.
    control_loaded("unhang")
    hang.wait(2)
    assert stage.status(held) == OK
    assert set(stage.completed()) == {first, held}
    hang.end()
    assert [stage.status(t) for t in (first, low)] == [OK, OK]


@pytest.mark.parametrize(
    ("spin_ns", "spin_limit_ns", "behind_another"),
    [(0, 1_000_000_000, False), (10_000, 1_000_000_000, False), (0, 50_000, True)],
)
def test_an_execute_that_was_always_short_and_hangs_leaves_the_doorbells_watched(
    make_stage: MakeStage, spin_ns: int, spin_limit_ns: int, behind_another: bool
) -> None:
    control_loaded(concurrency=4)
    stage = make_stage(spin_ns=spin_ns, spin_limit_ns=spin_limit_ns)
    first, second = RingStage(stage), RingStage(stage)
    _, short = first.bind("add")
    low, normal, high = bind_all_bands(second, "slow")
    for _ in range(10):
        run_noticed(first, short)
        if not behind_another:
            run_noticed(second, high)
    running = None
    if behind_another:
        # The thread that served the second session, and told it not to ring, takes the first one's
        # submission; all others sleep on the doorbells.
        send_to_the_doorbells(second, low, normal, high)
        long = Hang()
        running = second.submit(normal)
        long.wait()
        hanging = first.submit(short)
        wait_until(lambda: stage.stats(first.session)[0] == 1, "it is queued")
    before = last_call()
    control_loaded("clear", "hang=graphExecute@add:*", "unhang")
    if running is None:
        hanging = first.submit(short)
    wait_until(lambda: bool(calls_after(before, "fault")), "the short one hangs")
    if running is not None:
        assert second.status(running) == OK
    for _ in range(5):
        run_noticed(second, high)
    assert first.client.wait(hanging, 0) is None
    control_loaded("clear", "unhang")
    assert first.status(hanging) == OK


def test_a_graph_whose_priority_is_being_set_is_started_by_no_other_band(
    make_stage: MakeStage,
) -> None:
    control_loaded(concurrency=2)
    stage = make_stage(priorities=(0, 100, 200))
    session = stage.session()
    normal, high = (stage.bind(session, "add", band=b) for b in (BAND_NORMAL, BAND_HIGH))
    assert stage.status(stage.submit(normal)) == OK
    before = last_call()
    control_loaded("delay=graphSetConfig:1:200000")
    tickets = [stage.submit(high)]
    wait_until(lambda: bool(calls_after(before, "fault")), "it is being set")
    tickets.append(stage.submit(normal))
    assert [stage.status(t) for t in tickets] == [OK, OK]
    assert [c.arguments["priority"] for c in executed(before)] == ["200", "100"]


def test_both_of_two_things_that_become_startable_at_once_start(make_stage: MakeStage) -> None:
    control_loaded(concurrency=3)
    stage = make_stage()
    session = stage.session()
    # The graph is busy in one band; two others want it, and another graph behind it.
    hang, first = Hang(), stage.submit(stage.bind(session, "slow", band=BAND_NORMAL))
    hang.wait()
    control_loaded("clear")
    waiting = [
        stage.submit(stage.bind(session, "slow", band=BAND_HIGH)),
        stage.submit(stage.bind(stage.session(2), "slow", band=BAND_LOW)),
        stage.submit(stage.bind(session, "add", band=BAND_NORMAL)),
    ]
    hang.end()
    for ticket in (first, *waiting):
        assert stage.status(ticket) == OK


def test_a_ring_that_was_polled_is_not_forgotten_when_its_band_is_full(
    make_stage: MakeStage,
) -> None:
    control_loaded(concurrency=4)
    stage = make_stage(spin_ns=0)
    first, second = RingStage(stage), RingStage(stage)
    _, slow = first.bind("slow")
    low, normal, high = bind_all_bands(second, "add")
    send_to_the_doorbells(second, low, normal, high)
    long = Hang()
    running = first.submit(slow)
    long.wait()
    behind = second.submit(normal)  # taken, and cannot start
    wait_until(lambda: stage.stats(second.session)[0] == 1, "it is queued")
    run_noticed(second, high)
    assert second.client.cancel(behind)
    assert second.status(behind) == CANCELLED
    long.end()
    assert first.status(running) == OK


# --- and nobody is rung who is awake


def test_a_broker_that_is_awake_is_not_rung() -> None:
    broker_sleeps = 192
    with bare_rings() as (ring, client, memory):
        for asleep in (0, 1, 0):
            memory[broker_sleeps : broker_sleeps + 4] = asleep.to_bytes(4, "little")
            assert client.submit(1 << 32 | 1) >= 0
            if asleep:
                assert int.from_bytes(os.read(ring.client_fds()[2], 8), "little") == 1
            else:
                with pytest.raises(BlockingIOError):
                    os.read(ring.client_fds()[2], 8)


def test_a_client_that_is_awake_is_not_rung(stage: Stage) -> None:
    rings = RingStage(stage)
    _, name = rings.bind()
    ticket = rings.submit(name)
    wait_until(lambda: stage.stats(rings.session)[:2] == (0, 1), "it is complete")
    assert select.select([rings.client.fileno()], [], [], 0)[0] == []
    assert rings.status(ticket) == OK
