# SPDX-License-Identifier: Apache-2.0
"""The times of many runs: their spread, as numbers and as a picture."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .problems import Failure, WrongUsage

_PICTURES = (".png", ".svg", ".pdf")


@dataclass(slots=True)
class Timings:
    """One entry per run, in ns: waiting in the broker, executing, and all that the caller saw."""

    queue_ns: list[int] = field(default_factory=list)
    execute_ns: list[int] = field(default_factory=list)
    total_ns: list[int] = field(default_factory=list)

    def add(self, queue_ns: int, execute_ns: int, total_ns: int) -> None:
        self.queue_ns.append(queue_ns)
        self.execute_ns.append(execute_ns)
        self.total_ns.append(total_ns)

    def spreads(self) -> dict[str, dict[str, int]]:
        """Smallest, median, 99th percentile and largest of each kind."""
        kinds = {"queue": self.queue_ns, "execute": self.execute_ns, "total": self.total_ns}
        return {kind: spread(values) for kind, values in kinds.items()}


def spread(values: Sequence[int]) -> dict[str, int]:
    """By nearest rank: every number is one that was measured."""
    ordered = sorted(values)

    def rank(percent: int) -> int:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return {
        "min_ns": ordered[0],
        "p50_ns": rank(50),
        "p99_ns": rank(99),
        "max_ns": ordered[-1],
    }


def check_plot(path: str) -> Path:
    """The picture's path, when one could be drawn.

    Raises:
        WrongUsage: another suffix than those of pictures, or no such directory.
        Failure: reason NO_PLOT; matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix not in _PICTURES:
        raise WrongUsage(f"--plot wants a file {', '.join('*' + s for s in _PICTURES)}: {path!r}")
    if not target.absolute().parent.is_dir():
        raise WrongUsage(f"--plot {path!r}: there is no directory {str(target.parent)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Failure(
            "--plot needs matplotlib, which is not installed: pip install 'qnnbroker[plot]'",
            reason="NO_PLOT",
        )
    return target


def plot(timings: Timings, title: str, path: Path) -> None:
    """Two views: each run in its order, and how many were how fast."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    from .temporary import whole_file

    figure: Any
    figure, (runs, shares) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for label, values in (("total", timings.total_ns), ("execute", timings.execute_ns)):
        milliseconds = [ns / 1e6 for ns in values]
        runs.plot(milliseconds, ".", markersize=3, label=label)
        shares.plot(
            sorted(milliseconds),
            [100 * (i + 1) / len(values) for i in range(len(values))],
            drawstyle="steps-post",
            label=label,
        )
    runs.set(xlabel="run", ylabel="ms", title="every run")
    shares.set(xlabel="ms", ylabel="percent of runs not slower", title="distribution")
    for axes in (runs, shares):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:])
    pyplot.close(figure)
