# SPDX-License-Identifier: Apache-2.0
"""The command `qnnbroker` itself: its subcommands by name, each imported when it is used."""

import importlib
from typing import Any, NamedTuple

import click

from .invocation import Invocation, format_examples, shared_options

COMPLETION_VARIABLE = "_QNNBROKER_COMPLETE"


class Entry(NamedTuple):
    """Where a subcommand is defined, and its line in the overview."""

    module: str
    attribute: str
    help: str


#: In the order of the overview. The help lines stand here too: the overview imports nothing.
COMMANDS: dict[str, Entry] = {
    "serve": Entry("serve", "serve", "Run the broker in the foreground."),
    "stop": Entry("serve", "stop", "Stop the broker and wait until it is gone."),
    "status": Entry("status", "status", "Show the broker: backend, memory, models, counters."),
    "sessions": Entry("sessions", "sessions", "List the attached clients and what they hold."),
    "ls": Entry("models", "ls", "List the resident models."),
    "load": Entry("models", "load", "Load a model and keep it resident."),
    "unload": Entry("models", "unload", "Give a resident model back."),
    "describe": Entry("models", "describe", "Show the graphs and tensors of a resident model."),
    "run": Entry("run", "run", "Run a graph on given inputs; time it, compare its outputs."),
    "park": Entry("reset", "park", "Drop the native part of bindings until their next run."),
    "reset": Entry("reset", "reset", "Make backend and contexts anew below the clients."),
    "compile": Entry("compile", "compile_command", "Compile an ONNX model for the NPU."),
    "wrap": Entry("wrap", "wrap", "Make ONNX wrappers for a bare context binary."),
    "inspect": Entry("inspect", "inspect", "Show what a compiled file holds, without a broker."),
    "bench": Entry("bench", "bench", "Measure what the broker costs, against doing without it."),
    "doctor": Entry("doctor", "doctor", "Examine this machine: libraries, device, memory, limits."),
    "config": Entry("config", "config", "Show or write the configuration."),
    "completion": Entry("completion", "completion", "Print a shell's completion script."),
}

EXAMPLES = (
    ("qnnbroker serve", "run the broker here, until Ctrl-C"),
    ("qnnbroker compile model.onnx -o model_ctx.onnx", "compile a model for the NPU"),
    ("qnnbroker run model_ctx.onnx --input x=random --repeat 100", "run it and time it"),
    ("qnnbroker status --json", "what the broker is and does, for a program"),
)


class LazyGroup(click.Group):
    """A group whose subcommands are imported on demand: `--help` loads none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module = importlib.import_module(f"qnnbroker.cli.{entry.module}")
        found: click.Command = getattr(module, entry.attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            import difflib

            close = difflib.get_close_matches(name, COMMANDS, 1)
            meant = f"; {close[0]!r} is near it" if close else ""
            ctx.fail(f"no command is called {name!r}{meant}; there are {', '.join(COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        format_examples(EXAMPLES, formatter)
        with formatter.section("Exit codes"):
            formatter.write_dl(
                [
                    ("0", "done"),
                    ("1", "it failed; also when a model or an input is missing or does not fit"),
                    ("2", "the command line or the configuration is wrong by itself"),
                    ("3", "no broker is there"),
                    ("130", "interrupted"),
                ]
            )


def _print_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        from qnnbroker.broker.version import broker_version

        click.echo(f"qnnbroker {broker_version()}")
        context.exit()


@click.group(
    "qnnbroker",
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=False,
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and leave.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """One process owns the Qualcomm NPU; every application on the machine shares it.

    Errors are one line on standard error. With --json they are also an object
    {"error": {"type", "reason", "message", "ids"}} on standard output.
    """
    context.ensure_object(Invocation)


cli.params.extend(shared_options())


def complete(instruction: str) -> int:
    """Answers the shell's completion script (see `qnnbroker completion`)."""
    from click.shell_completion import shell_complete

    options: dict[str, Any] = {}
    return shell_complete(cli, options, "qnnbroker", COMPLETION_VARIABLE, instruction)
