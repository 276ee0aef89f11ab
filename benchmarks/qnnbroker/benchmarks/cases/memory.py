# SPDX-License-Identifier: Apache-2.0
"""Memory of a broker with its clients, against as many processes with a session each.

Proportional set sizes of everything that is alive, added up: of each client, of the broker and
whatever it started. Memory grows during the first runs on either side, so every process has run
before it is looked at. Processes join one after another; nobody leaves before the last reading.
"""

import contextlib
from dataclasses import dataclass
from statistics import median

from .. import models
from ..brokers import broker
from ..processes import Child, ask_all, children
from ..rows import Mode, Row, Target
from ..usage import MIB, memory, total_pss, with_descendants

ORDER = 5
TARGETS = [
    Target(
        "client_private_mb", "one more client over bare Python and numpy, private", "<=", 12, "MiB"
    ),
    Target(
        "pss_8_large", "broker + 8 clients / 8 sessions, 122 MB context", "<=", 0.26, use_ratio=True
    ),
    Target(
        "pss_8_small", "broker + 8 clients / 8 sessions, 0.8 MB context", "<=", 0.40, use_ratio=True
    ),
    Target("pss_1_small_mb", "what the broker costs with one client", "<=", 25, "MiB"),
]
BARE = "bare Python and numpy"


def run(mode: Mode) -> list[Row]:
    """Memory in MiB.

    The large model takes 1.7 s a run on the emulation, so that the quick mode cannot do 20 of them.
    """
    counts = mode.pick((1, 2), (1, 8), (1, 2, 4, 8))
    small, large = models.small(mode), models.large(mode)
    few = _Readings.take(str(small.wrapper), counts, mode.pick(2, 20, 20))
    large_runs = mode.pick(1, 1, 20)
    many = _Readings.take(str(large.wrapper), counts, large_runs)
    rows = _rows(small.label, mode.pick(2, 20, 20), few)
    rows += _rows(large.label, large_runs, many)
    return _decide(rows, counts, small.label, large.label) + _differences(small.label, few)


@dataclass
class _Readings:
    """What was found, by number of processes. MiB.

    Attributes:
        alone: total of so many processes with a session each.
        shared: total of a broker and so many clients.
        private: of the median process alone, and of the median client, with the most of them.
        broker: the broker's own part of the total, with the most clients.
        bare: private memory of a process with numpy and nothing else.
    """

    alone: dict[int, float]
    shared: dict[int, float]
    private_alone: float = 0.0
    private_client: float = 0.0
    broker: float = 0.0
    bare: float = 0.0

    @classmethod
    def take(cls, wrapper: str, counts: tuple[int, ...], runs: int) -> "_Readings":
        found = cls({}, {})
        with contextlib.ExitStack() as stack:
            members: list[Child] = []
            for count in counts:
                joined = _join(stack, members, count)
                ask_all(joined, "inprocess:create", wrapper=wrapper)
                ask_all(joined, "inprocess:run", count=runs)
                found.alone[count] = total_pss(child.pid for child in members) / MIB
            found.private_alone = _private(members)
        with contextlib.ExitStack() as stack:
            where = stack.enter_context(broker("qnn"))
            members = []
            for count in counts:
                joined = _join(stack, members, count)
                ask_all(joined, "clients:attach", directory=str(where.directory), path=wrapper)
                ask_all(joined, "clients:run", count=max(0, runs - 1))
                pids = with_descendants(where.pid)
                found.broker = total_pss(pids) / MIB
                found.shared[count] = found.broker + total_pss(m.pid for m in members) / MIB
            found.private_client = _private(members)
            # After the totals, whose shared pages they would share too.
            bare = stack.enter_context(children(2))
            ask_all(bare, "clients:nothing_but_numpy")
            found.bare = _private(bare)
        return found


def _join(stack: contextlib.ExitStack, members: list[Child], count: int) -> list[Child]:
    """Starts processes until there are `count`; the new ones."""
    joined = stack.enter_context(children(count - len(members)))
    ask_all(joined, "clients:nothing_but_numpy")
    members += joined
    return joined


def _private(asked: list[Child]) -> float:
    return median(memory(child.pid).private_bytes for child in asked) / MIB


def _rows(label: str, runs: int, found: _Readings) -> list[Row]:
    after = f"after {runs} run{'' if runs == 1 else 's'} each"
    rows = []
    alone_series, shared_series = f"{label}, in-process", f"{label}, broker and clients"
    for count, value in found.shared.items():
        many = "s" if count > 1 else ""
        other = Row(
            f"{label}, {count} in-process session{many}, {after}",
            "PSS",
            found.alone[count],
            "MiB",
            series=alone_series,
            x=count,
        )
        ours = Row(
            f"{label}, broker and {count} client{many}, {after}",
            "PSS",
            value,
            "MiB",
            series=shared_series,
            x=count,
        )
        rows += [other, ours.against(other)]
    for what, series in (("in-process session", found.alone), ("client", found.shared)):
        first, last = min(series), max(series)
        cost = (series[last] - series[first]) / (last - first)
        row = Row(f"{label}, one more {what}", "PSS", cost, "MiB")
        rows.append(row.against(rows[-1]) if what == "client" else row)
    last = max(found.shared)
    rows += [
        Row(f"{label}, broker of {last} clients", "PSS", found.broker, "MiB"),
        Row(f"{label}, one of {last} in-process", "private", found.private_alone, "MiB"),
    ]
    rows.append(
        Row(f"{label}, one of {last} clients", "private", found.private_client, "MiB").against(
            rows[-1]
        )
    )
    return rows


def _decide(rows: list[Row], counts: tuple[int, ...], small: str, large: str) -> list[Row]:
    """Marks the rows with the most clients as those that the targets are about."""
    wanted = {f"{small}, broker and": "pss_8_small", f"{large}, broker and": "pss_8_large"}
    decided = []
    for row in rows:
        for start, target in wanted.items():
            if row.case.startswith(start) and row.x == max(counts):
                row = row.decides(target)
        decided.append(row)
    return decided


def _differences(label: str, found: _Readings) -> list[Row]:
    """The two targets that are a difference."""
    more = found.private_client - found.bare
    cost = found.shared[1] - found.alone[1]
    return [
        Row(BARE, "private", found.bare, "MiB"),
        Row(
            f"{label}, one more client, over {BARE}",
            "private",
            more,
            "MiB",
            vs=BARE,
            vs_value=found.bare,
            ratio=found.private_client / found.bare,
            target="client_private_mb",
        ),
        Row(
            f"{label}, broker and 1 client, over 1 in-process session",
            "PSS",
            cost,
            "MiB",
            vs=f"{label}, 1 in-process session",
            vs_value=found.alone[1],
            ratio=found.shared[1] / found.alone[1],
            target="pss_1_small_mb",
        ),
    ]
