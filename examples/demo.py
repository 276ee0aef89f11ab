# SPDX-License-Identifier: Apache-2.0
"""The demo: two applications, one broker, one context; beside the same two without a broker.

    python examples/demo.py [--runs N] [FILE...]

Detects the types of some files of this machine (and of those given) with Magika, on the QNN
library's own emulation of the NPU. Exits with 1 when an answer is wrong, or when the broker does
not hold exactly one context for the two.
"""

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import zoo
from demo_processes import Broker, DemoError, Worker, WorkerResult
from qnnbroker.benchmarks.usage import total_pss, with_descendants
from zoo.magika import samples

MODEL = "magika_fused"
RUNS = 20  # memory grows during the first few
MIB = 1024 * 1024

console = Console()


@dataclass(frozen=True, slots=True)
class Sample:
    """A file to look at, and its type where that is known."""

    path: Path
    wanted: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one way of running two applications gave."""

    first: WorkerResult
    second: WorkerResult
    #: What took memory, in bytes (PSS), after all runs.
    memory: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())


def main() -> int:
    """Run the demo; 0 if all went right."""
    parser = argparse.ArgumentParser(description="Two applications share one NPU context.")
    parser.add_argument("files", nargs="*", type=Path, help="more files to detect the type of")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each application (%(default)s)")
    arguments = parser.parse_args()
    given: list[Path] = arguments.files
    if missing := [path for path in given if not path.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    signal.signal(signal.SIGTERM, _unwind)
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="qb-demo-", dir="/tmp") as directory:
            right = demonstrate(
                Path(directory), [path.absolute() for path in given], arguments.runs
            )
    except (DemoError, zoo.ZooError) as error:
        console.print(f"[bold red]The demo failed:[/] {error}", highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]interrupted; nothing is left running[/]")
        return 130
    console.print(f"\n{time.monotonic() - started:.0f} s in all; nothing is left running.")
    return 0 if right else 1


def demonstrate(directory: Path, given: list[Path], runs: int) -> bool:
    """Everything; whether it was right."""
    with console.status("preparing the model") as status:

        def step(text: str) -> None:
            status.update(f"preparing the model: {text}")
            if not console.is_terminal:
                console.print(f"  {text}")

        wrapper = zoo.compiled(MODEL, step)
        files = sample_files(directory, given)
        runs = max(runs, len(files))
    size = wrapper.with_name(f"{wrapper.stem}_qnn.bin").stat().st_size
    console.print(
        f"[bold]Magika[/] (file type detection), compiled for the NPU: {size / MIB:.1f} MiB, "
        f"{wrapper.name}\n"
    )
    with Broker(directory / "run") as broker:
        console.print(f"The broker is process {broker.pid}, ready in {broker.start_seconds:.1f} s.")
        with two_workers("broker", wrapper, files, runs, broker) as (first, second):
            with_broker = measure("through the broker", first, second, broker)
            context_count, session_count = broker.holdings()
    with two_workers("alone", wrapper, files, runs, None) as (first, second):
        without = measure("two on their own", first, second, None)

    right = show_answers(files, with_broker, without)
    show_times(with_broker, without, broker.emulated)
    show_memory(with_broker, without)
    held = context_count == 1 and session_count == 2
    console.print(
        f"\nThe broker held [bold]{plural(context_count, 'context')}[/] for "
        f"[bold]{plural(session_count, 'session')}[/]"
        + ("." if held else ": [bold red]wanted were 1 context and 2 sessions.[/]")
    )
    if not right:
        console.print("[bold red]Some answers are wrong.[/]")
    return right and held


def sample_files(directory: Path, given: list[Path]) -> list[Sample]:
    """Real files of this machine and of the fetched packages, then those given."""
    found: list[Sample] = []
    for path, content, wanted in samples():
        if not path.is_file():  # one that is only made in memory
            path = directory / path.name
            path.write_bytes(content)
        found.append(Sample(path, wanted))
    return found + [Sample(path, None) for path in given]


@contextlib.contextmanager
def two_workers(
    way: str, wrapper: Path, files: list[Sample], runs: int, broker: Broker | None
) -> Iterator[tuple[Worker, Worker]]:
    """Two processes that are not started yet; gone afterwards."""
    paths = [sample.path for sample in files]
    runtime_dir = None if broker is None else broker.directory
    with (
        Worker(way, "first application", wrapper, paths, runs, runtime_dir) as first,
        Worker(way, "second application", wrapper, paths, runs, runtime_dir) as second,
    ):
        yield first, second


def measure(title: str, first: Worker, second: Worker, broker: Broker | None) -> Measured:
    """Start one, then the other, let both run, and weigh them."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(title, total=first.runs + second.runs)
        for worker in (first, second):  # one after the other, so that neither start is disturbed
            worker.start()
            worker.wait_first_answer()
            progress.advance(task)
        for worker in (first, second):
            worker.go_on()
        for worker in (first, second):
            for _ in worker.answers():
                progress.advance(task)
        memory = {worker.name: total_pss([worker.pid]) for worker in (first, second)}
        if broker is not None:
            memory = {"broker": total_pss(with_descendants(broker.pid)), **memory}
    return Measured(first.result(), second.result(), memory)


def show_answers(files: list[Sample], with_broker: Measured, without: Measured) -> bool:
    """Each file with what was said about it; whether all of it was right."""
    table = Table(title="What type is this file?", title_justify="left")
    for heading in ("file", "first application", "second application", ""):
        table.add_column(heading)
    right = True
    for sample in files:
        said = [m.answers[sample.path] for m in (with_broker.first, with_broker.second)]
        alone = [m.answers[sample.path] for m in (without.first, without.second)]
        labels = {answer.label for answers in (*said, *alone) for answer in answers}
        if sample.wanted is None:
            good, verdict = len(labels) == 1, "yours"
        else:
            good = labels == {sample.wanted}
            verdict = "right" if good else f"wrong, it is {sample.wanted}"
        right = right and good
        table.add_row(
            sample.path.name,
            *(f"{a[-1].label} ({a[-1].probability:.2f})" for a in said),
            f"[green]{verdict}[/]" if good else f"[bold red]{verdict}[/]",
        )
    console.print()
    console.print(table)
    return right


def show_times(with_broker: Measured, without: Measured, emulated: bool) -> None:
    """To the model and to the first answer, from when all was imported and from process start."""
    for title, from_begun in (
        ("With imports aside: from connecting, or creating the session, in seconds", True),
        ("With imports, which differ by the way: from process start, in seconds", False),
    ):
        table = Table(title=title, title_justify="left")
        table.add_column("application")
        for way in ("broker", "alone"):
            table.add_column(f"{way}:\nmodel ready", justify="right")
            table.add_column(f"{way}:\nfirst answer", justify="right")
        for name, ours, theirs in (
            ("first", with_broker.first, without.first),
            ("second", with_broker.second, without.second),
        ):
            times = (*ours.times(from_begun), *theirs.times(from_begun))
            table.add_row(name, *(f"{seconds:.3f}" for seconds in times))
        console.print()
        console.print(table)
    console.print(
        "[dim]Through the broker, the model is loaded for the first application, and tried before "
        "that where it is new on this machine; the second finds it there.[/]"
    )
    if emulated:
        console.print("[dim]The NPU is emulated here, which is most of the time of an answer.[/]")


def show_memory(with_broker: Measured, without: Measured) -> None:
    """Who takes how much, and in all."""
    table = Table(
        title=f"Memory after {len(with_broker.first)} runs each, in MiB (PSS)",
        title_justify="left",
        show_footer=True,
    )
    table.add_column("process", footer="in all")
    for heading, measured in (("with the broker", with_broker), ("each alone", without)):
        table.add_column(heading, justify="right", footer=f"{measured.total_bytes / MIB:.0f}")
    for name in with_broker.memory:
        sizes = (measured.memory.get(name) for measured in (with_broker, without))
        table.add_row(name, *("-" if size is None else f"{size / MIB:.0f}" for size in sizes))
    console.print()
    console.print(table)


def plural(count: int, noun: str) -> str:
    """`1 context`, `2 contexts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _unwind(number: int, _frame: FrameType | None) -> None:
    """End like Ctrl-C does, so that everything started is ended too."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
