# SPDX-License-Identifier: Apache-2.0
"""The rings' C code under stress and under sanitizers: ring_stress.c, compiled here.

Together 0.7 million messages, and 10 million in the full mode (`make stress`).
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native.c_program import compiled, said
from tests.stress import FULL, scaled

SOURCES = ["qb_client.c", "qb_client_wait.c", "qb_doorbell.c", "qb_counters.c"]

pytestmark = [pytest.mark.slow] if FULL else []

Build = Callable[[str], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles the program with a sanitizer, or "" for none; once."""
    folder = tmp_path_factory.mktemp("ring_stress")
    return lambda sanitizer: compiled(folder, "ring_stress", SOURCES, sanitizer)


def run(program: Path, mode: str, messages: int, *numbers: int) -> None:
    """Again with another seed while the client has not slept in both ways: with many in flight it
    seldom sleeps, as the scheduler has it."""
    count = messages * scaled(1, 14)
    asleep = {"bell": 0, "tail": 0}
    for seed in range(1, 21):
        told = said(program, mode, count, *numbers, seed)
        assert f"ok {count} messages" in told
        for where in asleep:
            (times,) = re.findall(rf"on (?:its|the) {where} (\d+) times", told)
            asleep[where] += int(times)
        if all(asleep.values()):
            return
    pytest.fail(f"the client did not sleep in both ways: {asleep}")


#: mode, messages, client threads, in flight at most, the client's spin in ns, the broker's spins
@pytest.mark.parametrize(
    ("mode", "messages", "threads", "limit", "spin_ns", "spins"),
    [
        # One side goes to sleep at the very moment when the other one has something for it: a
        # missing fence is found here within a second.
        ("threads", 60_000, 1, 1, 20_000, 0),
        ("threads", 40_000, 1, 1, 0, 2000),
        # Both sleep every time.
        ("threads", 30_000, 1, 1, 0, 0),
        ("processes", 40_000, 1, 1, 0, 0),
        # One thread takes in what another one waits for, which has just stopped spinning.
        ("threads", 20_000, 2, 1, 20_000, 1000),
    ],
)
def test_no_wake_up_is_lost(
    build: Build, mode: str, messages: int, threads: int, limit: int, spin_ns: int, spins: int
) -> None:
    run(build(""), mode, messages, threads, limit, spin_ns, spins)


@pytest.mark.parametrize(
    ("messages", "threads", "limit", "spin_ns"),
    [(120_000, 1, 64, 10_000), (12_000, 1, 1, 0), (12_000, 4, 4, 10_000)],
)
def test_two_ends_in_threads_race_nowhere(
    build: Build, messages: int, threads: int, limit: int, spin_ns: int
) -> None:
    run(build("thread"), "threads", messages, threads, limit, spin_ns, 200)


@pytest.mark.parametrize(
    ("messages", "threads", "limit", "spin_ns"),
    [(400_000, 1, 64, 10_000), (12_000, 4, 2, 20_000)],
)
def test_two_processes_keep_to_their_memory_and_lose_nothing(
    build: Build, messages: int, threads: int, limit: int, spin_ns: int
) -> None:
    run(build("address"), "processes", messages, threads, limit, spin_ns, 200)
