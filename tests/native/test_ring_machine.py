# SPDX-License-Identifier: Apache-2.0
"""Ring and executor together against a plain deque: a hypothesis state machine."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tests.native.executor_stage import (
    CANCELLED,
    LATE,
    OK,
    Hang,
    Stage,
    executed,
    last_call,
)
from tests.native.ring_stage import RingStage
from tests.stress import FULL, scaled
from tests.waiting import wait_until

from qnnbroker.native.executor import ExecutorBinding
from qnnbroker.native.fake import control_loaded
from qnnbroker.native.qnn_context import QnnContext

LIMIT = 12
LEASE_REVOKED, STALE_GENERATION = 4, 3
pytestmark = [pytest.mark.slow] if FULL else []


@dataclass
class Bound:
    """A binding as the model sees it."""

    native: ExecutorBinding
    name: int
    graph: str
    parked: bool = False
    released: bool = False


@dataclass
class Queued:
    """A submission as the model sees it."""

    ticket: int
    bound: Bound
    late: bool


class RingMachine(RuleBasedStateMachine):
    """Everything happens behind an execute that hangs, so that the model knows the queue; `flush`
    lets it go, and compares what came out."""

    make: Callable[[], Stage]

    def __init__(self) -> None:
        super().__init__()
        self.stage = self.make()
        self.rings = RingStage(self.stage, LIMIT)
        other = self.stage.session(2)
        self.gate = self.stage.bind(other, "slow")
        self.bound: list[Bound] = []
        self.queue: deque[Queued] = deque()
        self.expected: dict[int, int] = {}  # results that must come, by ticket
        self.generations = [0] * LIMIT
        for graph in ("add", "other"):
            self.bind(graph)
        self.shut()

    def shut(self) -> None:
        self.hang = Hang()
        self.blocker = self.stage.submit(self.gate)
        self.hang.wait()

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.expected)

    def bind(self, graph: str) -> None:
        native, name = self.rings.bind(graph)
        self.bound.append(Bound(native, name, graph))

    # --- what may happen

    @precondition(lambda self: len(self.bound) < 6)
    @rule(graph=st.sampled_from(["add", "other"]))
    def one_more_binding(self, graph: str) -> None:
        self.bind(graph)

    @rule(which=st.integers(0, 5), late=st.sampled_from([False, False, False, True]))
    def submit(self, which: int, late: bool) -> None:
        bound = self.bound[which % len(self.bound)]
        ticket = self.rings.client.submit(bound.name, time.monotonic_ns() if late else 0)
        if self.in_flight == LIMIT:
            assert ticket == -1
            return
        assert ticket >= 0
        if bound.released:
            self.expected[ticket] = STALE_GENERATION
        else:
            self.queue.append(Queued(ticket, bound, late))

    @precondition(lambda self: self.queue)
    @rule(which=st.integers(0, LIMIT))
    def cancel(self, which: int) -> None:
        chosen = self.queue[which % len(self.queue)]
        assert self.rings.client.cancel(chosen.ticket)
        self.queue.remove(chosen)
        assert self.rings.status(chosen.ticket) == CANCELLED

    @precondition(lambda self: self.queue)
    @rule(which=st.integers(0, LIMIT))
    def abandon(self, which: int) -> None:
        chosen = self.queue[which % len(self.queue)]
        assert self.rings.client.cancel(chosen.ticket)
        self.queue.remove(chosen)
        self.rings.client.abandon(chosen.ticket)
        wait_until(lambda: self.settled() and self.look(), "its place is free")

    def look(self) -> bool:
        self.rings.client.take_watched()
        return self.rings.client.in_flight == self.in_flight

    @rule(which=st.integers(0, 5))
    def park(self, which: int) -> None:
        bound = self.bound[which % len(self.bound)]
        assert bound.native.park() == (not bound.parked and not bound.released)
        bound.parked = not bound.released

    @rule(which=st.integers(0, 5))
    def revive(self, which: int) -> None:
        bound = self.bound[which % len(self.bound)]
        wanted = bound.parked and not bound.released
        assert bound.native.revive(self.stage.runnable(bound.graph)) == wanted
        bound.parked = False

    @precondition(lambda self: any(not b.released for b in self.bound))
    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        wait_until(self.settled, "the broker has taken what was submitted")
        bound = self.bound[which % len(self.bound)]
        bound.native.release()
        for queued in [q for q in self.queue if q.bound is bound]:
            self.queue.remove(queued)
            self.expected[queued.ticket] = LEASE_REVOKED
        bound.released = True

    def settled(self) -> bool:
        return self.stage.stats(self.rings.session)[0] == len(self.queue)

    @rule()
    def flush(self) -> None:
        """Everything out, in the order of the deque."""
        wait_until(self.settled, "the broker has taken what was submitted")
        anyone_parked = any(b.parked for b in self.bound)
        before = last_call()
        self.hang.end()
        for bound in self.bound:
            if bound.parked and any(q.bound is bound and not q.late for q in self.queue):
                self.stage.wait_event("binding_wanted", bound.native)
                self.stage.events.remove(("binding_wanted", bound.native))
            if bound.parked and not bound.released:
                assert bound.native.revive(self.stage.runnable(bound.graph))
                bound.parked = False
        assert self.stage.status(self.blocker) == OK
        for queued in self.queue:
            found = self.rings.status(queued.ticket)
            assert found == (LATE if queued.late else OK), queued
        ran = [q for q in self.queue if not q.late]
        names = [c.arguments["name"] for c in executed(before)]
        mine = [n for n in names if n != "slow"]
        if anyone_parked:  # those that were put aside ran later
            assert sorted(mine) == sorted(q.bound.graph for q in ran)
        else:
            assert mine == [q.bound.graph for q in ran]
        self.queue.clear()
        for ticket, status in self.expected.items():
            assert self.rings.status(ticket) == status
        self.expected.clear()
        assert self.rings.client.in_flight == 0
        assert self.stage.stats(self.rings.session)[0] == 0
        self.shut()

    def teardown(self) -> None:
        try:
            self.flush()
        finally:
            control_loaded("clear", "unhang")
            self.rings.client.close()
            self.stage.close()


def test_ring_and_executor_do_what_a_deque_does(executor_context: QnnContext) -> None:
    RingMachine.make = staticmethod(lambda: Stage(executor_context))
    run_state_machine_as_test(
        RingMachine,
        settings=settings(
            max_examples=scaled(15, 300),
            stateful_step_count=25,
            deadline=None,
            derandomize=not FULL,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
