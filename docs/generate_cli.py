# SPDX-License-Identifier: Apache-2.0
"""Writes docs/cli.md, the reference of the command line, from the program itself.

    python docs/generate_cli.py

Run it after a change of the command line; a test compares.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from qnnbroker.cli.group import cli

TARGET = Path(__file__).with_name("cli.md")
_WIDTH = 100
_HEAD = """\
# Command line

<!-- Written by docs/generate_cli.py; `make cli-reference` writes it anew. -->

Every command has this text with `--help`. The [guide](guide.md) shows them in use.

"""


def page() -> str:
    """The whole page."""
    return _HEAD + "\n".join(_overview()) + "\n" + "\n".join(_commands())


def _context() -> click.Context:
    return click.Context(cli, info_name="qnnbroker", terminal_width=_WIDTH, **cli.context_settings)


def _overview() -> Iterator[str]:
    yield "```text"
    yield cli.get_help(_context())
    yield "```\n"


def _commands() -> Iterator[str]:
    parent = _context()
    for name in cli.list_commands(parent):
        command = cli.get_command(parent, name)
        assert command is not None
        if command.hidden:
            continue
        context = click.Context(command, parent, name)
        yield f"## {name}\n"
        yield f"`{context.command_path} {' '.join(command.collect_usage_pieces(context))}`\n"
        yield f"{_prose(inspect.cleandoc(command.help or ''))}\n"
        yield from _parameters(command, context)
        yield from _examples(command)


def _parameters(command: click.Command, context: click.Context) -> Iterator[str]:
    records = [
        record
        for parameter in command.get_params(context)
        if (record := parameter.get_help_record(context)) is not None
    ]
    if records:
        yield "| option | |\n|---|---|"
        for names, text in records:
            yield f"| `{_cell(names)}` | {_cell(_prose(text))} |"
        yield ""


def _examples(command: click.Command) -> Iterator[str]:
    examples: tuple[tuple[str, str], ...] = getattr(command, "examples", ())
    if examples:
        yield "```sh"
        for line, what in examples:
            yield f"# {what}\n{line}"
        yield "```\n"


def _prose(text: str) -> str:
    """Text as Markdown: what looks like its markup is none, but for `code`."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([][*_])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write the page."""
    TARGET.write_text(page())


if __name__ == "__main__":
    main()
