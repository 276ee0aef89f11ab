# SPDX-License-Identifier: Apache-2.0
"""The native executor: bindings that are parked and revived, and many threads at once."""

import itertools
import threading
import time

from tests.native.executor_stage import (
    CANCELLED,
    CLOSED,
    LATE,
    OK,
    STALE,
    Hang,
    Stage,
    run_slow,
)
from tests.waiting import wait_until

from qnnbroker.native.counters import live_counts
from qnnbroker.native.executor import BAND_HIGH, BAND_LOW, BAND_NORMAL
from qnnbroker.native.qnn_graph import QnnRunnable

# --- park and revive


def test_a_submission_to_a_parked_binding_waits_until_it_is_revived(stage: Stage) -> None:
    session = stage.session()
    binding = stage.bind(session)
    assert binding.park()
    assert not binding.park()
    stage.wait_event("binding_idle", binding)
    old = binding.drop_runnable()
    assert isinstance(old, QnnRunnable)
    old.close()
    tickets = [stage.submit(binding) for _ in range(3)]
    stage.wait_event("binding_wanted", binding)
    assert stage.completed() == {}
    assert stage.stats(session)[0] == 3
    assert binding.revive(stage.runnable())
    assert not binding.revive(stage.runnables[-1])
    assert [stage.status(t) for t in tickets] == [OK] * 3
    assert stage.order() == tickets
    assert stage.status(stage.submit(binding)) == OK


def test_a_binding_is_wanted_only_while_it_is_parked_and_somebody_waits(stage: Stage) -> None:
    session = stage.session()
    binding = stage.bind(session)
    assert not binding.wanted
    binding.park()
    assert not binding.wanted
    first = stage.submit(binding)
    stage.wait_event("binding_wanted", binding)
    assert binding.wanted
    second = stage.submit(binding)  # tells it once more, or not
    wait_until(lambda: stage.stats(session)[0] == 2, "both wait")
    assert binding.revive(stage.runnables[0])
    assert not binding.wanted
    assert [stage.status(t) for t in (first, second)] == [OK, OK]
    binding.park()
    assert not binding.wanted
    third = stage.submit(binding)
    wait_until(lambda: binding.wanted, "one waits again")
    binding.release()
    assert not binding.wanted
    assert stage.status(third) == STALE


def test_parking_waits_for_what_runs_and_puts_the_rest_aside(stage: Stage) -> None:
    session = stage.session()
    hang = Hang()
    binding = stage.bind(session, "slow")
    running, queued = stage.submit(binding), stage.submit(binding)
    hang.wait()
    assert binding.park()
    assert not stage.has("binding_idle", binding)
    assert not binding.revive(stage.runnables[0])
    hang.end()
    assert stage.status(running) == OK
    stage.wait_event("binding_idle", binding)
    stage.wait_event("binding_wanted", binding)
    assert queued not in stage.completed()
    assert binding.revive(stage.runnables[0])
    assert stage.status(queued) == OK


def test_a_failed_revival_fails_those_who_wait_and_it_stays_parked(stage: Stage) -> None:
    binding = stage.bind(stage.session())
    binding.park()
    first = stage.submit(binding)
    stage.wait_event("binding_wanted", binding)
    binding.fail_waiting(6, 1002)
    assert stage.status(first) == 6
    assert stage.completed()[first][4] == 1002
    stage.events.clear()
    second = stage.submit(binding)
    stage.wait_event("binding_wanted", binding)
    assert binding.revive(stage.runnables[0])
    assert stage.status(second) == OK


def test_waiting_submissions_keep_their_place_before_later_ones(stage: Stage) -> None:
    session = stage.session()
    binding = stage.bind(session)
    binding.park()
    early = [stage.submit(binding) for _ in range(4)]
    stage.wait_event("binding_wanted", binding)
    hang, running = run_slow(stage, stage.session(2))
    late = [stage.submit(binding) for _ in range(4)]
    assert binding.revive(stage.runnables[0])
    hang.end()
    assert stage.status(late[-1]) == OK
    assert [t for t in stage.order() if t != running] == early + late


def test_a_parked_binding_can_be_released_with_submissions_waiting(stage: Stage) -> None:
    session = stage.session()
    binding = stage.bind(session)
    binding.park()
    waiting = [stage.submit(binding) for _ in range(3)]
    stage.wait_event("binding_wanted", binding)
    stage.events.clear()
    binding.release()
    assert [stage.status(t) for t in waiting] == [STALE] * 3
    stage.wait_event("binding_idle", binding)
    assert not binding.park()
    assert not binding.revive(stage.runnables[0])


def test_park_and_revive_without_a_drain_between_tell_only_what_is_true(stage: Stage) -> None:
    session = stage.session()
    binding = stage.bind(session)
    for _ in range(3):
        assert binding.park()
        assert binding.revive(stage.runnables[0])
    assert not stage.has("binding_idle", binding)
    assert stage.status(stage.submit(binding)) == OK
    assert binding.park()
    binding.release()
    stage.wait_event("binding_idle", binding)


def test_a_submission_whose_deadline_passed_before_the_revival_does_not_run(stage: Stage) -> None:
    binding = stage.bind(stage.session())
    binding.park()
    end = time.monotonic_ns() + 50_000_000
    ticket = stage.submit(binding, end)
    stage.wait_event("binding_wanted", binding)
    wait_until(lambda: time.monotonic_ns() > end, "the deadline has passed")
    assert binding.revive(stage.runnables[0])
    assert stage.status(ticket) == LATE


# --- many at once


def test_no_submission_of_four_threads_is_lost(stage: Stage) -> None:
    per_thread, rounds = 64, 15
    sessions = [stage.session(n, max_in_flight=0) for n in range(1, 4)]
    bindings = [
        stage.bind(sessions[0], band=BAND_LOW),
        stage.bind(sessions[1], band=BAND_NORMAL),
        stage.bind(sessions[2], band=BAND_NORMAL),
        stage.bind(sessions[2], "other", band=BAND_HIGH),
    ]
    wrong: list[int] = []

    def submit(number: int) -> None:
        for n in range(per_thread * rounds):
            if refused := bindings[number].submit(number * 1_000_000 + n):
                wrong.append(refused)

    threads = [threading.Thread(target=submit, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    total = 4 * per_thread * rounds
    stage.wait(lambda: len(stage.order()) >= total, f"{total} completions")
    for thread in threads:
        thread.join()
    stage.drain()
    assert wrong == []
    assert len(stage.order()) == len(set(stage.order())) == total
    assert {e[3] for e in stage.events} == {OK}
    for number in range(4):  # of one binding in order
        mine = [t for t in stage.order() if t // 1_000_000 == number]
        assert mine == sorted(mine)
    assert sum(stage.stats(s)[1] for s in sessions) == total
    assert live_counts()["submissions"] == 0


def test_cancel_release_and_close_race_with_submissions_and_nothing_is_lost(stage: Stage) -> None:
    accepted: list[int] = []
    lock = threading.Lock()
    tickets = itertools.count(1)
    stop = threading.Event()
    current = [stage.bind(stage.session(1, max_in_flight=16)) for _ in range(3)]

    def submit(number: int) -> None:
        while not stop.is_set():
            with lock:
                ticket = next(tickets)
            if current[number].submit(ticket) == OK:
                with lock:
                    accepted.append(ticket)
                current[number].session.cancel(ticket - number)

    threads = [threading.Thread(target=submit, args=[n]) for n in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        stage.drain()
        number = turn % 3
        old = current[number]
        current[number] = stage.bind(stage.session(turn, max_in_flight=16))
        if turn % 2:
            old.session.close()
        old.release()
        if turn % 3 == 0:
            current[number].park()
            current[number].revive(stage.runnables[-1])
    stop.set()
    for thread in threads:
        thread.join()
    stage.wait(lambda: len(stage.order()) >= len(accepted), "all completions")
    assert sorted(stage.order()) == sorted(accepted)
    assert {e[3] for e in stage.events if e[0] == "completed"} <= {OK, STALE, CANCELLED, CLOSED}
