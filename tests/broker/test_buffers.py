# SPDX-License-Identifier: Apache-2.0
"""Shared buffers of a session: counted while they are made, given back once."""

import asyncio
import resource
import threading
from collections.abc import Callable

import pytest
from tests.broker.inside import alive, attached, go, running

from qnnbroker.broker.service import BrokerService
from qnnbroker.native.region import Region
from qnnbroker.protos.errors import BrokerError, InvalidRequest, LeaseRevoked, LimitExceeded

PAGE = 4096


@pytest.fixture
def regions() -> Callable[[], int]:
    """How many regions there are more than at the start of the test."""
    before = alive()["regions"]
    return lambda: alive()["regions"] - before


def test_a_buffer_has_whole_pages_and_is_counted(regions: Callable[[], int]) -> None:
    async def work() -> None:
        async with running() as service:
            buffers = attached(service).buffers
            made = [await buffers.allocate(n) for n in (1, PAGE, PAGE + 1)]
            assert [b.size_bytes for b in made] == [PAGE, PAGE, 2 * PAGE]
            assert (len(buffers), buffers.total_bytes) == (3, 4 * PAGE)
            assert buffers.get(made[1].buffer_id) is made[1]
            buffers.release(made[2].buffer_id)
            assert (len(buffers), buffers.total_bytes) == (2, 2 * PAGE)
            with pytest.raises(LeaseRevoked):
                buffers.get(made[2].buffer_id)
            assert regions() == 2
        assert regions() == 0

    go(work)


def limits_under_way(service: BrokerService) -> "asyncio.Future[list[object]]":
    """Five allocations at once of a session that has room for three."""
    buffers = attached(service).buffers
    asked = (buffers.allocate(PAGE) for _ in range(5))
    return asyncio.gather(*asked, return_exceptions=True)


@pytest.mark.parametrize("limit", [{"max_session_bytes": 3 * PAGE}, {"max_buffers": 3}])
def test_what_is_under_way_counts_towards_the_limits(
    limit: dict[str, int], regions: Callable[[], int]
) -> None:
    async def work() -> None:
        async with running(**limit) as service:
            results = await limits_under_way(service)
            refused = [r for r in results if isinstance(r, BrokerError)]
            assert [type(r) for r in refused] == [LimitExceeded] * 2
            assert regions() == 3

    go(work)


def test_a_refused_buffer_leaves_its_room_to_others() -> None:
    async def work() -> None:
        async with running(max_session_bytes=2 * PAGE, max_buffer_bytes=4 * PAGE) as service:
            buffers = attached(service).buffers
            for _ in range(3):
                with pytest.raises(LimitExceeded, match="limit"):
                    await buffers.allocate(3 * PAGE)
            with pytest.raises(LimitExceeded, match="at most"):
                await buffers.allocate(5 * PAGE)
            with pytest.raises(InvalidRequest):
                await buffers.allocate(0)
            await buffers.allocate(2 * PAGE)

    go(work)


def test_a_session_that_ends_meanwhile_gets_no_buffer(regions: Callable[[], int]) -> None:
    async def work() -> None:
        async with running() as service:
            session = attached(service)
            making = asyncio.create_task(session.buffers.allocate(PAGE))
            await asyncio.sleep(0)
            service.sessions.close(session, "test")
            with pytest.raises(BrokerError, match="ended"):
                await making
            assert regions() == 0

    go(work)


def test_memory_made_for_somebody_who_gave_up_is_given_back(regions: Callable[[], int]) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def late(size_bytes: int) -> Region:
        begun.set()
        go_on.wait(60)
        return Region.create(size_bytes)

    async def work() -> None:
        async with running() as service:
            buffers = attached(service).buffers
            service.sessions.memory.maker = lambda kind: late  # type: ignore[method-assign]
            making = asyncio.create_task(buffers.allocate(PAGE))
            await asyncio.to_thread(begun.wait, 60)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
            go_on.set()
        assert (regions(), buffers.total_bytes) == (0, 0)

    go(work)


def test_memory_that_the_system_refuses_is_a_limit() -> None:
    async def work() -> None:
        async with running() as service:
            buffers = attached(service).buffers
            await buffers.allocate(PAGE)
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # no fd is to be had any more
            try:
                with pytest.raises(LimitExceeded) as refused:
                    await buffers.allocate(PAGE)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert refused.value.reason == "MEMORY"
            await buffers.allocate(PAGE)
            assert buffers.total_bytes == 2 * PAGE

    go(work)
