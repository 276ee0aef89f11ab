# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker completion`: the script that makes a shell complete our command lines."""

import click

from .invocation import Command, invocation
from .problems import Failure

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Command,
    broker=False,
    config=False,
    examples=[
        ('eval "$(qnnbroker completion bash)"', "in ~/.bashrc; zsh likewise in ~/.zshrc"),
        (
            "qnnbroker completion fish > ~/.config/fish/completions/qnnbroker.fish",
            "for fish, once",
        ),
    ],
)
@click.argument("shell", type=click.Choice(SHELLS), metavar="SHELL")
def completion(shell: str) -> None:
    """Print a shell's completion script.

    SHELL is bash (4.4 or newer), zsh or fish. The script calls `qnnbroker` with the variable
    _QNNBROKER_COMPLETE set, which is click's own mechanism.
    """
    from click.shell_completion import get_completion_class

    from .group import COMPLETION_VARIABLE, cli
    from .output import print_json

    found = get_completion_class(shell)
    assert found is not None
    made = found(cli, {}, "qnnbroker", COMPLETION_VARIABLE)
    try:
        # Not `source()`: for bash that starts a bash, only to look at its version.
        script = made.source_template % made.source_vars()
    except (KeyError, ValueError) as error:
        raise Failure(f"click makes no script for {shell}: {error}", reason="SHELL") from error
    if invocation().json:
        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
