# SPDX-License-Identifier: Apache-2.0
"""Real graphs on the real QNN library: through the broker, in-process, and in ONNX Runtime.

For each graph one process holds all ways, and they take turns run by run: the same moment, the
same caches. The overhead of the broker is what `binding.run()` took less the execute time that its
completion reports; beside it stand the yardstick of `overhead`, and the least broker there could
be, from the same run.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import inprocess, models
from ..brokers import broker
from ..least import Least
from ..processes import Child
from ..rows import Mode, Row, Target, against, spread
from ..timing import no_collector
from ..yardstick import Yardstick
from .overhead import YARDSTICK

ORDER = 3
TARGETS = [
    Target(
        "real_over_us_p50",
        "1.2 ms graph through the broker: run() minus execute time, p50",
        "<=",
        10,
        "us",
        over_vs=True,
    ),
    Target("real_over_us_p99", "the same, p99", "<=", 150, "us"),
    Target(
        "real_vs_ort",
        "1.2 ms graph: through the broker / ONNX Runtime in-process, p50",
        "<=",
        1.03,
        use_ratio=True,
    ),
    Target(
        "real_small_vs_ort",
        "0.1 ms graph: through the broker / ONNX Runtime in-process, p50",
        "<=",
        1.3,
        use_ratio=True,
    ),
]
BROKER = "binding.run()"
ORT, ORT_BOUND = "ONNX Runtime run()", "ONNX Runtime with IOBinding"
DIRECT = "QNN in-process, our binding"
LEAST = "an execute in another process behind two eventfds"
WAITING = "the same, computing as long as the graph in between"
#: "times" and "executes": ns by way.
Measured = dict[str, dict[str, list[int]]]
#: Graph, what to call it, runs of each way in smoke, quick and full mode.
GRAPHS = [
    ("gather", "0.1 ms graph", (20, 1000, 4000)),
    ("conv", "1.2 ms graph", (20, 1000, 4000)),
    ("cnn", "5 ms graph", (4, 60, 1000)),
    ("dense", "100+ ms graph", (1, 4, 40)),
]


def run(mode: Mode) -> list[Row]:
    """Times in us."""
    compiled = {name: models.graph(name) for name, _, _ in GRAPHS}
    rows = []
    with broker("qnn") as where:
        for name, label, counts in GRAPHS:
            with Child() as child:
                measured: Measured = child.ask(
                    "cases.real:measure",
                    directory=str(where.directory),
                    wrapper=str(compiled[name].wrapper),
                    binary=str(compiled[name].binary),
                    rounds=mode.pick(*counts),
                )
            rows += _rows(name, label, measured)
    return rows


def measure(directory: str, wrapper: str, binary: str, rounds: int) -> Measured:
    """For a Child: ns of every way, `rounds` times in turns, each round beginning with another; and
    of the executes inside, for the ways that know."""
    from qnnbroker.client import connect
    from qnnbroker.native.qnn_library import default_qnn_dir

    inprocess.create(wrapper)
    direct = inprocess.DirectGraph(default_qnn_dir(), Path(binary))
    executes: dict[str, list[int]] = {BROKER: [], LEAST: []}
    with contextlib.ExitStack() as stack:
        stack.callback(direct.close)
        yardstick = stack.enter_context(Yardstick())
        session = stack.enter_context(connect(directory))
        binding = session.load(wrapper).graph.bind()
        least = stack.enter_context(Least(Path(binary)))
        ways: list[tuple[str, Callable[[], Any]]] = [
            (BROKER, binding.run),
            (ORT, inprocess.run_call()),
            (ORT_BOUND, inprocess.bound_call()),
            (DIRECT, direct.execute),
            (LEAST, least.run),
        ]
        times: dict[str, list[int]] = {name: [] for name, _ in ways}
        times[YARDSTICK], times[WAITING] = [], []
        clock = time.perf_counter_ns
        with no_collector():
            for _ in range(min(20, rounds)):
                for _, call in ways:
                    call()
            for index in range(rounds):
                start = index % len(ways)
                for name, call in ways[start:] + ways[:start]:
                    started = clock()
                    timing = call()
                    times[name].append(clock() - started)
                    if name == BROKER:
                        executes[name].append(timing.execute_ns)
                    elif name == LEAST:
                        executes[name].append(timing)
                if index % 10 == 0:
                    times[YARDSTICK] += yardstick.eventfd(20)[5:]  # both just woke
                    times[WAITING] += yardstick.eventfd(1, executes[BROKER][-1])
    return {"times": times, "executes": executes}


def _over(case: str, measured: Measured, way: str) -> tuple[Row, Row]:
    pairs = zip(measured["times"][way], measured["executes"][way], strict=True)
    return spread(case, [total - inside for total, inside in pairs], "us", scale=1e-3)


def _rows(name: str, label: str, measured: Measured) -> list[Row]:
    times = measured["times"]
    spreads = {
        way: spread(f"{label}: {way}", values, "us", scale=1e-3) for way, values in times.items()
    }
    ours, ort, yardstick = spreads[BROKER], spreads[ORT], spreads[YARDSTICK]
    overhead = _over(f"{label}: run() minus execute time", measured, BROKER)
    compared, extra = against(ours, ort), against(overhead, yardstick)
    if name == "gather":
        compared[0] = compared[0].decides("real_small_vs_ort")
    if name == "conv":
        compared[0] = compared[0].decides("real_vs_ort")
        extra = [extra[0].decides("real_over_us_p50"), extra[1].decides("real_over_us_p99")]
    return [
        *compared,
        *ort,
        *against(spreads[ORT_BOUND], ort),
        *against(spreads[DIRECT], ort),
        *extra,
        *against(_over(f"{label}: {LEAST}, minus execute time", measured, LEAST), overhead),
        *yardstick,
        *against(spreads[WAITING], yardstick),
    ]
