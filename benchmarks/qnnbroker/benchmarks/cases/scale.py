# SPDX-License-Identifier: Apache-2.0
"""Many clients at once: throughput, latency and fairness; a greedy one; a band above another.

The fake graph takes 200 us asleep, as an NPU takes no core. The ideal is the same graph executed
back to back by one process without a broker, measured right before and after.
"""

import contextlib
import time
from statistics import mean, median
from typing import Any

from .. import models
from ..brokers import broker, fake_model
from ..processes import Child, ask_all, children
from ..rows import Mode, Row, Target, against, percentile, spread

ORDER = 6
EXECUTE_US = 200
TARGETS = [
    Target(
        "scale_64_throughput",
        "64 clients, 200 us graph: runs a second / those of one process without a broker",
        ">=",
        0.9,
        use_ratio=True,
    ),
    Target("scale_64_jain", "Jain's index of the 64 clients", ">=", 0.95),
    Target(
        "modest_p99_executes",
        "one at a time beside a session with 64 in flight: p99 / execute",
        "<=",
        3,
        "executes",
    ),
    Target(
        "high_band_ms",
        "high-band 5 ms graph during a low-band graph of seconds, real library, p99",
        "<=",
        60,
        "ms",
    ),
]
#: Between the order to start and the start, so that all of them are ready.
_LEAD_SECONDS = 0.3


def run(mode: Mode) -> list[Row]:
    """Latencies in us or ms, throughput in runs a second."""
    return [*_many(mode), *_greedy(mode), *_bands(mode)]


def jain(values: list[float]) -> float:
    """1 when all are equal, 1 / n when one has it all."""
    squares = sum(v * v for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0.0


def _stream(asked: list[Child], seconds: float, **arguments: Any) -> list[dict[str, list[int]]]:
    """All of them run for so long, beginning at the same moment."""
    start = time.monotonic_ns() + int(_LEAD_SECONDS * 1e9)
    return ask_all(asked, "clients:stream", start_ns=start, seconds=seconds, **arguments)


def _many(mode: Mode) -> list[Row]:
    counts = mode.pick((1, 4), (1, 64), (1, 4, 16, 64))
    seconds = mode.pick(0.2, 1.0, 8.0)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(fake_model("scale", execute_us=EXECUTE_US))
        where = stack.enter_context(broker("fake"))
        members: list[Child] = []
        for count in counts:
            joined = stack.enter_context(children(count - len(members)))
            ask_all(joined, "clients:attach", directory=str(where.directory), path=str(model))
            members += joined
            _stream(members, seconds / 10)
            before = _direct(str(model), seconds / 4)
            results = _stream(members, seconds)
            after = _direct(str(model), seconds / 4)
            rows += _scale_rows(count, seconds, results, mean([before, after]), counts[-1])
    return rows


def _direct(model: str, seconds: float) -> float:
    """Executes a second without a broker, in a process of its own."""
    with Child(QNNBROKER_FAKE="record=off") as child:
        rate: float = child.ask("inprocess:direct_rate", binary=model, seconds=seconds)[
            "per_second"
        ]
    return rate


def _scale_rows(
    count: int, seconds: float, results: list[dict[str, list[int]]], ideal: float, most: int
) -> list[Row]:
    label = f"{count} client{'s' if count > 1 else ''}"
    place: dict[str, Any] = {"x": count}
    shares = [float(len(r["total_ns"])) for r in results]
    total = [ns for r in results for ns in r["total_ns"]]
    rate = Row(label, "throughput", sum(shares) / seconds, "1/s", series="broker", **place)
    other = Row(
        f"one process without a broker, beside {label}",
        "throughput",
        ideal,
        "1/s",
        series="without a broker",
        **place,
    )
    rate = rate.against(other)
    fairness = Row(label, "Jain's index", jain(shares), "", vs="1 for equal shares", vs_value=1.0)
    if count == most:
        rate, fairness = rate.decides("scale_64_throughput"), fairness.decides("scale_64_jain")
    execute = median(ns for r in results for ns in r["execute_ns"]) / 1e3
    queued = Row(f"{label}, an execute for each", "p50", execute * count, "us")
    return [
        other,
        rate,
        *(r.against(queued) for r in spread(label, total, "us", scale=1e-3)),
        fairness,
    ]


def _greedy(mode: Mode) -> list[Row]:
    """One at a time, alone and then beside a session that keeps 64 in flight."""
    seconds = mode.pick(0.3, 2.0, 10.0)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(fake_model("fair", execute_us=EXECUTE_US))
        where = stack.enter_context(broker("fake"))
        modest, greedy = stack.enter_context(children(2))
        for child in (modest, greedy):
            child.ask("clients:attach", directory=str(where.directory), path=str(model))
        modest.ask("clients:run", count=20)
        (alone,) = _stream([modest], seconds / 3)
        start = time.monotonic_ns() + int(_LEAD_SECONDS * 1e9)
        window = {"start_ns": start, "seconds": seconds}
        greedy.send("clients:stream", in_flight=64, **window)
        modest.send("clients:stream", **window)
        beside, much = modest.receive(), greedy.receive()
    execute = median(alone["execute_ns"])
    quiet = spread("modest session alone", alone["total_ns"], "us", scale=1e-3)
    rows = [*quiet]
    rows += against(
        spread("modest session beside a greedy one", beside["total_ns"], "us", scale=1e-3), quiet
    )
    late = percentile(beside["total_ns"], 99)
    rows += [
        Row(
            "modest session beside a greedy one, in executes",
            "p99",
            late / execute,
            "executes",
            vs="an execute",
            vs_value=1.0,
            ratio=late / execute,
            target="modest_p99_executes",
        ),
        Row("modest session beside a greedy one", "runs", len(beside["total_ns"]), "").against(
            Row("greedy session, 64 in flight", "runs", len(much["total_ns"]), "")
        ),
    ]
    return rows


def _bands(mode: Mode) -> list[Row]:
    """A 5 ms graph, alone and while a graph of seconds runs in a lower band, and in the same."""
    seconds = mode.pick(0.5, 2.5, 15.0)
    short, long = models.graph("cnn"), models.graph("dense" if mode is Mode.SMOKE else "long")
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(broker("qnn"))
        high, low = stack.enter_context(children(2))
        for child, band, model in ((high, "high", short), (low, "low", long)):
            child.ask("clients:connect", directory=str(where.directory), band=band)
            child.ask("clients:load", path=str(model.wrapper))
            child.ask("clients:bind")
            child.ask("clients:run", count=2)
        (alone,) = _stream([high], seconds / 3)
        start = time.monotonic_ns() + int(_LEAD_SECONDS * 1e9)
        low.send("clients:stream", start_ns=start, seconds=seconds)
        # Beginning when the low one has begun, and done before it is.
        high.send(
            "clients:stream", start_ns=start + int(0.1 * seconds * 1e9), seconds=0.8 * seconds
        )
        beside = high.receive()
        low.receive()
        took = low.ask("clients:run", count=1)["total_ns"][0]
    quiet = spread("high band alone", alone["total_ns"], "ms", scale=1e-6)
    rows = against(
        spread("high band, long graph in the low band", beside["total_ns"], "ms", scale=1e-6),
        quiet,
    )
    long_run = Row("that long graph alone", "once", took / 1e6, "ms")
    return [*quiet, rows[0], rows[1].decides("high_band_ms"), long_run]
