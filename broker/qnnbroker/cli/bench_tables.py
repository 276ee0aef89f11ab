# SPDX-License-Identifier: Apache-2.0
"""What `qnnbroker bench` prints: tables for a terminal, and the same for a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import print_fields, print_line, print_table

if TYPE_CHECKING:
    from qnnbroker.benchmarks.rows import Row, Verdict
    from qnnbroker.benchmarks.suite import Report

_ROW_HEADINGS = ("case", "", "value", "unit", "compared with", "its value", "ratio")
_NUMBERS = ("value", "its value", "ratio")
_TARGET_HEADINGS = ("target", "what", "value", "wanted", "met")


def print_report(report: Report, *, with_rows: bool) -> None:
    """For people at a terminal."""
    print_fields("", report.machine.lines())
    if with_rows:
        for name, rows in report.benchmarks.items():
            print_line()
            print_fields(f"{name} ({report.mode.value}, {report.seconds[name]:.1f} s)", [])
            headings = [
                f"{h}>" if h in ("value", "its value", "ratio") else h for h in _ROW_HEADINGS
            ]
            print_table(headings, [_cells(row) for row in rows])
    print_line()
    print_table(_justified(_TARGET_HEADINGS), [_verdict_cells(v) for v in report.verdicts])


def print_markdown(report: Report, *, with_rows: bool) -> None:
    """For a document: paste it as it is."""
    for name, value in report.machine.lines():
        print_line(f"- {name}: {value}")
    print_line(f"- effort: {report.mode.value}")
    print_line()
    _markdown(_TARGET_HEADINGS, [_verdict_cells(v) for v in report.verdicts])
    if with_rows:
        for name, rows in report.benchmarks.items():
            print_line()
            print_line(f"### {name}")
            print_line()
            _markdown(_ROW_HEADINGS, [_cells(row) for row in rows])


def _justified(headings: Sequence[str]) -> list[str]:
    return [f"{heading}>" if heading in _NUMBERS else heading for heading in headings]


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_line("| " + " | ".join(headings) + " |")
    print_line("|" + "---|" * len(headings))
    for row in rows:
        print_line("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")


def _cells(row: Row) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else number(row.ratio)
    other = "" if row.vs_value is None else number(row.vs_value)
    return row.case, row.metric, number(row.value), row.unit, row.vs, other, ratio


def _verdict_cells(verdict: Verdict) -> tuple[str, ...]:
    target = verdict.target
    wanted = target.wanted
    if target.over_vs:
        wanted += f" = {number(verdict.limit)} {target.unit}"
    value = f"{number(verdict.value)} {target.unit}".strip()
    return target.id, target.what, value, wanted, "yes" if verdict.met else "NO"


def number(value: float) -> str:
    """Three significant digits, and all of a large whole number."""
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"
