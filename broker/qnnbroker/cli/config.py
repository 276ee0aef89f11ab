# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker config`: shows where every option's value comes from, or writes a commented file."""

import json
from pathlib import Path
from typing import Any

import click

from .invocation import Command, invocation
from .options import Option, all_options, broker_config, config_path, effective
from .problems import Failure, WrongUsage


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker config", "the effective configuration, and where each value came from"),
        ("qnnbroker config --init", "write a file with every option, commented out"),
        ("QNNBROKER_MAX_SESSIONS=8 qnnbroker config --json", "the same for a program"),
    ],
)
@click.option("--show", "show_it", is_flag=True, help="Show the effective values (the default).")
@click.option("--init", is_flag=True, help="Write a commented file, unless there is one.")
def config(show_it: bool, init: bool) -> None:
    """Show or write the configuration.

    One TOML file: --config FILE, else $QNNBROKER_CONFIG, else qnnbroker/config.toml in
    $XDG_CONFIG_HOME (~/.config without that variable). Its keys are the options of
    `qnnbroker serve`, with underscores. An environment variable QNNBROKER_<OPTION> wins over the
    file, a flag over both.
    """
    from .output import print_json, print_line

    call = invocation()
    if show_it and init:
        raise WrongUsage("config: --show or --init wanted, found both")
    if init:
        path = write_commented(config_path(call.config_file)[0])
        if call.json:
            print_json({"written": str(path)})
        else:
            print_line(f"written: {path}")
        return
    flags = {"runtime_dir": call.runtime_dir}
    read, settings = effective(call.config_file, flags)
    broker_config(settings)  # a value out of range is an error here too
    usual, _ = config_path(call.config_file)
    if call.json:
        print_json(
            {
                "file": None if read is None else str(read),
                "options": {
                    name: {
                        "value": setting.value,
                        "source": setting.source,
                        "place": setting.place or None,
                        "default": setting.option.default,
                        "unit": setting.option.unit or None,
                        "help": setting.option.help,
                    }
                    for name, setting in settings.items()
                },
            }
        )
        return
    show(read, usual, settings)


def show(read: Path | None, usual: Path, settings: dict[str, Any]) -> None:
    """A table of all options."""
    from .output import print_line, print_table

    print_line(f"file: {read}" if read else f"file: none at {usual}")
    print_line()
    print_table(
        ["Option", "Value", "Unit", "From"],
        [
            (
                name,
                toml_value(setting.value),
                setting.option.unit or "-",
                f"{setting.source} {setting.place}".strip(),
            )
            for name, setting in settings.items()
        ],
    )


def write_commented(path: Path) -> Path:
    """Creates the file (mode 0600) with every option commented out.

    Raises:
        Failure: reason FILE_EXISTS, or OS_ERROR.
    """
    from qnnbroker.broker.interrupts import deferred

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with deferred(), open(path, "x", opener=_private) as file:  # not the half of one
            file.write(commented())
    except FileExistsError as error:
        raise Failure(
            f"there is a config file {str(path)!r} already; it is left as it is",
            reason="FILE_EXISTS",
        ) from error
    return path


def _private(path: str, flags: int) -> int:
    import os

    return os.open(path, flags, 0o600)


def commented() -> str:
    """A config file that changes nothing: each option with its meaning, unit and default."""
    parts = ["# Configuration of qnnbroker. Remove the # before an option to change it.\n"]
    for option in all_options().values():
        unit = f" ({option.unit})" if option.unit else ""
        parts.append(f"# {option.help}{unit}\n{default_line(option)}")
    return "\n".join(parts)


def default_line(option: Option) -> str:
    """`#name = default`; the runtime directory's depends on the environment, so it has no value."""
    default = "" if option.name == "runtime_dir" else option.default
    return f"#{option.name} = {toml_value(default)}\n"


def toml_value(value: Any) -> str:
    """`value` as TOML writes it; JSON's strings are TOML's too."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value)
