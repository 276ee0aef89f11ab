# SPDX-License-Identifier: Apache-2.0
"""Taking times: A and B in turns in one run, warm-up first, the collector out of the way."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

#: Runs something so many times and returns the ns that each took.
Measure = Callable[[int], list[int]]


@dataclass(frozen=True)
class Way:
    """One of the things to compare.

    Attributes:
        measure: runs it.
        batch: runs in one turn: slow ones get few, so that all ways are seen throughout the run.
        warm_up: runs before the first turn, not counted.
    """

    measure: Measure
    batch: int
    warm_up: int = 20


def interleave(ways: Mapping[str, Way], rounds: int) -> dict[str, list[int]]:
    """Each way in turn, `rounds` times, starting with another one each time.

    What disturbs the machine for a while then disturbs all of them, and none always comes after the
    same other one. Returns ns, `batch * rounds` of each.
    """
    order = list(ways)
    times: dict[str, list[int]] = {name: [] for name in order}
    with no_collector():
        for way in ways.values():
            way.measure(way.warm_up)
        for index in range(rounds):
            start = index % len(order)
            for name in order[start:] + order[:start]:
                times[name] += ways[name].measure(ways[name].batch)
    return times


def timed(call: Callable[[], object]) -> Measure:
    """A Measure of a call."""

    def measure(count: int) -> list[int]:
        clock = time.perf_counter_ns
        times = []
        for _ in range(count):
            started = clock()
            call()
            times.append(clock() - started)
        return times

    return measure


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Python's cyclic collector runs before the block, not inside."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
