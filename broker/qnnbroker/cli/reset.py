# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker reset` and `qnnbroker park`: what an operator does below attached clients."""

import click

from .invocation import Command, invocation

#: Deadline of a reset: it frees and creates every context. The broker's own limit is shorter.
_RESET_SECONDS = 600.0
#: Bindings are told to park; nothing is waited for.
_PARK_SECONDS = 10.0


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker reset", "after a restart of the NPU, or when its library misbehaves"),
        ("qnnbroker reset --json | jq -r '.lost[]'", "what could not be made again"),
    ],
)
def reset() -> None:
    """Make backend and contexts anew below the clients.

    Clients, buffers and bindings stay, submissions wait meanwhile. What runs ends first; when it
    does not within the broker's reset_timeout_seconds, nothing is reset, and the error says what
    ran. Exits with 1 when a context could not be made again: its models are to be loaded anew, or
    the reset repeated.
    """
    from .operator import broker_control
    from .output import message_json, print_json, print_line

    call = invocation()
    with broker_control(call.directory()) as control:
        answer = control.reset_backend(_RESET_SECONDS)
    if call.json:
        print_json(message_json(answer))
    else:
        print_line(
            f"{answer.context_count} contexts made anew, {answer.parked_count} bindings parked; "
            "they go on with their next run"
        )
        for lost in answer.lost:
            print_line(f"lost: {lost}")
    if answer.lost:
        raise click.exceptions.Exit(1)


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker park", "all bindings let go of the NPU until their next run"),
        ("qnnbroker park ocr", "those of one model, by its name or the start of its hash"),
    ],
)
@click.argument("name", metavar="[MODEL]", default="")
def park(name: str) -> None:
    """Drop the native part of bindings until their next run.

    What runs ends first. The next run of a binding builds it again, and takes so much longer.
    """
    from .operator import broker_control
    from .output import message_json, print_json, print_line

    call = invocation()
    with broker_control(call.directory()) as control:
        answer = control.park_bindings(name, _PARK_SECONDS)
    if call.json:
        print_json(message_json(answer))
    else:
        print_line(f"{answer.parked_count} bindings parked")
