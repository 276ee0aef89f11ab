# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmarks: numbers, turns, the yardstick, the processes, the pictures."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from qnnbroker.benchmarks import usage
from qnnbroker.benchmarks.brokers import broker, fake_model
from qnnbroker.benchmarks.cases.scale import jain
from qnnbroker.benchmarks.machine import Machine
from qnnbroker.benchmarks.processes import Child, ask_all, children
from qnnbroker.benchmarks.rows import Row, Target, percentile, spread
from qnnbroker.benchmarks.timing import Way, interleave
from qnnbroker.benchmarks.yardstick import Yardstick


@pytest.mark.parametrize(
    ("percent", "value"), [(0, 1), (1, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)]
)
def test_a_percentile_is_a_value_by_nearest_rank(percent: int, value: int) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == value


def test_a_spread_is_in_the_unit_that_was_asked_for() -> None:
    p50, p99 = spread("x", [1000, 2000, 3000], "us", scale=1e-3)
    assert (p50.metric, p50.value, p99.metric, p99.value) == ("p50", 2.0, "p99", 3.0)


def test_ways_take_turns_and_each_begins_a_round() -> None:
    seen: list[tuple[str, int]] = []

    def way(name: str, batch: int) -> Way:
        def measure(count: int) -> list[int]:
            seen.append((name, count))
            return [7] * count

        return Way(measure, batch, 5)

    times = interleave({"a": way("a", 2), "b": way("b", 3)}, 2)
    assert seen == [("a", 5), ("b", 5), ("a", 2), ("b", 3), ("b", 3), ("a", 2)]
    assert times == {"a": [7] * 4, "b": [7] * 6}


def test_a_target_over_a_yardstick_moves_with_it() -> None:
    target = Target("t", "what", "<=", 10, "us", over_vs=True)
    row = Row("ours", "p50", 50.0, "us")
    assert target.judge(row.against(Row("yardstick", "p50", 44.0, "us"))).met
    verdict = target.judge(row.against(Row("yardstick", "p50", 5.0, "us")))
    assert (verdict.met, verdict.limit) == (False, 15.0)
    with pytest.raises(ValueError, match="compared with nothing"):
        target.judge(row)


def test_a_target_for_a_ratio_looks_at_the_ratio() -> None:
    target = Target("t", "what", ">=", 40, use_ratio=True)
    verdict = target.judge(Row("slow", "p50", 500.0, "us").against(Row("fast", "p50", 5.0, "us")))
    assert (verdict.value, verdict.met) == (100.0, True)


def test_jains_index_is_one_for_equals_and_a_share_for_one_that_has_it_all() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_the_yardstick_measures_every_round_trip() -> None:
    with Yardstick() as yardstick:
        assert len(yardstick.eventfd(50)) == 50
        times = yardstick.eventfd(3, 2_000_000) + yardstick.socket(1 << 20, 3)
    assert len(times) == 6
    # What the other side computed does not count; signed it would show as a huge number.
    assert all(0 < ns < 10_000_000_000 for ns in times)


def test_the_cpu_time_of_a_process_counts_threads_and_children_that_have_ended() -> None:
    def spin() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    before = usage.cpu_time(os.getpid())
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    work = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    after = usage.cpu_time(os.getpid())
    assert after.own_ns - before.own_ns >= 50_000_000
    assert after.children_ns - before.children_ns >= 150_000_000


def test_a_child_answers_in_order_and_says_what_went_wrong_there() -> None:
    with children(2) as pair:
        ask_all(pair, "clients:nothing_but_numpy")
        with pytest.raises(RuntimeError, match="NoSuchThing|AttributeError"):
            pair[0].ask("clients:NoSuchThing")
        assert pair[0].ask("clients:imports") > 0
    with Child() as child:
        os.kill(child.pid, 9)
        with pytest.raises(RuntimeError, match="ended"):
            child.ask("clients:imports")


def test_an_idle_client_is_seen_with_its_memory_and_cpu_time() -> None:
    with Child() as child:
        before = usage.cpu_ns([child.pid])
        child.ask("clients:nothing_but_numpy")
        assert usage.cpu_ns([child.pid]) > before
        found = usage.memory(child.pid)
    assert 0 < found.private_bytes <= found.pss_bytes < 1 << 30


def test_the_family_of_a_process_is_found_whichever_of_its_threads_started_it() -> None:
    with ThreadPoolExecutor(1) as thread:
        # Its stdin ends it, and a name with brackets and spaces must not confuse anybody.
        child = thread.submit(named_like_a_trap).result()
        with child:
            assert child.pid in usage.with_descendants(os.getpid())
            assert usage.with_descendants(child.pid) == [child.pid]
    assert child.pid not in usage.with_descendants(os.getpid())


def named_like_a_trap() -> subprocess.Popen[bytes]:
    """A child whose name in /proc is ") Z 1 (", once it has that name."""
    naming = "import sys; open('/proc/self/comm', 'w').write(') Z 1 ('); print(flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{naming}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_threads_that_come_and_go_disturb_no_measurement() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        for _ in range(200):
            assert usage.with_descendants(os.getpid())[0] == os.getpid()
            assert usage.cpu_ns([os.getpid()]) > 0
    finally:
        stop.set()
        churning.join()


def test_a_process_that_has_ended_takes_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert usage.total_pss([process.pid]) == 0  # ended, not collected
        with pytest.raises(ProcessLookupError, match=str(process.pid)):
            usage.memory(process.pid)
    assert usage.total_pss([process.pid]) == usage.cpu_ns([process.pid]) == 0


@pytest.mark.processes
def test_submissions_in_flight_and_one_at_a_time_count_only_what_ended_in_time() -> None:
    with fake_model("m") as model, broker("fake") as where, Child() as child:
        child.ask("clients:attach", directory=str(where.directory), path=str(model))
        for in_flight in (1, 8):
            result = child.ask("clients:stream", start_ns=0, seconds=0, in_flight=in_flight)
            assert result["total_ns"] == []
        assert len(child.ask("clients:run", count=5)["execute_ns"]) == 5


def test_the_direct_way_executes_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNNBROKER_FAKE", "record=off")
    with fake_model("m", execute_us=200) as model, Child() as child:
        rate = child.ask("inprocess:direct_rate", binary=str(model), seconds=0.05)
    assert rate["median_ns"] >= 200_000
    assert rate["per_second"] <= 5000


def test_a_picture_has_bars_and_lines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from qnnbroker.benchmarks.plots import draw

    rows = [
        Row("a", "p50", 1.0, "us", target="t"),
        Row("b", "p50", 1000.0, "us"),
        Row("idle", "CPU", 0.0, "%"),
        *(Row(f"s {n}", "p50", 10.0 * n, "us", series="s", x=n) for n in (4, 64, 4096)),
    ]
    path = draw("name", rows, "machine", tmp_path / "new")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("load", "cores", "busy"), [(0.6, 2, False), (0.61, 2, True), (1, 8, False)]
)
def test_a_machine_is_busy_by_its_load_per_core(load: float, cores: int, busy: bool) -> None:
    assert replace(Machine.look(), load_average=load, cores=cores).busy is busy
