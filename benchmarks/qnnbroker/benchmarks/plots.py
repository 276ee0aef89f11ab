# SPDX-License-Identifier: Apache-2.0
"""One picture per benchmark, from its rows alone. Needs matplotlib."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .rows import Row

#: Bars of one picture beyond this are too thin to read; the first ones stay.
_MAX_BARS = 40
_LOG_FROM = 20.0


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(name: str, rows: Sequence[Row], subtitle: str, folder: Path) -> Path:
    """Draws a benchmark's rows into `folder`/`name`.png.

    Rows with a place in a series become lines, the others bars; one panel per kind and unit.

    Raises:
        OSError: the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = _panels(rows)
    heights = [max(3.0, 0.24 * len(panel) + 1.2) if bars else 4.5 for bars, panel in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        1,
        figsize=(11, sum(heights) + 0.6),
        layout="constrained",
        height_ratios=heights,
        squeeze=False,
    )
    for (bars, panel), axis in zip(panels, axes[:, 0], strict=True):
        (_bars if bars else _lines)(axis, panel)
    figure.suptitle(f"{name}\n{subtitle}", fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _panels(rows: Sequence[Row]) -> list[tuple[bool, list[Row]]]:
    """Rows that can share an axis, in order: (bars or lines, rows)."""
    panels: dict[tuple[bool, str], list[Row]] = {}
    for row in rows:
        bars = not row.series
        # A percentile and a total of the same unit do not belong side by side.
        kind = row.unit if bars else f"{row.metric} {row.unit}"
        panels.setdefault((bars, kind), []).append(row)
    return [(bars, panel[:_MAX_BARS]) for (bars, _), panel in panels.items()]


def _bars(axis: Any, rows: list[Row]) -> None:
    labels = [f"{row.case}  {row.metric}" for row in rows]
    values = [row.value for row in rows]
    colours = ["C1" if row.target else "C0" for row in rows]
    places = range(len(rows), 0, -1)
    axis.barh(list(places), values, color=colours)
    for place, value in zip(places, values, strict=True):
        axis.text(value, place, f" {value:.4g}", va="center", fontsize=7)
    axis.set_yticks(list(places), labels, fontsize=7)
    decides = "   (orange: decides a target)" if "C1" in colours else ""
    axis.set_xlabel((rows[0].unit or "no unit") + decides)
    _scale(axis.set_xscale, values)
    axis.margins(x=0.12)
    axis.grid(axis="x", alpha=0.3)


def _lines(axis: Any, rows: list[Row]) -> None:
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(row.series, []).append(row)
    for label, points in series.items():
        axis.plot([p.x for p in points], [p.value for p in points], "o-", markersize=4, label=label)
    ticks = sorted({row.x for row in rows if row.x is not None})
    _scale(axis.set_xscale, ticks)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    if not _scale(axis.set_yscale, [row.value for row in rows]):
        axis.set_ylim(bottom=0)
    axis.set(xlabel="KiB each way" if ticks[-1] > 128 else "processes")
    axis.set_ylabel(f"{rows[0].metric}, {rows[0].unit}")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _scale(set_scale: Any, values: Sequence[float]) -> bool:
    """Logarithmic, and True, when the values are far apart and all above zero."""
    if min(values) > 0 and max(values) / min(values) > _LOG_FROM:
        set_scale("log")
        return True
    return False
