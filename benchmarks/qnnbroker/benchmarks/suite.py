# SPDX-License-Identifier: Apache-2.0
"""The benchmarks there are, and running them.

Every module of `qnnbroker.benchmarks.cases` is one, and needs no other registration. It has

    def run(mode: Mode) -> list[Row]   measures; raises MissingPart when something is not there
    TARGETS: list[Target]              what its rows are held to; each decided by one row of `run`
    ORDER: int                         optional: place in the list; 100 without

and the first line of its docstring says what it measures.
"""

import compileall
import importlib
import inspect
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from . import cases
from .machine import Machine
from .rows import Mode, Row, Target, Verdict

#: Told the name of a benchmark before it starts.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: a module of `cases`."""

    name: str
    what: str
    order: int
    targets: tuple[Target, ...]
    run: Callable[[Mode], list[Row]]

    @classmethod
    def of(cls, name: str, module: ModuleType) -> "Benchmark":
        what = (inspect.getdoc(module) or "").splitlines()[0]
        order = getattr(module, "ORDER", 100)
        return cls(name, what, order, tuple(module.TARGETS), module.run)


@dataclass
class Report:
    """What was measured, where, and what it means for the targets."""

    machine: Machine
    mode: Mode
    benchmarks: dict[str, list[Row]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    def as_json(self, *, with_targets: bool = False) -> dict[str, Any]:
        document: dict[str, Any] = {
            "machine": self.machine.as_json(),
            "mode": self.mode.value,
            "benchmarks": [
                {
                    "name": name,
                    "seconds": round(self.seconds[name], 1),
                    "rows": [row.as_json() for row in rows],
                }
                for name, rows in self.benchmarks.items()
            ],
        }
        if with_targets:
            document["targets"] = [verdict.as_json() for verdict in self.verdicts]
        return document


def catalogue() -> dict[str, Benchmark]:
    """Every benchmark by name, in order."""
    found = []
    for info in pkgutil.iter_modules(cases.__path__):
        module = importlib.import_module(f"{cases.__name__}.{info.name}")
        found.append(Benchmark.of(info.name, module))
    return {b.name: b for b in sorted(found, key=lambda b: (b.order, b.name))}


def names() -> list[str]:
    """Of the benchmarks, in order."""
    return list(catalogue())


def targets() -> list[Target]:
    """All targets, in order of their benchmarks."""
    return [target for benchmark in catalogue().values() for target in benchmark.targets]


def run(wanted: Iterable[str], mode: Mode, progress: Progress | None = None) -> Report:
    """Runs benchmarks by name, one after the other.

    Raises:
        KeyError: no benchmark of that name.
        MissingPart: something that one needs is not installed.
        ValueError: a row or target of a benchmark is not as it should be.
    """
    known = catalogue()
    chosen = [known[name] for name in dict.fromkeys(wanted)]
    report = Report(Machine.look(), mode)
    as_installed()
    for benchmark in chosen:
        if progress is not None:
            progress(benchmark.name)
        started = time.monotonic()
        rows = benchmark.run(mode)
        report.seconds[benchmark.name] = time.monotonic() - started
        report.benchmarks[benchmark.name] = rows
        report.verdicts += judge(benchmark, rows)
    return report


def as_installed() -> None:
    """Puts the bytecode of our packages where Python looks for it, as pip does.

    In a checkout it may be missing, above all where PYTHONDONTWRITEBYTECODE is set: every process
    would compile what it imports, and keep some of the memory and all of the time that takes.
    """
    for place in sys.modules["qnnbroker"].__path__:
        compileall.compile_dir(place, quiet=2)  # where we may not write, it stays as it is


def judge(benchmark: Benchmark, rows: list[Row]) -> list[Verdict]:
    """Every target of a benchmark, decided.

    Raises:
        ValueError: a target that no row decides, or several; a row for a target that is not there.
    """
    deciding = [row for row in rows if row.target]
    by_id = {row.target: row for row in deciding}
    wanted = {target.id for target in benchmark.targets}
    if len(by_id) != len(deciding) or set(by_id) != wanted:
        raise ValueError(
            f"benchmark {benchmark.name!r} has targets {sorted(wanted)} and rows for "
            f"{sorted(row.target for row in deciding)}"
        )
    keys = [(row.case, row.metric) for row in rows]
    if doubled := {key for key in keys if keys.count(key) > 1}:
        raise ValueError(f"benchmark {benchmark.name!r} has rows twice: {sorted(doubled)}")
    return [target.judge(by_id[target.id]) for target in benchmark.targets]
