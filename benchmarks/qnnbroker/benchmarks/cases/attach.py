# SPDX-License-Identifier: Apache-2.0
"""From a process that has its imports to its first result: with and without a broker.

Every number is from processes that were just started. What is imported is measured apart. The
first client of a broker pays for loading the model; all others find it resident.
"""

from dataclasses import replace
from statistics import median

from .. import models
from ..brokers import broker
from ..processes import Child, children
from ..rows import Mode, Row, Target

ORDER = 4
TARGETS = [
    Target(
        "attach_second_ms",
        "second client: connect to first result of a resident model, minus the execute, p50",
        "<=",
        20,
        "ms",
    ),
    Target(
        "attach_large_vs_ort",
        "122 MB context: session creation in-process / connect and load, resident, p50",
        ">=",
        10,
        use_ratio=True,
    ),
]
ORT = "ONNX Runtime"
CREATION, CONNECT = "session creation", "connect and load"
TO_RESULT = "to the first result, minus the execute"
#: Clients of one broker in turn: the first loads, the others share.
PLACES = {1: "first client", 2: "second client", 8: "eighth client"}


def run(mode: Mode) -> list[Row]:
    """Times in ms."""
    clients = mode.pick(2, 8, 8)
    small, large = models.small(mode), models.large(mode)
    rows = _rows(small.label, _measure(small, mode.pick(1, 2, 10), clients))
    second = f"{small.label}, second client: {TO_RESULT}"
    rows = [
        row.decides("attach_second_ms") if (row.case, row.metric) == (second, "p50") else row
        for row in rows
    ]
    times = _measure(large, mode.pick(1, 1, 5), clients)
    return rows + _rows(large.label, times) + [_speedup(large.label, times)]


def _measure(model: models.RealModel, rounds: int, clients: int) -> dict[str, list[float]]:
    """Each round: a process on its own, then a fresh broker and its clients."""
    wrapper = str(model.wrapper)
    if rounds > 1:  # what is on the disk is read, and what a broker checks once is checked
        _through_broker(wrapper, 1, {})
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        with Child() as child:
            child.ask("clients:nothing_but_numpy")
            _add(times, f"{ORT}: import", child.ask("inprocess:imports"))
            created = child.ask("inprocess:create", wrapper=wrapper)
            first, second = (ns / 1e6 for ns in child.ask("inprocess:run", count=2))
            _add(times, f"{ORT}: {CREATION}", created)
            _add(times, f"{ORT}: {TO_RESULT}", created + first - second)
            _add(times, f"{ORT}: run", second)
        _through_broker(wrapper, clients, times)
    return times


def _through_broker(wrapper: str, clients: int, times: dict[str, list[float]]) -> None:
    with broker("qnn") as where, children(clients) as started:
        for number, child in enumerate(started, 1):
            child.ask("clients:nothing_but_numpy")
            imported = child.ask("clients:imports")
            if (place := PLACES.get(number)) is None:  # only has to be there
                child.ask("clients:connect", directory=str(where.directory))
                child.ask("clients:load", path=wrapper)
                child.ask("clients:bind")
                continue
            parts = child.ask("clients:attach", directory=str(where.directory), path=wrapper)
            _add(times, f"{place}: import", imported)
            _add(times, f"{place}: {CONNECT}", parts["connect"] + parts["load"])
            spent = parts["connect"] + parts["load"] + parts["bind"] + parts["run"]
            _add(times, f"{place}: {TO_RESULT}", spent - parts["execute"])
            _add(times, f"{place}: execute", parts["execute"])


def _add(times: dict[str, list[float]], key: str, value: float) -> None:
    times.setdefault(key, []).append(value)


def _rows(label: str, times: dict[str, list[float]]) -> list[Row]:
    """Every time, each client's compared with the same thing done in-process."""
    counterparts = {"import": "import", CONNECT: CREATION, TO_RESULT: TO_RESULT}
    rows = []
    for what, values in times.items():
        who, _, part = what.partition(": ")
        for metric, choose in (("p50", median), ("max", max)):
            row = Row(f"{label}, {what}", metric, choose(values), "ms")
            if who != ORT and part in counterparts:
                other = f"{ORT}: {counterparts[part]}"
                row = row.against(Row(f"{label}, {other}", metric, choose(times[other]), "ms"))
            rows.append(row)
    return rows


def _speedup(label: str, times: dict[str, list[float]]) -> Row:
    """How many times sooner the second client has its model."""
    created = Row(f"{label}, {ORT}: {CREATION}", "p50", median(times[f"{ORT}: {CREATION}"]), "ms")
    resident = Row(
        f"{label}, second client: {CONNECT}",
        "p50",
        median(times[f"second client: {CONNECT}"]),
        "ms",
    )
    row = replace(created.against(resident), case=f"{created.case}, against the second client")
    return row.decides("attach_large_vs_ort")
