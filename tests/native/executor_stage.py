# SPDX-License-Identifier: Apache-2.0
"""An executor on a stage: graphs of the fake QNN library, and events collected by the test."""

import itertools
from collections.abc import Callable
from typing import Any

from tests.fake_models import TENSOR_BYTES, adder, numbers
from tests.waiting import wait_until

from qnnbroker.native.counters import live_counts
from qnnbroker.native.executor import Executor, ExecutorBinding, ExecutorSession
from qnnbroker.native.fake import FakeCall, control_loaded, read_ring
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_graph import QnnRunnable

OK, STALE, CREDITS, LATE, CANCELLED, CLOSED, STOPPING, QNN, INTERNAL = 0, 4, 5, 7, 9, 10, 12, 15, 18
#: Only "add" is over before the executor would spin or leave the doorbells unwatched.
GRAPHS = [adder("add"), *(adder(name, execute_us=300) for name in ("slow", "other", "short"))]

Event = tuple[Any, ...]


class Stage:
    """An executor whose events are collected by the test's own thread."""

    def __init__(self, context: QnnContext, **options: Any) -> None:
        self.context = context
        self.executor = Executor(**options)
        self.executor.start()
        self.events: list[Event] = []
        self.runnables: list[QnnRunnable] = []
        self.sessions: list[ExecutorSession] = []
        self.bindings: list[ExecutorBinding] = []
        self.tickets = itertools.count(1)

    def session(self, number: int = 1, **options: Any) -> ExecutorSession:
        self.sessions.append(self.executor.session(number, **options))
        return self.sessions[-1]

    def runnable(self, graph: str = "add", seed: int = 0) -> QnnRunnable:
        a, b = (n.tobytes() for n in numbers(seed))
        spans = [(a, 0, TENSOR_BYTES), (b, 0, TENSOR_BYTES)]
        out = bytearray(TENSOR_BYTES)
        made = self.context.graph(graph).bind(spans, [(out, 0, TENSOR_BYTES)])
        self.runnables.append(made)
        return made

    def bind(self, session: ExecutorSession, graph: str = "add", **options: Any) -> ExecutorBinding:
        self.bindings.append(session.bind(self.runnable(graph), **options))
        return self.bindings[-1]

    def submit(self, binding: ExecutorBinding, deadline_ns: int = 0) -> int:
        ticket = next(self.tickets)
        assert binding.submit(ticket, deadline_ns) == OK
        return ticket

    def drain(self) -> None:
        self.events += self.executor.drain()

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        def look() -> Any:
            self.drain()
            return condition()

        return wait_until(look, what, pause=0.0005)

    def completed(self) -> dict[int, Event]:
        return {e[2]: e for e in self.events if e[0] == "completed"}

    def order(self) -> list[int]:
        return [e[2] for e in self.events if e[0] == "completed"]

    def status(self, ticket: int) -> int:
        """Of a submission, once it is complete."""
        self.wait(lambda: ticket in self.completed(), f"submission {ticket} is complete")
        return int(self.completed()[ticket][3])

    def wait_event(self, kind: str, subject: object) -> None:
        self.wait(lambda: (kind, subject) in self.events, f"{kind} of {subject}")

    def stats(self, session: ExecutorSession) -> tuple[int, int, int]:
        """In flight, runs and errors of the session."""
        found = session.statistics()
        return found["in_flight"], found["run_count"], found["error_count"]

    def has(self, kind: str, subject: object) -> bool:
        self.drain()
        return (kind, subject) in self.events

    def close(self) -> None:
        """Everything back in order, and nothing of it left."""
        self.executor.stop()
        for session in self.sessions:
            session.close()
        for binding in self.bindings:
            binding.release()
        self.drain()
        for session in self.sessions:
            self.wait_event("session_idle", session)
        assert len(self.order()) == len(set(self.order()))  # nothing completes twice
        for binding in self.bindings:
            binding.drop_runnable()
        for runnable in self.runnables:
            runnable.close()
        self.executor.close()


def alive() -> dict[str, int]:
    return {k: live_counts()[k] for k in ("runnables", "sessions", "bindings", "submissions")}


MakeStage = Callable[..., Stage]


def last_call() -> int:
    """The number of the last call of the record, which keeps only some thousands of them."""
    calls = read_ring()
    return calls[-1].sequence if calls else 0


def calls_after(call: int, name: str) -> list[FakeCall]:
    """The calls of that name that ended after that call."""
    return [c for c in read_ring() if c.name == name and c.sequence > call]


def executed(after: int = 0) -> list[FakeCall]:
    """The executes that ended after that call, in the order in which they got the device."""
    calls = [c for c in calls_after(after, "graphExecute") if "order" in c.arguments]
    return sorted(calls, key=lambda c: c.number("order"))


class Hang:
    """Executes of graph "slow" hang until `end`."""

    def __init__(self) -> None:
        self.after = last_call()
        control_loaded("hang=graphExecute@slow:*")

    def wait(self, count: int = 1) -> None:
        wait_until(lambda: self.count() >= count, f"{count} executes hang")

    def count(self) -> int:
        """How many hang, or did."""
        return sum(c.arguments["kind"] == "hang" for c in calls_after(self.after, "fault"))

    def end(self) -> None:
        control_loaded("clear", "unhang")


def run_slow(stage: Stage, session: ExecutorSession, **options: Any) -> tuple[Hang, int]:
    """A submission that runs, and goes on running until the hang ends."""
    hang = Hang()
    ticket = stage.submit(stage.bind(session, "slow", **options))
    hang.wait()
    return hang, ticket
