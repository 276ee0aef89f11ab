# SPDX-License-Identifier: Apache-2.0
"""What a benchmark is asked (Mode) and answers (Row), and what it is held to (Target)."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

_T = TypeVar("_T")


class MissingPart(Exception):
    """A benchmark needs something that is not installed here; the text says what."""


class Mode(enum.Enum):
    """How long to measure.

    SMOKE is the least that goes through everything: for tests, its numbers mean nothing. QUICK
    takes all benchmarks through in under 2 minutes, FULL in under 15, on 2 idle cores.
    """

    SMOKE = "smoke"
    QUICK = "quick"
    FULL = "full"

    def pick(self, smoke: _T, quick: _T, full: _T) -> _T:
        """The one of the three that is for this mode."""
        return {Mode.SMOKE: smoke, Mode.QUICK: quick, Mode.FULL: full}[self]


@dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
        case: what was measured, in words; unique together with `metric`.
        metric: which number of it: p50, p99, total, ...
        value, unit: the number. Times are in us, ms or s; memory in MiB.
        vs: what it was compared with in the same run; empty when there is nothing to compare with.
        vs_value: that one's value, in the same unit.
        ratio: value / vs_value, unless the benchmark says otherwise.
        target: id of the target that this row decides.
        series, x: where it stands in a plot of lines; without, it is a bar.
    """

    case: str
    metric: str
    value: float
    unit: str
    vs: str = ""
    vs_value: float | None = None
    ratio: float | None = None
    target: str = ""
    series: str = ""
    x: float | None = None

    def against(self, other: "Row", what: str = "") -> "Row":
        """This row, compared with `other`."""
        ratio = self.value / other.value if other.value else None
        return replace(self, vs=what or other.case, vs_value=other.value, ratio=ratio)

    def decides(self, target: str) -> "Row":
        """This row, as the one that a target looks at."""
        return replace(self, target=target)

    def as_json(self) -> dict[str, Any]:
        """The row as it is printed; `target` and `vs_value` only where there is one."""
        document: dict[str, Any] = {
            "case": self.case,
            "metric": self.metric,
            "value": _rounded(self.value),
            "unit": self.unit,
            "vs": self.vs,
            "ratio": _rounded(self.ratio),
        }
        if self.vs_value is not None:
            document["vs_value"] = _rounded(self.vs_value)
        if self.target:
            document["target"] = self.target
        return document


def _rounded(value: float | None) -> float | None:
    """Five significant digits: more were not measured."""
    return None if value is None else float(f"{value:.5g}")


@dataclass(frozen=True)
class Target:
    """A promise about the row that names it.

    Attributes:
        id: its name, also in `Row.target`.
        what: the number, in words.
        limit: what it must not pass.
        sense: "<=", "<" or ">=".
        unit: of the limit; empty for a ratio.
        over_vs: the limit is that much above the row's `vs_value`: for a promise relative to a
            yardstick of the same run.
        use_ratio: the row's ratio is held to it, not its value.
    """

    id: str
    what: str
    sense: str
    limit: float
    unit: str = ""
    over_vs: bool = False
    use_ratio: bool = False

    def judge(self, row: Row) -> "Verdict":
        """Whether `row` keeps it.

        Raises:
            ValueError: the row lacks what the target is about.
        """
        value = row.ratio if self.use_ratio else row.value
        limit = self.limit
        if self.over_vs:
            if row.vs_value is None:
                raise ValueError(f"target {self.id!r}: row {row.case!r} was compared with nothing")
            limit += row.vs_value
        if value is None:
            raise ValueError(f"target {self.id!r}: row {row.case!r} has no ratio")
        met = {"<=": value <= limit, "<": value < limit, ">=": value >= limit}[self.sense]
        return Verdict(self, row, value, limit, met)

    @property
    def wanted(self) -> str:
        """The limit in words."""
        unit = f" {self.unit}" if self.unit else ""
        over = "yardstick + " if self.over_vs else ""
        return f"{self.sense} {over}{self.limit:g}{unit}"


@dataclass(frozen=True)
class Verdict:
    """A target, the row it was judged by, and whether it was met."""

    target: Target
    row: Row
    value: float
    limit: float
    met: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.target.id,
            "what": self.target.what,
            "value": _rounded(self.value),
            "unit": self.target.unit,
            "target": self.target.wanted,
            "limit": _rounded(self.limit),
            "met": self.met,
            "case": self.row.case,
            "vs": self.row.vs,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: a value that was measured. At least one is needed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def spread(
    case: str, values: Sequence[float], unit: str, *, scale: float = 1.0, **place: Any
) -> tuple[Row, Row]:
    """The rows p50 and p99 of `values`, each multiplied by `scale`. `place`: series and x."""
    return (
        Row(case, "p50", percentile(values, 50) * scale, unit, **place),
        Row(case, "p99", percentile(values, 99) * scale, unit, **place),
    )


def against(rows: Sequence[Row], others: Sequence[Row], what: str = "") -> list[Row]:
    """Each row compared with the one of the same metric in `others`."""
    by_metric = {other.metric: other for other in others}
    return [row.against(by_metric[row.metric], what) for row in rows]
