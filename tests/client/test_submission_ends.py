# SPDX-License-Identifier: Apache-2.0
"""Runs over the rings from many threads, and the ways in which waiting for them ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.client.conftest import (
    HANG,
    BrokerProcess,
    MakeModel,
    held,
    named,
)
from tests.waiting import wait_until

from qnnbroker.client import Binding, Session, connect
from qnnbroker.protos.errors import (
    BrokerLost,
    InvalidRequest,
    SessionClosed,
)

# --- threads


def test_results_of_many_threads_on_one_session_are_their_own(
    session: Session, make_model: MakeModel
) -> None:
    model = session.load(make_model("copies", named("g")))
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            with model.graph.bind() as binding:
                for n in range(150):
                    binding.inputs["x"][:] = (number, n)
                    if n % 3:
                        binding.run()
                    else:
                        binding.submit().result()
                    if binding.outputs["y"].tolist() != [number, n]:
                        wrong.append((number, n, binding.outputs["y"].tolist()))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=[n]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_one_submission_may_be_awaited_by_several_threads(
    broker: BrokerProcess, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    submission = bindings[0].submit()
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(submission.result().execute_ns))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert not submission.done  # does not wait for those who do
    assert not submission.wait_done(0.05)
    broker.faults.set("unhang")
    for thread in threads:
        thread.join(30)
    assert len(results) == 3
    assert len(set(results)) == 1


def test_another_thread_goes_on_while_a_run_waits(
    broker: BrokerProcess, bindings: list[Binding]
) -> None:
    # Against the same count beside a plain sleep, in turns, and the best of each: what else happens
    # on the machine only ever slows a phase down. With the GIL held it would be near 0.
    count = 0
    stop = threading.Event()

    def work() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1

    broker.faults.set("delay=graphExecute@g:*:200000")
    thread = threading.Thread(target=work)
    thread.start()
    try:
        rates: dict[str, list[float]] = {"run": [], "sleep": []}
        for turn in range(50):
            if turn >= 3 and max(rates["run"]) >= 0.9 * max(rates["sleep"]):
                break
            for kind in rates:
                before, start = count, time.perf_counter()
                if kind == "run":
                    bindings[0].run()
                else:
                    time.sleep(0.2)
                rates[kind].append((count - before) / (time.perf_counter() - start))
    finally:
        stop.set()
        thread.join()
    assert max(rates["run"]) >= 0.9 * max(rates["sleep"]), rates


# --- ends


def test_closing_the_session_in_another_thread_ends_waits_though_the_graph_hangs(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    running, queued = bindings[0].submit(), bindings[1].submit()
    ends: list[type[BaseException]] = []

    def wait(number: int) -> None:
        try:
            if number == 0:
                running.result()
            elif number == 1:
                queued.result()
            else:
                bindings[1].run()
        except SessionClosed as error:
            ends.append(type(error))

    threads = [threading.Thread(target=wait, args=[n]) for n in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: held(session)["in_flight"] == 3, "three are in flight")
    session.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert ends == [SessionClosed] * 3
    for use in (running.result, bindings[0].submit, bindings[0].run):
        with pytest.raises(SessionClosed):
            use()
    broker.faults.set("unhang")


def test_a_broker_killed_while_runs_wait_is_lost_at_once(
    mortal_broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(mortal_broker.runtime_dir) as session:
        model = session.load(make_model("copies", named("g")))
        made = [model.graph.bind() for _ in range(4)]
        mortal_broker.faults.set(HANG)
        submission = made[3].submit()
        ends: list[float] = []

        def wait(number: int) -> None:
            with pytest.raises(BrokerLost):
                made[number].run()
            ends.append(time.monotonic())

        threads = [threading.Thread(target=wait, args=[n]) for n in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: held(session)["in_flight"] == 4, "four are in flight")
        mortal_broker.kill()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert len(ends) == 3
        with pytest.raises(BrokerLost):
            submission.result()
        with pytest.raises(BrokerLost):
            made[0].submit()


INTERRUPTED = """
import sys
from qnnbroker.client import connect
with connect(sys.argv[1]) as session, session.load(sys.argv[2]) as model:
    with model.graphs["g"].bind() as slow, model.graphs["other"].bind() as quick:
        print("ready", flush=True)
        try:
            slow.run()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        sys.stdin.read()
        quick.run()
        slow.run()
        print("fine", flush=True)
"""


def test_control_c_ends_a_run_and_the_session_goes_on(
    broker: BrokerProcess, session: Session, make_model: MakeModel, bindings: list[Binding]
) -> None:
    path = make_model("copies", named("g"), named("other"))
    broker.faults.set(HANG)
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(broker.runtime_dir), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        wait_until(lambda: held(session)["in_flight"] == 1, "the child's run is in flight")
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        broker.faults.set("unhang")
        child.stdin.close()
        assert child.stdout.readline() == "fine\n"
    assert child.returncode == 0


def test_a_forked_child_cannot_touch_the_rings_of_its_parent(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    submission = bindings[0].submit()
    # Another thread waits, inside the ring, at the moment of the fork.
    thread = threading.Thread(target=submission.result)
    thread.start()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        code = 1
        try:
            for use in (bindings[1].run, bindings[1].submit, lambda: submission.wait_done(0.1)):
                try:
                    use()
                except SessionClosed as error:
                    code = 0 if error.reason == "FORKED" else 2
                else:
                    code = 3
                if code:
                    break
            hot = session._hot
            assert hot is not None
            hot.ring.abandon(submission.ticket)
            assert hot.ring.in_flight == 0
            session._hot = None
            del hot, submission
            gc.collect()
        except BaseException:
            code = 4
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    broker.faults.set("unhang")
    thread.join(20)
    assert not thread.is_alive()
    bindings[1].run()


@pytest.mark.parametrize("name", ["QNNBROKER_SPIN_NS", "QNNBROKER_SPIN_LIMIT_NS"])
@pytest.mark.parametrize("text", ["", "-1", "1e3", "x", "2000000000"])
def test_a_spin_that_is_no_time_is_refused(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch, name: str, text: str, no_leaks: None
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(InvalidRequest, match=name):
        connect(broker.runtime_dir)


@pytest.mark.parametrize(("spin", "limit"), [("0", "50000"), ("50000", "0"), ("50000", "50000")])
def test_runs_with_and_without_spinning(
    broker: BrokerProcess,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    spin: str,
    limit: str,
) -> None:
    monkeypatch.setenv("QNNBROKER_SPIN_NS", spin)
    monkeypatch.setenv("QNNBROKER_SPIN_LIMIT_NS", limit)
    path: Path = make_model("copies", named("g"))
    with connect(broker.runtime_dir) as session, session.load(path).graph.bind() as binding:
        for n in range(300):
            binding.inputs["x"][:] = n
            binding.run()
            assert binding.outputs["y"].tolist() == [n, n]
