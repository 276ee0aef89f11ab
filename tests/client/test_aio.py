# SPDX-License-Identifier: Apache-2.0
"""Runs awaited in asyncio, through the completion doorbell."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from tests.client.conftest import BrokerProcess, MakeModel, copier, held
from tests.waiting import wait_until

from qnnbroker.client import Binding, Session, aio, connect
from qnnbroker.protos.errors import (
    BackendError,
    BrokerLost,
    DeadlineExpired,
    InvalidRequest,
    SessionClosed,
)

HANG = "hang=graphExecute@g:*"


@pytest.fixture
def bindings(session: Session, make_model: MakeModel) -> Iterator[list[Binding]]:
    """Eight of the graph "g", which tests may make hang, and one of "other"."""
    model = session.load(make_model("copies", copier("g"), copier("other")))
    made = [model.graphs["g"].bind() for _ in range(8)] + [model.graphs["other"].bind()]
    yield made
    for binding in made:
        binding.close()


def test_a_run_is_awaited_and_fills_the_outputs(bindings: list[Binding]) -> None:
    async def work() -> None:
        for n in range(50):
            bindings[0].inputs["x"][:] = n
            timing = await aio.run(bindings[0])
            assert timing.execute_ns > 0
            assert bindings[0].outputs["y"].tolist() == [n, n]

    asyncio.run(work())
    asyncio.run(work())  # in another loop, when the first is over


def test_other_tasks_go_on_while_runs_are_awaited(
    broker: BrokerProcess, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)

    async def work() -> int:
        runs = [asyncio.create_task(aio.run(b)) for b in bindings[:8]]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not any(r.done() for r in runs)
        broker.faults.set("unhang")
        return len(await asyncio.gather(*runs))

    assert asyncio.run(work()) == 8


def test_more_than_the_session_may_have_in_flight_all_come(
    session: Session, bindings: list[Binding]
) -> None:
    count = 3 * session.limits.max_in_flight

    async def work() -> int:
        return len(await asyncio.gather(*(aio.run(bindings[n % 8]) for n in range(count))))

    assert asyncio.run(work()) == count
    assert held(session)["in_flight"] == 0


def test_awaited_runs_beside_threads_that_wait_are_not_forgotten(bindings: list[Binding]) -> None:
    # Threads read completions and the doorbell for the loop, and the loop for them.
    stop = threading.Event()
    wrong: list[BaseException] = []

    def work(binding: Binding) -> None:
        try:
            while not stop.is_set():
                binding.run(timeout=20)
                binding.submit(timeout=20).result(20)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=[b]) for b in bindings[5:8]]
    for thread in threads:
        thread.start()

    async def many(binding: Binding) -> None:
        for n in range(150):
            binding.inputs["x"][:] = n
            await asyncio.wait_for(aio.run(binding), 20)
            assert binding.outputs["y"].tolist() == [n, n]

    async def all_of_them() -> None:
        await asyncio.gather(*(many(b) for b in bindings[:5]))

    try:
        asyncio.run(all_of_them())
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert wrong == []


def test_cancelling_the_task_cancels_a_queued_run_and_gives_its_room_back(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)

    async def work() -> None:
        running = asyncio.create_task(aio.run(bindings[0]))
        queued = [asyncio.create_task(aio.run(bindings[8])) for _ in range(10)]
        await asyncio.sleep(0)
        for task in queued:
            task.cancel()
        found = await asyncio.gather(*queued, return_exceptions=True)
        assert all(isinstance(f, asyncio.CancelledError) for f in found)
        await asyncio.to_thread(
            wait_until, lambda: held(session)["in_flight"] == 1, "only what runs is left"
        )
        broker.faults.set("unhang")
        await running

    asyncio.run(work())


def test_a_late_run_and_a_failed_one_say_so(broker: BrokerProcess, bindings: list[Binding]) -> None:
    async def work() -> None:
        broker.faults.set(HANG)
        running = asyncio.create_task(aio.run(bindings[0]))
        await asyncio.sleep(0)
        late = asyncio.create_task(aio.run(bindings[8], timeout=0.02))
        await asyncio.sleep(0.1)
        broker.faults.set("unhang")
        with pytest.raises(DeadlineExpired):
            await late
        await running
        broker.faults.set("fail=graphExecute@g:1:1004")
        with pytest.raises(BackendError, match="1004"):
            await aio.run(bindings[0])
        await aio.run(bindings[0])

    asyncio.run(work())


def test_no_room_in_time_is_a_deadline_too(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)
    held_back = [bindings[0].submit() for _ in range(session.limits.max_in_flight)]

    async def work() -> None:
        with pytest.raises(DeadlineExpired) as info:
            await aio.run(bindings[8], timeout=0.05)
        assert info.value.reason == "QUEUED"
        broker.faults.set("unhang")
        for submission in held_back:
            await asyncio.to_thread(submission.result)
        await aio.run(bindings[8])

    asyncio.run(work())


def test_closing_the_session_in_a_thread_ends_what_is_awaited_at_once(
    broker: BrokerProcess, session: Session, bindings: list[Binding]
) -> None:
    broker.faults.set(HANG)

    async def work() -> None:
        runs = [asyncio.create_task(aio.run(b)) for b in bindings[:3]]
        await asyncio.sleep(0)
        await asyncio.to_thread(session.close)
        found = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)
        assert [type(f) for f in found] == [SessionClosed] * 3
        with pytest.raises(SessionClosed):
            await aio.run(bindings[0])

    asyncio.run(work())
    broker.faults.set("unhang")


def test_a_broker_that_dies_is_lost_to_what_is_awaited(
    mortal_broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(mortal_broker.runtime_dir) as session:
        binding = session.load(make_model("copies", copier("g"))).graph.bind()
        mortal_broker.faults.set(HANG)

        async def work() -> None:
            run = asyncio.create_task(aio.run(binding))
            await asyncio.to_thread(
                wait_until, lambda: held(session)["in_flight"] == 1, "it is in flight"
            )
            await asyncio.to_thread(mortal_broker.kill)
            with pytest.raises(BrokerLost):
                await asyncio.wait_for(run, 20)

        asyncio.run(work())


def test_two_loops_at_once_are_refused(broker: BrokerProcess, bindings: list[Binding]) -> None:
    broker.faults.set(HANG)

    async def first() -> None:
        run = asyncio.create_task(aio.run(bindings[0]))
        await asyncio.sleep(0)

        def elsewhere() -> None:
            with pytest.raises(InvalidRequest, match="one event loop"):
                asyncio.run(aio.run(bindings[8]))

        await asyncio.to_thread(elsewhere)
        broker.faults.set("unhang")
        await run

    asyncio.run(first())
