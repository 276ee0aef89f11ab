# SPDX-License-Identifier: Apache-2.0
"""The native executor: whose turn it is among sessions, bands and workers."""

import pytest
from tests.native.executor_stage import (
    CANCELLED,
    INTERNAL,
    OK,
    STALE,
    Hang,
    MakeStage,
    Stage,
    executed,
    run_slow,
)
from tests.waiting import wait_until

from qnnbroker.native.executor import BAND_HIGH, BAND_LOW, BAND_NORMAL
from qnnbroker.native.fake import control_loaded, waiting_count

# --- who is next


def check_fair(stage: Stage, weights: dict[int, int], since: int = 0) -> None:
    """While all had something queued, nobody was ahead by more than one execute."""
    done = [e for e in stage.events if e[0] == "completed"][since:]
    left = {s: sum(e[1] == s for e in done) for s in weights}
    used = dict.fromkeys(weights, 0.0)
    longest = max(e[6] / weights[e[1]] for e in done)
    for e in done:
        left[e[1]] -= 1
        used[e[1]] += e[6] / weights[e[1]]
        if not min(left.values()):
            return
        assert max(used.values()) - min(used.values()) <= longest + 10_000, (used, longest)
    pytest.fail("nobody was ever out of work")


@pytest.mark.parametrize("weights", [(1, 1), (1, 1, 1), (3, 1)])
def test_sessions_share_the_device_time_by_their_weights(
    stage: Stage, weights: tuple[int, ...]
) -> None:
    hang, first = run_slow(stage, stage.session(99))
    sessions = [stage.session(n, weight=w, max_in_flight=0) for n, w in enumerate(weights, 1)]
    last = [
        [stage.submit(binding) for _ in range(20)][-1]
        for binding in [stage.bind(s, "short") for s in sessions]
    ]
    hang.end()
    assert [stage.status(t) for t in (first, *last)] == [OK] * (1 + len(weights))
    check_fair(stage, dict(enumerate(weights, 1)), since=1)


def test_long_executes_of_one_do_not_cost_the_other_its_share(stage: Stage) -> None:
    control_loaded("delay=graphExecute@other:*:3000")
    greedy, modest = stage.session(1, max_in_flight=0), stage.session(2, max_in_flight=0)
    hang, first = run_slow(stage, stage.session(99))
    control_loaded("delay=graphExecute@other:*:3000")
    long, short = stage.bind(greedy, "other"), stage.bind(modest, "short")
    tickets = [stage.submit(long) for _ in range(5)] + [stage.submit(short) for _ in range(25)]
    control_loaded("unhang")
    for ticket in (first, *tickets):
        assert stage.status(ticket) == OK
    hang.end()
    check_fair(stage, {1: 1, 2: 1}, since=1)


def test_a_newcomer_has_no_credit_for_the_time_before(stage: Stage) -> None:
    old, new = stage.session(1, max_in_flight=0), stage.session(2, max_in_flight=0)
    worked = stage.bind(old, "short")
    before = [stage.submit(worked) for _ in range(30)]
    assert stage.status(before[-1]) == OK
    hang, first = run_slow(stage, stage.session(99))
    seen = len(stage.completed())
    comes = stage.bind(new, "short")
    last = [[stage.submit(b) for _ in range(15)][-1] for b in (worked, comes)]
    hang.end()
    assert [stage.status(t) for t in (first, *last)] == [OK] * 3
    # Of the old one's share only what it used since the newcomer is there counts: it starts with
    # at most the one execute that it was ahead by.
    done = [e for e in stage.events if e[0] == "completed"][seen + 1 :]
    head = [e[1] for e in done[:10]]
    assert head.count(1) >= 2, head


def test_each_band_has_a_worker_of_its_own_and_the_device_its_priorities(
    make_stage: MakeStage,
) -> None:
    stage = make_stage(priorities=(10, 100, 300))
    session = stage.session()
    waiting = waiting_count()
    hang, first = run_slow(stage, session, band=BAND_NORMAL)
    low = stage.submit(stage.bind(session, "add", band=BAND_LOW))
    high = stage.submit(stage.bind(session, "other", band=BAND_HIGH))
    wait_until(lambda: waiting_count() == waiting + 2, "both wait for the device")
    hang.end()
    for ticket in (low, high, first):
        assert stage.status(ticket) == OK
    executes = executed()[-3:]
    assert [c.arguments["name"] for c in executes] == ["slow", "other", "add"]
    assert [c.arguments["priority"] for c in executes] == ["100", "300", "10"]


def test_a_graph_gets_another_priority_only_while_it_is_idle(make_stage: MakeStage) -> None:
    stage = make_stage(priorities=(0, 100, 200))
    session = stage.session()
    hang, first = run_slow(stage, session, band=BAND_NORMAL)
    high = stage.submit(stage.bind(session, "slow", band=BAND_HIGH))
    control_loaded("clear")
    beside = stage.submit(stage.bind(session, "add", band=BAND_LOW))
    wait_until(lambda: waiting_count() == 1, "another graph waits for the device")
    hang.end()
    for ticket in (first, high, beside):
        assert stage.status(ticket) == OK
    # The fake refuses nothing here, so this is the executor's own doing.
    mine = [c.arguments["priority"] for c in executed() if c.arguments["name"] == "slow"]
    assert mine[-2:] == ["100", "200"]


def test_two_workers_of_a_band_run_two_bindings_but_never_one_twice(
    make_stage: MakeStage,
) -> None:
    control_loaded(concurrency=4)
    stage = make_stage(workers=(1, 3, 1))
    session = stage.session()
    bindings = [stage.bind(session, "slow") for _ in range(2)]
    # A priority is set while a graph is idle: it gets that of the band now, if another had it.
    assert stage.status(stage.submit(bindings[0])) == OK
    hang = Hang()
    tickets = [stage.submit(b) for b in bindings * 3]
    hang.wait(2)
    free = stage.submit(stage.bind(stage.session(2), "add"))
    assert stage.status(free) == OK
    assert hang.count() == 2
    hang.end()
    assert [stage.status(t) for t in tickets] == [OK] * 6


@pytest.mark.parametrize("way", ["cancel", "release", "park"])
def test_what_stood_behind_a_submission_starts_when_that_is_gone(
    make_stage: MakeStage, way: str
) -> None:
    control_loaded(concurrency=2)
    stage = make_stage(workers=(1, 2, 1))
    session = stage.session()
    hang = Hang()
    binding = stage.bind(session, "slow")
    running = stage.submit(binding)
    hang.wait()
    in_the_way = stage.submit(binding)
    behind = stage.submit(stage.bind(session, "add"))
    if way == "cancel":
        assert session.cancel(in_the_way)
    elif way == "release":
        binding.release()
    else:
        assert binding.park()
    assert stage.status(behind) == OK
    assert running not in stage.completed()
    hang.end()
    assert stage.status(running) == OK
    if way == "park":
        stage.wait_event("binding_wanted", binding)
        binding.fail_waiting(INTERNAL)
    assert stage.status(in_the_way) == {"cancel": CANCELLED, "release": STALE}.get(way, INTERNAL)
