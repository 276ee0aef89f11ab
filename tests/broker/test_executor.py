# SPDX-License-Identifier: Apache-2.0
"""The event loop's executor: futures that end, whatever happens to their submission."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.broker.inside import attached, bound, go, hanging, running, until
from tests.fake_models import MakeModel, adder

from qnnbroker.broker.executor import completion_error
from qnnbroker.broker.service import BrokerService
from qnnbroker.broker.sessions import Session
from qnnbroker.native.fake import control_loaded
from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    BrokerUnavailable,
    DeadlineExpired,
    LeaseRevoked,
    LimitExceeded,
    SubmissionCancelled,
)
from qnnbroker.protos.status import COMPLETION


@pytest.fixture
def path(make_model: MakeModel) -> Path:
    return make_model("slow", adder("slow"))


class Runs:
    """A session with one binding that can be run in tasks."""

    def __init__(self, service: BrokerService, session: Session, binding_id: int) -> None:
        self.service = service
        self.session = session
        self.binding_id = binding_id
        self.native = session.bindings.get(binding_id).bound.native

    @classmethod
    async def make(cls, service: BrokerService, path: Path) -> "Runs":
        session = attached(service)
        return cls(service, session, await bound(service, session, path))

    def start(self, deadline_ns: int = 0) -> "asyncio.Task[Any]":
        return asyncio.create_task(self.service.executor.run(self.native, deadline_ns=deadline_ns))

    async def start_hanging(self) -> "asyncio.Task[Any]":
        before = hanging()
        control_loaded("hang=graphExecute@slow:1")
        task = self.start()
        await until(lambda: hanging() > before, "it runs")
        control_loaded("clear")
        return task


def test_a_run_tells_its_times(path: Path) -> None:
    async def work() -> None:
        async with running() as service:
            timing = await (await Runs.make(service, path)).start()
            assert timing.execute_ns > 0
            assert timing.queue_ns > 0
            assert service.executor.in_flight == 0

    go(work)


def test_the_next_submission_is_told_to_whoever_asks_before_it(path: Path) -> None:
    async def work() -> None:
        async with running() as service:
            runs = await Runs.make(service, path)
            first = service.executor.next_submission()
            assert service.executor.next_submission() is first
            await asyncio.gather(runs.start(), first)
            second = service.executor.next_submission()
            assert second is not first
            assert not second.done()
            await asyncio.gather(runs.start(), second)

    go(work)


def test_a_cancelled_task_takes_its_submission_out_of_the_queue(path: Path) -> None:
    async def work() -> None:
        async with running() as service:
            runs = await Runs.make(service, path)
            first = await runs.start_hanging()
            queued, after = runs.start(), runs.start()
            await until(lambda: service.executor.in_flight == 3, "all are submitted")
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            await until(lambda: service.executor.in_flight == 2, "it is out of the queue")
            first.cancel()  # this one runs: it ends by itself
            with pytest.raises(asyncio.CancelledError):
                await first
            assert service.executor.in_flight == 2
            control_loaded("unhang")
            assert (await after).execute_ns > 0
            await until(lambda: service.executor.in_flight == 0, "all have ended")
            assert runs.session.executor_session.statistics()["run_count"] == 2

    go(work)


def test_every_way_to_fail_is_an_error_of_its_own(path: Path) -> None:
    async def work() -> None:
        async with running(max_in_flight=3) as service:
            runs = await Runs.make(service, path)
            first = await runs.start_hanging()
            late, queued = runs.start(time.monotonic_ns() + 1), runs.start()
            await until(lambda: service.executor.in_flight == 3, "all are submitted")
            with pytest.raises(LimitExceeded) as credits:
                await runs.start()
            assert credits.value.reason == "CREDITS"
            control_loaded("fail=graphExecute@slow:*:6031", "unhang")
            assert (await first).execute_ns > 0
            with pytest.raises(DeadlineExpired):
                await late
            with pytest.raises(BackendError) as failed:
                await queued
            assert failed.value.ids["qnn_code"] == "6031"
            control_loaded("clear")
            first = await runs.start_hanging()
            revoked = runs.start()
            await until(lambda: service.executor.in_flight == 2, "both are submitted")
            runs.session.bindings.release(runs.binding_id)
            with pytest.raises(LeaseRevoked):
                await revoked
            with pytest.raises(LeaseRevoked):
                await runs.start()
            control_loaded("unhang")
            assert (await first).execute_ns > 0

    go(work)


def test_the_end_of_the_session_ends_what_waits(path: Path) -> None:
    async def work() -> None:
        async with running() as service:
            runs, others = await Runs.make(service, path), await Runs.make(service, path)
            first = await others.start_hanging()
            queued = runs.start()
            await until(lambda: service.executor.in_flight == 2, "both are submitted")
            service.sessions.close(runs.session, "test")
            with pytest.raises(SubmissionCancelled) as ended:
                await queued
            assert ended.value.reason == "SESSION_CLOSED"
            control_loaded("unhang")
            assert (await first).execute_ns > 0

    go(work)


def test_stop_ends_what_waits_at_once_and_waits_for_what_runs(path: Path) -> None:
    async def work() -> None:
        async with running() as service:
            runs = await Runs.make(service, path)
            first = await runs.start_hanging()
            queued = runs.start()
            await until(lambda: service.executor.in_flight == 2, "both are submitted")
            stopping = asyncio.create_task(service.executor.stop())
            with pytest.raises(BrokerUnavailable) as stopped:
                await queued
            assert stopped.value.reason == "STOPPING"
            assert not stopping.done()
            control_loaded("unhang")
            await stopping
            assert (await first).execute_ns > 0
            with pytest.raises(BrokerUnavailable):
                await runs.start()

    go(work)


def test_a_thousand_runs_of_ten_tasks_all_end(make_model: MakeModel) -> None:
    async def work() -> None:
        async with running(max_in_flight=16) as service:
            runs = await Runs.make(service, make_model())
            other = await Runs.make(service, make_model())

            async def some(which: Runs) -> int:
                return len([await which.start() for _ in range(100)])

            counts = await asyncio.gather(*(some(r) for r in (runs, other) for _ in range(5)))
            assert counts == [100] * 10
            assert service.executor.in_flight == 0

    go(work)


@pytest.mark.parametrize("status", list(COMPLETION))
def test_every_completion_code_is_an_error_that_says_something(status: int) -> None:
    cls, reason = COMPLETION[status]
    error = completion_error(status, 0)
    assert type(error) is cls
    assert error.reason == reason
    assert len(str(error)) > 10
    with_code = completion_error(status, 1002)
    assert (with_code.ids["qnn_code"], with_code.reason) == ("1002", reason)


def test_a_code_of_the_future_is_an_internal_error() -> None:
    error: BrokerError = completion_error(999, 0)
    assert isinstance(error, BackendError)
