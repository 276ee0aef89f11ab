# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker bench`: runs benchmarks, shows what they found, and whether the targets are met."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .invocation import Command, invocation
from .problems import Failure, WrongUsage

if TYPE_CHECKING:
    from qnnbroker.benchmarks.suite import Report

_PLOTS = Path("build") / "bench"


@click.command(
    cls=Command,
    broker=False,
    config=False,
    examples=[
        ("qnnbroker bench", "all benchmarks, in under 2 minutes on 2 idle cores"),
        ("qnnbroker bench overhead payload --json", "two of them, for a program"),
        ("qnnbroker bench --full --plots pictures/", "all, thoroughly, in under 15 minutes"),
        ("qnnbroker bench --targets", "what was promised, and whether it holds here"),
        ("qnnbroker bench --list", "what there is"),
    ],
)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--quick", "effort", flag_value="quick", help="Short runs.  [default]")
@click.option("--full", "effort", flag_value="full", help="Long runs.  [default for --targets]")
@click.option("--smoke", "effort", flag_value="smoke", hidden=True)
@click.option("--targets", is_flag=True, help="Judge the targets; run what they need.")
@click.option("--list", "listing", is_flag=True, help="List the benchmarks and their targets.")
@click.option("--markdown", is_flag=True, help="Print tables for a document.")
@click.option(
    "--plots",
    metavar="DIR",
    help=f"Where the pictures go (needs matplotlib).  [default: {_PLOTS}/, if it is installed]",
)
@click.option("--no-plots", is_flag=True, help="Draw nothing.")
def bench(
    names: tuple[str, ...],
    effort: str | None,
    targets: bool,
    listing: bool,
    markdown: bool,
    plots: str | None,
    no_plots: bool,
) -> None:
    """Measure what the broker costs, against doing without it.

    Each benchmark starts brokers and clients of its own and measures both sides in turns in one
    run; a broker that runs already is left alone. On a machine that does other things the numbers
    are worth little: its load is printed with them.
    """
    suite, rows_module = _benchmarks()
    call = invocation()
    known = suite.catalogue()
    for name in names:
        if name not in known:
            raise WrongUsage(f"no benchmark is called {name!r}; there are {', '.join(known)}")
    if listing:
        _list(known, as_json=call.json)
        return
    if not names:
        names = tuple(n for n, b in known.items() if b.targets) if targets else tuple(known)
    folder = _picture_folder(plots, no_plots)
    mode = rows_module.Mode(effort or ("full" if targets else "quick"))
    try:
        report = suite.run(names, mode, None if call.json else _say)
    except rows_module.MissingPart as error:
        raise Failure(str(error), reason="MISSING_PART") from error
    except RuntimeError as error:
        raise Failure(f"the benchmark failed: {error}", reason="BENCHMARK") from error
    if report.machine.busy and not call.json:
        click.echo(
            "the machine is too busy to judge absolute targets: load "
            f"{report.machine.load_average} on {report.machine.cores} cores before the start; "
            "ratios can be compared",
            err=True,
        )
    if folder is not None:
        _draw(report, folder, quiet=call.json)
    if call.json:
        from .output import print_json

        print_json(report.as_json(with_targets=targets))
    elif markdown:
        from .bench_tables import print_markdown

        print_markdown(report, with_rows=not targets)
    else:
        from .bench_tables import print_report

        print_report(report, with_rows=not targets)


def _benchmarks() -> tuple[Any, Any]:
    """The modules `suite` and `rows` of the benchmarks.

    Raises:
        Failure: reason NO_BENCHMARKS; a package may leave them out.
    """
    try:
        from qnnbroker.benchmarks import rows, suite
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("qnnbroker.benchmarks"):
            raise
        raise Failure(
            "the benchmarks are not installed with this qnnbroker; install it from its wheel or "
            "its source tree",
            reason="NO_BENCHMARKS",
        ) from error
    return suite, rows


def _picture_folder(plots: str | None, no_plots: bool) -> Path | None:
    """Where pictures go; None for nowhere.

    Raises:
        WrongUsage: both a folder and none.
        Failure: reason NO_PLOT; a folder was named and matplotlib is not there.
    """
    from qnnbroker.benchmarks.plots import available

    if plots is not None and no_plots:
        raise WrongUsage("--plots and --no-plots exclude one another")
    if no_plots:
        return None
    if available():
        return Path(plots) if plots is not None else _PLOTS
    if plots is not None:
        raise Failure(
            "--plots needs matplotlib, which is not installed: pip install 'qnnbroker[plot]'",
            reason="NO_PLOT",
        )
    return None


def _say(name: str) -> None:
    click.echo(f"running {name} ...", err=True)


def _draw(report: Report, folder: Path, *, quiet: bool) -> None:
    from qnnbroker.benchmarks.plots import draw

    machine = report.machine
    subtitle = f"{machine.cpu}, {machine.cores} cores, load {machine.load_average}, {machine.time}"
    for name, rows in report.benchmarks.items():
        path = draw(name, rows, f"{report.mode.value}: {subtitle}", folder)
        if not quiet:
            click.echo(f"wrote {os.fspath(path)}", err=True)


def _list(known: dict[str, Any], *, as_json: bool) -> None:
    from .output import print_json, print_table

    if as_json:
        print_json(
            {
                "benchmarks": [
                    {
                        "name": name,
                        "what": benchmark.what,
                        "targets": [
                            {"id": t.id, "what": t.what, "target": t.wanted}
                            for t in benchmark.targets
                        ],
                    }
                    for name, benchmark in known.items()
                ]
            }
        )
        return
    print_table(["BENCHMARK", "WHAT"], [(name, b.what) for name, b in known.items()])
    print()
    rows = [(t.id, t.wanted, t.what) for b in known.values() for t in b.targets]
    print_table(["TARGET", "WANTED", "WHAT"], rows)
