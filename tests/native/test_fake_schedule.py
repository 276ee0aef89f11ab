# SPDX-License-Identifier: Apache-2.0
"""Who gets the fake device, when, and what waits for whom."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native.fake_client import Adder, RawFake, adder, floats
from tests.waiting import wait_until

from qnnbroker.native.fake import FakeGraph, binary_bytes, waiting_count


class Threads:
    """Starts calls in threads and collects what they return."""

    def __init__(self) -> None:
        self.results: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, call: Callable[[], int]) -> None:
        def run() -> None:
            self.results[name] = call()

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def join(self) -> dict[str, int]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.results


class Loaded:
    """One context with several adders; the one called "hold" hangs until `let_go`."""

    def __init__(self, tmp_path: Path, names: list[str], switches: str = "") -> None:
        rule = "hang=graphExecute@hold:*"
        self.raw = RawFake(tmp_path / "fake", ",".join(filter(None, [rule, switches]))).open()
        graphs = [adder(name) for name in ["hold", *names]]
        self.context = self.raw.context(binary_bytes(graphs))
        self.threads = Threads()
        self.execute = {
            g.name: Adder(self.raw, self.raw.graph(self.context, g.name)) for g in graphs
        }

    def hold(self) -> None:
        """Makes the device busy."""
        self.threads.start("hold", self.execute["hold"])
        self.raw.wait_faults(1)

    def queue(self, name: str) -> None:
        """Starts an execute and returns when it waits for the device."""
        count = waiting_count(self.raw.directory)
        self.threads.start(name, self.execute[name])
        self.raw.wait_queued(count + 1)

    def let_go(self) -> None:
        self.raw.control("unhang")
        assert set(self.threads.join().values()) == {0}

    def order(self) -> list[str]:
        calls = sorted(self.raw.calls("graphExecute"), key=lambda call: call.number("order"))
        return [call.arguments["name"] for call in calls]


def test_equal_priorities_are_served_in_order(tmp_path: Path) -> None:
    names = ["c", "a", "d", "b"]
    loaded = Loaded(tmp_path, names)
    loaded.hold()
    for name in names:
        loaded.queue(name)
    loaded.let_go()
    assert loaded.order() == ["hold", *names]


def test_priority_is_strict_and_fair_inside(tmp_path: Path) -> None:
    priorities = {"low": 0, "mid": 100, "high": 500, "mid2": 100, "high2": 500}
    loaded = Loaded(tmp_path, list(priorities))
    for name, priority in priorities.items():
        assert loaded.raw.set_priority(loaded.execute[name].graph, priority) == 0
    loaded.hold()
    for name in priorities:
        loaded.queue(name)
    loaded.let_go()
    assert loaded.order() == ["hold", "high", "high2", "mid", "mid2", "low"]


def test_a_waiting_execute_can_be_given_another_priority(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, ["a", "b"])
    loaded.hold()
    loaded.queue("a")
    loaded.queue("b")
    assert loaded.raw.set_priority(loaded.execute["b"].graph, 101) == 0
    loaded.let_go()
    assert loaded.order() == ["hold", "b", "a"]


def test_setting_the_priority_of_an_executing_graph_waits_for_its_end(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, ["a"])
    loaded.hold()
    loaded.threads.start("set", lambda: loaded.raw.set_priority(loaded.execute["hold"].graph, 200))
    assert loaded.raw.set_priority(loaded.execute["a"].graph, 1) == 0
    assert "set" not in loaded.threads.results
    loaded.let_go()
    names = [call.name for call in loaded.raw.calls() if call.name.startswith("graph")]
    # Both end at once; which writes its line first is open.
    assert sorted(names[-2:]) == ["graphExecute", "graphSetConfig"]


@pytest.mark.parametrize(("priority", "code"), [(0, 0), (500, 0), (501, 6000), (0x7FFFFFFF, 6000)])
def test_priorities_have_a_range(tmp_path: Path, priority: int, code: int) -> None:
    loaded = Loaded(tmp_path, ["a"])
    assert loaded.raw.set_priority(loaded.execute["a"].graph, priority) == code


def test_concurrency_lets_several_run(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, ["a", "b"], "concurrency=2")
    loaded.hold()
    assert loaded.execute["a"]() == 0
    loaded.raw.control(concurrency=1)
    loaded.queue("b")
    loaded.raw.control(concurrency=2)
    wait_until(lambda: "b" in loaded.threads.results, "b has run")
    loaded.let_go()


def test_contexts_share_the_device(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, [])
    other = loaded.raw.context(binary_bytes([adder("other")]))
    loaded.execute["other"] = Adder(loaded.raw, loaded.raw.graph(other, "other"))
    loaded.hold()
    loaded.queue("other")
    loaded.let_go()
    assert loaded.order() == ["hold", "other"]


def test_freeing_a_context_waits_for_its_execute_and_turns_the_queued_away(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, ["queued", "late"])
    loaded.hold()
    loaded.queue("queued")
    loaded.threads.start("free", lambda: loaded.raw.free_context(loaded.context))
    wait_until(lambda: "queued" in loaded.threads.results, "the queued one has run")
    assert loaded.threads.results["queued"] == 6039
    assert loaded.execute["late"]() == 6001
    assert "free" not in loaded.threads.results
    loaded.raw.control("unhang")
    assert loaded.threads.join() == {"hold": 0, "queued": 6039, "free": 0}
    assert loaded.raw.free_context(loaded.context) == 5002


def test_many_threads_executing_and_reloading_get_right_sums(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake", "concurrency=2").open()
    data = binary_bytes([adder(weight_bytes=10_000)])

    def work() -> int:
        for _ in range(20):
            context = raw.context(data)
            execute = Adder(raw, raw.graph(context, "add"))
            for round_ in range(10):
                execute.a[:] = round_
                if execute() != 0 or not (execute.c == round_ + 10).all():
                    return 1
            if raw.free_context(context) != 0:
                return 2
        return 0

    threads = Threads()
    for name in "abcd":
        threads.start(name, work)
    assert threads.join() == dict.fromkeys("abcd", 0)
    assert raw.errors() == []


def test_the_longest_waits_are_in_the_record(tmp_path: Path) -> None:
    raw = RawFake(tmp_path / "fake").open()
    slow = FakeGraph(
        "slow", (floats("a", 1), floats("b", 1)), (floats("c", 1),), (("sleep", 20_000),)
    )
    execute = Adder(raw, raw.graph(raw.context(binary_bytes([slow])), "slow"))
    assert execute() == 0
    (call,) = raw.calls("graphExecute")
    assert call.number("us") >= 20_000
    assert call.number("queue_us") < call.number("us")
