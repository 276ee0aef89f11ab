# SPDX-License-Identifier: Apache-2.0
"""Invocation: what every command is given (--json, --runtime-dir, --config); and its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click


@dataclass
class Invocation:
    """The options that all commands share. They may stand before or after the command's name."""

    json: bool = False
    runtime_dir: str | None = None
    config_file: str | None = None

    def directory(self) -> Path:
        """The runtime directory: flag, environment, config file, default, in this order."""
        if self.runtime_dir is not None:
            return Path(self.runtime_dir).absolute()
        import os

        from qnnbroker.protos.paths import RUNTIME_DIR_ENV, runtime_dir

        if not os.environ.get(RUNTIME_DIR_ENV):
            from .options import read_config_file

            _, values = read_config_file(self.config_file)
            if "runtime_dir" in values:
                return Path(str(values["runtime_dir"])).absolute()
        return Path(runtime_dir())


def _store(name: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(context: click.Context, _: click.Parameter, value: Any) -> Any:
        if value:  # an option that is absent here may stand before the command's name
            setattr(context.ensure_object(Invocation), name, value)
        return value

    return callback


def shared_options(*, broker: bool = True, config: bool = True) -> list[click.Option]:
    """Fresh instances of the options that all commands share."""
    options = [
        click.Option(
            ["--json", "as_json"],
            is_flag=True,
            expose_value=False,
            callback=_store("json"),
            help="Print one JSON document on standard output, and nothing else.",
        )
    ]
    if broker:
        options.append(
            click.Option(
                ["--runtime-dir"],
                metavar="DIR",
                expose_value=False,
                callback=_store("runtime_dir"),
                help="Directory of the broker's sockets.  [env: QNNBROKER_RUNTIME_DIR]",
            )
        )
    if config:
        options.append(
            click.Option(
                ["--config", "config_file"],
                metavar="FILE",
                expose_value=False,
                callback=_store("config_file"),
                help="Configuration file instead of the usual one.  [env: QNNBROKER_CONFIG]",
            )
        )
    return options


class Command(click.Command):
    """A click command with the shared options, and examples at the end of its help.

    Args:
        examples: (command line, what it does) pairs.
        broker: whether it has to do with a broker, and so with a runtime directory.
        config: whether it reads the configuration file.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[tuple[str, str]] = (),
        broker: bool = True,
        config: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.examples = tuple(examples)
        self.params.extend(shared_options(broker=broker, config=config))

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        format_examples(self.examples, formatter)


def format_examples(examples: Sequence[tuple[str, str]], formatter: click.HelpFormatter) -> None:
    """The section "Examples" of a help text; lines are not wrapped, so that they can be copied."""
    if examples:
        with formatter.section("Examples"):
            for line, what in examples:
                formatter.write(f"{'':{formatter.current_indent}}# {what}\n")
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


def invocation() -> Invocation:
    """The running command's."""
    found: Invocation = click.get_current_context().ensure_object(Invocation)
    return found
