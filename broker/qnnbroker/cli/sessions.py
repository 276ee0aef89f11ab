# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker sessions`: who is attached, and what each one holds and does."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from .invocation import Command, invocation

if TYPE_CHECKING:
    from qnnbroker.v1 import control_pb2


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker sessions", "who uses the NPU"),
        ("qnnbroker sessions --json", "the same for a program, times in ns"),
    ],
)
def sessions() -> None:
    """List the attached clients and what they hold."""
    from .operator import CALL_SECONDS, broker_control
    from .output import message_json, print_json

    call = invocation()
    with broker_control(call.directory()) as control:
        found = control.list_sessions(CALL_SECONDS).sessions
    if call.json:
        print_json({"sessions": [message_json(s) for s in found]})
    else:
        print_sessions(found)


def print_sessions(found: "Sequence[control_pb2.SessionInfo]") -> None:
    """A table, or a line that says that there are none."""
    from .output import print_line, print_table, show_bytes, show_ns, show_seconds

    if not found:
        print_line("No sessions")
        return
    print_table(
        [
            "Session>",
            "Pid>",
            "Uid>",
            "Command",
            "Buffers>",
            "Bytes>",
            "Models>",
            "Bindings>",
            "In flight>",
            "Runs>",
            "Device time>",
            "Age>",
        ],
        [
            (
                # The low half; the high one is the id's generation.
                s.session_id & 0xFFFFFFFF,
                s.pid,
                s.uid,
                s.command or s.client_name,
                s.buffer_count,
                show_bytes(s.buffer_bytes),
                s.model_count,
                s.binding_count,
                s.in_flight,
                s.run_count,
                show_ns(s.device_ns),
                show_seconds(s.age_seconds),
            )
            for s in found
        ],
    )
