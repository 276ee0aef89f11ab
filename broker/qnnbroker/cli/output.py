# SPDX-License-Identifier: Apache-2.0
"""What commands print: JSON, tables and numbers for people on standard output, progress on the
terminal behind standard error."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .problems import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

#: Wide enough that nothing is cut when the output is a file or a pipe.
_UNLIMITED_COLUMNS = 100_000


def print_json(document: object) -> None:
    """One document on standard output, in ASCII, so that odd file names cannot break it."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_line(text: str = "") -> None:
    """One line on standard output, made safe for a terminal."""
    sys.stdout.write(printable(text) + "\n")


def console() -> "Console":
    """Standard output, with colours only on a terminal and without NO_COLOR."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    return Console(
        file=sys.stdout,
        force_terminal=terminal,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        width=None if terminal else _UNLIMITED_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _print(content: "RenderableType") -> None:
    """Prints it without the spaces that fill a table's last column."""
    target = console()
    with target.capture() as capture:
        target.print(content)
    for line in capture.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows below headings. A column of numbers, whose heading ends in ">", stands to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(
            column.removesuffix(">"),
            justify="right" if column.endswith(">") else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    _print(table)


def print_fields(title: str, fields: Sequence[tuple[str, object]]) -> None:
    """A heading and name-value lines below it."""
    from rich.table import Table
    from rich.text import Text

    if title:
        _print(Text(printable(title), style="bold"))
    table = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(Text(f"  {printable(name)}"), Text(printable(str(value))))
    _print(table)


class Progress:
    """A line that tells how far something is. This one is silent; `progress` makes others."""

    def update(self, what: str, done: float = 0, total: float | None = None) -> None:
        """Shows `what`, with a bar when `total` is known."""

    def close(self) -> None:
        """Takes the line away, so that something else can be printed."""


class _TerminalProgress(Progress):
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def update(self, what: str, done: float = 0, total: float | None = None) -> None:
        self._bar.update(self._task, description=printable(what), completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()


@contextlib.contextmanager
def progress(what: str, *, silent: bool = False) -> Iterator[Progress]:
    """Progress on standard error while the block runs, when that is a terminal; gone afterwards."""
    if silent or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    target = Console(
        stderr=True, color_system=None if os.environ.get("NO_COLOR") else "auto", markup=False
    )
    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=target,
        transient=True,
    )
    with bar:
        yield _TerminalProgress(bar, bar.add_task(printable(what), total=None))


def show_bytes(count: int) -> str:
    """`count` bytes with a binary unit: 1.5 MiB."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def show_seconds(seconds: float) -> str:
    """A span of time in its two biggest units: 3 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    parts = []
    for unit, size in units:
        if whole >= size:
            parts.append(f"{whole // size} {unit}")
            whole %= size
    return " ".join(parts[:2])


def show_ns(ns: float) -> str:
    """A span of time of one run: 123.4 us, 4.56 ms."""
    if ns < 1_000_000:
        return f"{ns / 1000:.1f} us"
    if ns < 1_000_000_000:
        return f"{ns / 1e6:.2f} ms"
    return f"{ns / 1e9:.3f} s"


def message_json(message: Any) -> dict[str, Any]:
    """A protobuf message with all its fields under their own names; 64-bit numbers as numbers."""
    from google.protobuf.descriptor import FieldDescriptor

    def value_of(field: Any, value: Any) -> Any:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            return message_json(value)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return value.hex()
        return value

    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            document[field.name] = dict(sorted(value.items()))
        elif field.is_repeated:
            document[field.name] = [value_of(field, v) for v in value]
        elif field.has_presence and not message.HasField(field.name):
            document[field.name] = None
        else:
            document[field.name] = value_of(field, value)
    return document
