# SPDX-License-Identifier: Apache-2.0
"""A thread for each call: limits, order, ends."""

import asyncio
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait

import pytest
from tests.waiting import wait_until

from qnnbroker.broker.threads import FreshThreads, made_on_thread


def test_every_call_has_a_thread_of_its_own_that_ends_with_it() -> None:
    threads = FreshThreads(1, "own")
    calls = [threads.submit(threading.current_thread) for _ in range(20)]
    found = [call.result(timeout=60) for call in calls]
    assert len({id(thread) for thread in found}) == 20  # all are alive here: no id comes twice
    assert [thread.name for thread in found] == [f"own-{n}" for n in range(1, 21)]
    wait_until(lambda: not any(thread.is_alive() for thread in found), "all have ended")
    threads.shutdown()


@pytest.mark.parametrize("limit", [1, 3])
def test_so_many_run_at_a_time_and_no_more(limit: int) -> None:
    threads, lock, full, go = FreshThreads(limit, "t"), threading.Lock(), [0, 0], threading.Event()

    def call() -> None:
        with lock:
            full[0] += 1
            full[1] = max(full)
        go.wait(60)
        with lock:
            full[0] -= 1

    calls = [threads.submit(call) for _ in range(20)]
    wait_until(lambda: full[0] == limit, "as many as may")
    go.set()
    assert not wait(calls, timeout=60).not_done
    assert full == [0, limit]
    threads.shutdown()


def test_what_a_call_raises_is_the_futures_and_the_next_runs() -> None:
    threads = FreshThreads(1, "t")
    bad, good = threads.submit(int, "x"), threads.submit(int, "7", base=8)
    with pytest.raises(ValueError, match="'x'"):
        bad.result(timeout=60)
    assert good.result(timeout=60) == 7
    threads.shutdown()


def test_a_cancelled_call_never_runs_and_keeps_nobody_out() -> None:
    threads, go = FreshThreads(1, "t"), threading.Event()
    ran: list[int] = []
    first = threads.submit(go.wait, 60)
    cancelled, last = threads.submit(ran.append, 1), threads.submit(ran.append, 2)
    assert cancelled.cancel()
    go.set()
    last.result(timeout=60)
    assert first.result()
    assert ran == [2]
    threads.shutdown()


def test_shutdown_waits_for_what_runs_and_drops_what_waits_when_told() -> None:
    threads, go = FreshThreads(1, "t"), threading.Event()
    running, waiting = threads.submit(go.wait, 60), threads.submit(go.wait, 60)
    threads.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(CancelledError):
        waiting.result(timeout=60)
    assert not running.done()
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.submit(int)
    go.set()
    threads.shutdown()
    assert running.result() is True


def test_without_threads_the_call_fails_and_the_next_may_succeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = FreshThreads(1, "t")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        failed = threads.submit(int)
    with pytest.raises(RuntimeError, match="new thread"):
        failed.result(timeout=60)
    assert threads.submit(int, "3").result(timeout=60) == 3
    threads.shutdown()
    with pytest.raises(ValueError, match="found 0"):
        FreshThreads(0, "t")


class Made:
    """Something that has to be given back."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("nothing", [False, True])
def test_what_is_made_for_somebody_who_gave_up_is_closed(nothing: bool) -> None:
    made, go, begun = Made(), threading.Event(), threading.Event()

    def make() -> Made | None:
        begun.set()
        go.wait(60)
        return None if nothing else made

    async def scenario() -> None:
        with ThreadPoolExecutor(1) as threads:
            task = asyncio.create_task(made_on_thread(threads, make))
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not made.closed
            go.set()
        for _ in range(100):  # what the thread has done reaches the loop
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert made.closed is not nothing


def test_what_is_made_for_somebody_who_waits_is_theirs() -> None:
    made = asyncio.run(made_on_thread(None, Made))
    assert not made.closed
    with pytest.raises(ValueError, match="no"):
        asyncio.run(made_on_thread(None, refuse))


def refuse() -> Made:
    raise ValueError("no")


def test_it_is_tidied_once_when_all_calls_are_over_on_a_thread_that_made_none() -> None:
    tidied: list[str] = []

    def tidy() -> None:
        tidied.append(threading.current_thread().name)

    threads = FreshThreads(2, "t", tidy=tidy, rest_seconds=0)
    go, begun = threading.Event(), threading.Event()
    second: list[Future[bool]] = []

    def first() -> None:  # something is always under way or waits, until `go`
        second.append(threads.submit(go.wait, 60))
        begun.set()

    threads.submit(first).result(timeout=60)
    assert begun.is_set()
    assert not tidied
    go.set()
    assert second[0].result(timeout=60)
    wait_until(lambda: tidied, "it has been tidied")
    assert tidied == ["t-tidy-1"]
    threads.submit(int).result(timeout=60)
    wait_until(lambda: len(tidied) == 2, "and again after the next call")
    threads.shutdown()


def test_as_many_threads_as_ran_take_over_what_is_left_of_them_before_it_is_tidied() -> None:
    alive: list[int] = []

    def tidy() -> None:
        alive.append(sum(thread.name.startswith("t-tidy-") for thread in threading.enumerate()))

    threads, together = FreshThreads(3, "t", tidy=tidy, rest_seconds=0), threading.Barrier(3)
    calls = [threads.submit(together.wait, 60) for _ in range(3)]
    assert not wait(calls, timeout=60).not_done
    wait_until(lambda: alive, "it has been tidied")
    assert alive[0] >= 3
    threads.shutdown()


def test_shutdown_ends_the_wait_for_a_rest_and_nothing_is_tidied_any_more() -> None:
    tidied: list[int] = []
    threads = FreshThreads(1, "t", tidy=lambda: tidied.append(1), rest_seconds=600)
    threads.submit(int).result(timeout=60)

    def waiting() -> bool:
        return any(thread.name == "t-tidy" for thread in threading.enumerate())

    wait_until(waiting, "somebody waits for the time")
    threads.shutdown()
    wait_until(lambda: not waiting(), "nobody waits any more")
    assert not tidied
