# SPDX-License-Identifier: Apache-2.0
"""The native executor: one submission, its end, and how sessions and bindings end."""

import select
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.fake_models import SHAPE, TENSOR_BYTES, numbers
from tests.native.executor_stage import (
    CANCELLED,
    CLOSED,
    CREDITS,
    LATE,
    OK,
    QNN,
    STALE,
    STOPPING,
    Hang,
    Stage,
    run_slow,
)
from tests.waiting import wait_readable, wait_until

from qnnbroker.native.executor import Executor
from qnnbroker.native.fake import control_loaded

# --- one submission


def test_a_submission_runs_and_tells_its_times(stage: Stage) -> None:
    a, b = numbers(3)
    out = bytearray(TENSOR_BYTES)
    graph = stage.context.graph("short")
    spans = [(a.tobytes(), 0, TENSOR_BYTES), (b.tobytes(), 0, TENSOR_BYTES)]
    runnable = graph.bind(spans, [(out, 0, TENSOR_BYTES)])
    stage.runnables.append(runnable)
    session = stage.session(77)
    binding = session.bind(runnable)
    stage.bindings.append(binding)
    before = graph.statistics()["run_count"]
    ticket = stage.submit(binding)
    wait_readable(stage.executor.fileno(), "an event")
    assert stage.status(ticket) == OK
    kind, session_id, _, status, code, queue_ns, execute_ns = stage.completed()[ticket]
    assert (kind, session_id, status, code) == ("completed", 77, OK, 0)
    assert execute_ns >= 300_000
    assert queue_ns > 0
    assert (np.frombuffer(out, np.float32).reshape(SHAPE) == a + b).all()
    assert graph.statistics()["run_count"] == before + 1
    assert stage.stats(session) == (0, 1, 0)
    assert session.statistics()["device_ns"] == execute_ns


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (1000, 14),
        (1002, 6),
        (1010, 6),
        (1008, 17),
        (5002, 11),
        (1100, QNN),
        (6031, QNN),
        (6001, 11),
    ],
)
def test_a_qnn_code_becomes_a_status_and_travels_along(
    stage: Stage, code: int, status: int
) -> None:
    session = stage.session()
    binding = stage.bind(session)
    control_loaded(f"fail=graphExecute@add:1:{code}")
    failed, good = stage.submit(binding), stage.submit(binding)
    assert stage.status(failed) == status
    assert stage.completed()[failed][4] == code
    assert stage.status(good) == OK
    assert stage.stats(session) == (0, 2, 1)


def test_the_submissions_of_a_session_run_in_their_order(stage: Stage) -> None:
    session = stage.session(max_in_flight=0)
    hang, first = run_slow(stage, session)
    bindings = [stage.bind(session, g) for g in ("add", "other")]
    tickets = [first] + [stage.submit(bindings[n % 3 % 2]) for n in range(30)]
    hang.end()
    assert stage.status(tickets[-1]) == OK
    assert stage.order() == tickets


def test_who_asks_hears_of_the_next_submission_and_of_no_other(stage: Stage) -> None:
    binding = stage.bind(stage.session())
    ran = [stage.submit(binding)]
    assert stage.status(ran[0]) == OK
    assert ("active",) not in stage.events
    stage.executor.tell_next()
    stage.executor.tell_next()  # twice is once
    ran += [stage.submit(binding) for _ in range(3)]
    assert [stage.status(ticket) for ticket in ran] == [OK] * 4
    assert stage.events.count(("active",)) == 1


def test_more_events_than_one_drain_takes_are_all_drained(stage: Stage) -> None:
    session = stage.session(max_in_flight=0)
    hang, first = run_slow(stage, session)
    binding = stage.bind(session)
    tickets = [first] + [stage.submit(binding) for _ in range(300)]
    hang.end()
    wait_until(lambda: stage.stats(session)[0] == 0, "everything ran")
    stage.drain()
    assert stage.order() == tickets
    assert select.select([stage.executor.fileno()], [], [], 0)[0] == []


def test_a_session_has_as_many_in_flight_as_it_may(stage: Stage) -> None:
    session, other = stage.session(1, max_in_flight=3), stage.session(2)
    hang, first = run_slow(stage, session)
    binding = stage.bind(session)
    queued = [stage.submit(binding) for _ in range(2)]
    assert binding.submit(99) == CREDITS
    assert stage.stats(session)[0] == 3
    free = stage.submit(stage.bind(other))
    hang.end()
    assert [stage.status(t) for t in (first, *queued, free)] == [OK] * 4
    assert stage.status(stage.submit(binding)) == OK
    assert 99 not in stage.completed()


# --- cancel and deadline


def test_a_queued_submission_can_be_cancelled_and_a_running_one_not(stage: Stage) -> None:
    session, other = stage.session(1), stage.session(2)
    hang, running = run_slow(stage, session)
    binding = stage.bind(session)
    queued, after = stage.submit(binding), stage.submit(binding)
    assert not session.cancel(running)
    assert not session.cancel(12345)
    assert not other.cancel(queued)
    assert session.cancel(queued)
    assert not session.cancel(queued)
    assert stage.status(queued) == CANCELLED
    assert running not in stage.completed()
    hang.end()
    assert [stage.status(t) for t in (running, after)] == [OK, OK]
    assert stage.stats(session) == (0, 2, 1)


def test_a_deadline_that_passes_in_the_queue_is_told_and_nothing_runs(stage: Stage) -> None:
    session = stage.session()
    hang, running = run_slow(stage, session)
    binding = stage.bind(session)
    runs = stage.context.graph("add").statistics()["run_count"]
    late = stage.submit(binding, time.monotonic_ns())
    in_time = stage.submit(binding, time.monotonic_ns() + 10**12)
    hang.end()
    assert [stage.status(t) for t in (running, late, in_time)] == [OK, LATE, OK]
    assert stage.context.graph("add").statistics()["run_count"] == runs + 1


# --- release and close


def test_release_fails_what_is_queued_and_waits_for_what_runs(stage: Stage) -> None:
    session = stage.session()
    hang = Hang()
    binding = stage.bind(session, "slow")
    running, queued = stage.submit(binding), stage.submit(binding)
    hang.wait()
    binding.release()
    binding.release()
    assert binding.submit(99) == STALE
    assert stage.status(queued) == STALE
    assert not stage.has("binding_idle", binding)
    with pytest.raises(BufferError):
        binding.drop_runnable()
    with pytest.raises(BufferError):
        stage.runnables[0].close()
    hang.end()
    assert stage.status(running) == OK
    stage.wait_event("binding_idle", binding)
    assert binding.drop_runnable() is stage.runnables[0]
    stage.runnables[0].close()
    assert binding.submit(99) == STALE


def test_a_released_binding_leaves_the_others_of_its_session(stage: Stage) -> None:
    session = stage.session()
    hang, running = run_slow(stage, session)
    going, staying = stage.bind(session), stage.bind(session, "other")
    tickets = [stage.submit(b) for b in (going, staying, going, staying)]
    going.release()
    hang.end()
    assert [stage.status(t) for t in (running, *tickets)] == [OK, STALE, OK, STALE, OK]


def test_a_closed_session_ends_when_all_of_it_has(stage: Stage) -> None:
    session = stage.session()
    hang, running = run_slow(stage, session)
    binding = stage.bind(session)
    queued = stage.submit(binding)
    session.close()
    session.close()
    assert stage.status(queued) == CLOSED
    assert binding.submit(99) == CLOSED
    unbound = stage.runnable()
    with pytest.raises(ValueError, match="closed"):
        session.bind(unbound)
    for b in stage.bindings:
        b.release()
    assert not stage.has("session_idle", session)
    hang.end()
    assert stage.status(running) == OK
    stage.wait_event("session_idle", session)
    assert stage.events[-1] == ("session_idle", session)
    assert set(session.statistics().values()) <= {0}
    with pytest.raises(ValueError, match="closed"):
        session.bind(unbound)


def test_a_session_that_holds_nothing_is_idle_at_once(stage: Stage) -> None:
    session = stage.session()
    session.close()
    stage.wait_event("session_idle", session)


def test_nothing_can_be_bound_between_the_close_and_its_event(stage: Stage) -> None:
    session = stage.session()
    runnable = stage.runnable()
    session.close()
    with pytest.raises(ValueError, match="closed"):
        session.bind(runnable)
    stage.wait_event("session_idle", session)


def test_a_closed_runnable_is_not_bound(stage: Stage) -> None:
    session, runnable = stage.session(), stage.runnable()
    runnable.close()
    with pytest.raises(ValueError, match="closed"):
        session.bind(runnable)


def test_stop_fails_what_is_queued_and_finishes_what_runs(stage: Stage) -> None:
    session = stage.session()
    hang, running = run_slow(stage, session)
    binding = stage.bind(session)
    queued = [stage.submit(binding) for _ in range(5)]
    stopping = threading.Thread(target=stage.executor.stop)
    stopping.start()
    wait_until(lambda: binding.submit(99) == STOPPING, "the executor stops")
    assert [stage.status(t) for t in queued] == [STOPPING] * 5  # without waiting for what runs
    assert running not in stage.completed()
    hang.end()
    stopping.join()
    stage.drain()
    assert stage.status(running) == OK
    assert binding.submit(99) == STOPPING
    stage.executor.stop()


def test_an_executor_with_sessions_or_bindings_does_not_close() -> None:
    executor = Executor()
    executor.start()
    session = executor.session(1)
    with pytest.raises(BufferError, match="1 sessions"):
        executor.close()
    session.close()
    assert executor.drain() == [("session_idle", session)]
    executor.close()
    executor.close()
    for call in (executor.fileno, executor.drain, executor.start):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(ValueError, match="closed"):
        executor.session(2)


@pytest.mark.parametrize(
    "options", [{"workers": (1, 1)}, {"workers": (0, 1, 1)}, {"workers": (1, 65, 1)}]
)
def test_an_absurd_number_of_workers_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        Executor(**options)
