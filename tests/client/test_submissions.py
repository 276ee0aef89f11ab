# SPDX-License-Identifier: Apache-2.0
"""Runs over the rings: submissions in flight, their deadlines, cancels, and how they end."""

import gc
import math
import threading
import time

import numpy as np
import pytest
from tests.client.conftest import (
    HANG,
    BrokerProcess,
    MakeModel,
    held,
)
from tests.waiting import wait_until

from qnnbroker.client import Binding, Session, connect
from qnnbroker.native.fake import FakeGraph, FakeTensor
from qnnbroker.protos.errors import (
    BackendError,
    DeadlineExpired,
    InvalidRequest,
    LeaseRevoked,
    SubmissionCancelled,
    Unsupported,
    WouldBlock,
)


def execute_count(session: Session, graph: str) -> int:
    """How often the broker has executed the graph."""
    found = [g for g in session.statistics().graphs if g.graph == graph]
    return sum(g.run_count for g in found)


# --- one after the other, many in flight


def test_a_submission_gives_its_timing_and_fills_the_outputs(bindings: list[Binding]) -> None:
    binding = bindings[0]
    for n in range(20):
        binding.inputs["x"][:] = n
        submission = binding.submit()
        timing = submission.result()
        assert timing.execute_ns > 0
        assert timing.copied_bytes == 0
        assert binding.outputs["y"].tolist() == [n, n]
        assert submission.done
        assert submission.result() == timing  # again and again


def test_done_becomes_true_by_itself(bindings: list[Binding]) -> None:
    submission = bindings[0].submit()
    wait_until(lambda: submission.done, "a look sees that it is over")


def test_many_in_flight_come_back_whichever_is_asked_for_first(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    limit = session.limits.max_in_flight
    submissions = [bindings[n % 2].submit() for n in range(limit)]
    assert len({s.ticket for s in submissions}) == limit
    for submission in reversed(submissions):
        submission.result()
    assert held(session)["in_flight"] == 0


def test_submit_nowait_would_block_and_submit_waits_for_room(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    limit = session.limits.max_in_flight
    broker.faults.set(HANG)
    submissions = [bindings[0].submit_nowait() for _ in range(limit)]
    with pytest.raises(WouldBlock, match=str(limit)):
        bindings[1].submit_nowait()
    with pytest.raises(DeadlineExpired) as late:
        bindings[1].submit(timeout=0.05)
    assert late.value.reason == "QUEUED"
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(bindings[1].submit().result().queue_ns))
    thread.start()
    broker.faults.set("unhang")
    for submission in submissions:
        submission.result()
    thread.join(30)
    assert len(got) == 1


def test_submissions_nobody_keeps_give_their_room_back(
    session: Session, bindings: list[Binding]
) -> None:
    for _ in range(5 * session.limits.max_in_flight):
        bindings[0].submit()
    gc.collect()
    wait_until(lambda: held(session)["in_flight"] == 0, "all have run")
    for submission in [bindings[0].submit_nowait() for _ in range(session.limits.max_in_flight)]:
        submission.result()


def test_a_session_without_rings_has_no_submissions_and_the_same_results(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    a, b = (FakeTensor(n, "float32", (16, 16)) for n in "ab")
    path = make_model(
        "matmul", FakeGraph("m", (a, b), (FakeTensor("y", "float32", (16, 16)),), ops=("matmul",))
    )
    rng = np.random.default_rng(7)
    values = {n: rng.standard_normal((16, 16)).astype(np.float32) for n in "ab"}
    results = []
    with connect(broker.runtime_dir, ring=False) as plain:
        for one in (session, plain):
            with one.load(path).graph.bind() as binding:
                for name, value in values.items():
                    binding.inputs[name][...] = value
                timing = binding.run()
                assert timing.execute_ns > 0
                results.append(binding.outputs["y"].tobytes())
                if one is plain:
                    with pytest.raises(Unsupported, match="ring"):
                        binding.submit()
    assert results[0] == results[1]
    assert np.any(np.frombuffer(results[0], np.float32))


# --- deadlines, cancels, failures


def test_a_submission_that_waits_too_long_never_executes(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    running = bindings[0].submit()
    before = execute_count(session, "other")
    late = bindings[1].submit(timeout=0.05)
    assert not late.wait_done(0.2)  # told when its turn comes
    broker.faults.set("unhang")
    with pytest.raises(DeadlineExpired) as info:
        late.result()
    assert info.value.reason == "QUEUED"
    running.result()
    assert execute_count(session, "other") == before


def test_a_run_that_takes_too_long_is_given_up_and_its_queued_one_cancelled(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    running = bindings[0].submit()
    before = execute_count(session, "other")
    start = time.monotonic()
    with pytest.raises(DeadlineExpired):
        bindings[1].run(timeout=0.1)
    assert time.monotonic() - start >= 0.1
    wait_until(lambda: held(session)["in_flight"] == 1, "the queued run is cancelled")
    broker.faults.set("unhang")
    running.result()
    assert execute_count(session, "other") == before
    bindings[1].run()


def test_cancel_takes_a_queued_submission_and_leaves_a_running_one(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    running, queued, last = (b.submit() for b in (bindings[0], bindings[1], bindings[1]))
    before = execute_count(session, "other")
    # The broker decides; that it runs is seen in its statistics only.
    wait_until(lambda: held(session)["in_flight"] == 3, "all are taken")
    assert queued.cancel()
    with pytest.raises(SubmissionCancelled) as info:
        queued.result()
    assert info.value.reason == "BY_CALLER"
    assert not queued.cancel()
    assert running.cancel()  # a wish; it runs
    assert not running.wait_done(0.05)
    broker.faults.set("unhang")
    running.result()
    last.result()
    assert execute_count(session, "other") == before + 1


def test_a_failed_execute_says_the_code_and_the_next_one_is_good(
    broker: BrokerProcess, bindings: list[Binding]
) -> None:
    broker.faults.set("fail=graphExecute@g:1:1004")
    failed, good = bindings[0].submit(), bindings[0].submit()
    with pytest.raises(BackendError, match="1004"):
        failed.result()
    good.result()


def test_a_binding_that_is_closed_fails_what_it_had_queued(
    broker: BrokerProcess, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    running, queued = bindings[0].submit(), bindings[1].submit()
    bindings[1].close()
    with pytest.raises(LeaseRevoked):
        queued.result()
    with pytest.raises(LeaseRevoked):
        bindings[1].submit()
    broker.faults.set("unhang")
    running.result()


@pytest.mark.parametrize("timeout", [math.inf, 1e12, 2**70])
def test_a_timeout_may_be_as_long_as_one_likes(bindings: list[Binding], timeout: float) -> None:
    bindings[0].run(timeout=timeout)
    assert bindings[0].submit(timeout=timeout).wait_done(timeout)


def test_a_timeout_that_is_over_already_or_no_number(bindings: list[Binding]) -> None:
    with pytest.raises(DeadlineExpired):
        bindings[0].run(timeout=-1)
    with pytest.raises(InvalidRequest, match="nan"):
        bindings[0].run(timeout=math.nan)
