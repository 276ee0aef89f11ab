# SPDX-License-Identifier: Apache-2.0
"""`qnnbroker status`: one screen about the broker."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from .invocation import Command, invocation

if TYPE_CHECKING:
    from qnnbroker.v1 import control_pb2


@click.command(
    cls=Command,
    examples=[
        ("qnnbroker status", "what the broker is and does"),
        ("qnnbroker status --json | jq .counters.sessions", "one number of it, for a script"),
    ],
)
def status() -> None:
    """Show the broker: backend, memory, models, counters.

    Memory is the broker's share of physical memory (PSS), and what it alone uses (private).
    """
    from .operator import CALL_SECONDS, broker_control
    from .output import message_json, print_json

    call = invocation()
    with broker_control(call.directory()) as control:
        info = control.server_info(CALL_SECONDS)
        sessions = control.list_sessions(CALL_SECONDS).sessions
        contexts = control.list_models(CALL_SECONDS).contexts
        statistics = control.statistics(CALL_SECONDS)
    memory = memory_of(info.pid)
    if call.json:
        print_json(
            {
                **message_json(info),
                "memory": memory,
                "sessions": [message_json(s) for s in sessions],
                "models": [message_json(c) for c in contexts],
                **message_json(statistics),
            }
        )
        return
    show(info, memory, sessions, contexts, statistics)


def show(
    info: "control_pb2.GetServerInfoResponse",
    memory: dict[str, int] | None,
    sessions: "Sequence[control_pb2.SessionInfo]",
    contexts: "Sequence[control_pb2.ContextInfo]",
    statistics: "control_pb2.GetStatisticsResponse",
) -> None:
    """The same for people."""
    from qnnbroker.v1 import attach_pb2

    from .models import print_models
    from .output import print_fields, print_line, print_table, show_bytes, show_seconds
    from .sessions import print_sessions

    backend = info.backend
    rows: list[tuple[str, object]] = [
        ("version", f"{info.broker_version} (protocol {info.protocol_min}-{info.protocol_max})"),
        ("pid", info.pid),
        ("runtime dir", info.runtime_dir),
        ("up", show_seconds(info.uptime_seconds)),
    ]
    kind = "rpcmem" if info.buffer_kind == attach_pb2.BUFFER_KIND_RPCMEM else "memfd"
    rows.append(("buffers", f"{kind} ({info.buffer_detail})"))
    rows.append(("clocks", clocks(info.power)))
    if memory is None:
        rows.append(("memory", "not readable for this user"))
    else:
        rows.append(
            (
                "memory",
                f"{show_bytes(memory['pss_bytes'])} PSS, "
                f"{show_bytes(memory['private_bytes'])} private",
            )
        )
    print_fields("Broker", rows)
    print_fields(
        "Backend",
        [
            ("name", f"{backend.name}{' (emulated)' if backend.emulated else ''}"),
            ("provider", f"{backend.provider}, backend id {backend.backend_id}"),
            ("build", backend.build_id),
            ("device", f"SoC {backend.soc_model}, arch v{backend.dsp_arch}{vtcm(backend)}"),
            (
                "API",
                f"core {backend.core_api_version}, backend {backend.backend_api_version}, "
                f"system {backend.system_api_version}",
            ),
            ("libraries", backend.library_dir),
        ],
    )
    if backend.capabilities:
        print_line()
        print_table(
            ["Capability", "Supported", "Evidence"],
            [(c.name, "yes" if c.supported else "no", c.evidence) for c in backend.capabilities],
        )
    print_line()
    print_sessions(sessions)
    print_line()
    print_models(contexts)
    if statistics.graphs:
        print_line()
        print_graphs(contexts, statistics.graphs)
    print_line()
    shown = {k: v for k, v in statistics.counters.items() if not k.startswith("native_")}
    print_fields("Counters", [(name, value) for name, value in sorted(shown.items())])


def print_graphs(
    contexts: "Sequence[control_pb2.ContextInfo]",
    graphs: "Sequence[control_pb2.GraphStatistics]",
) -> None:
    """A table of what ran, and how long it waited and executed: median / 99th percentile."""
    from .output import print_table, show_bytes, show_ns

    def times(of: "control_pb2.Quantiles") -> str:
        return f"{show_ns(of.p50_ns)} / {show_ns(of.p99_ns)}" if of.p99_ns else "-"

    names = {c.context_id: c.names[0] if c.names else "-" for c in contexts}
    print_table(
        [
            *("Graph", "Model", "Runs>", "Errors>"),
            *(f"{kind} p50 / p99>" for kind in ("Queue", "Execute", "Total")),
            "Copied>",
        ],
        [
            (
                g.graph,
                names.get(g.context_id, "-"),
                g.run_count,
                g.error_count,
                times(g.queue),
                times(g.execute),
                times(g.total),
                show_bytes(g.copied_bytes),
            )
            for g in graphs
        ],
    )


def clocks(power: "control_pb2.PowerInfo") -> str:
    """The mode that the broker votes for, and where most of the time went."""
    now = f"{power.mode or 'no vote'} (ceiling {power.ceiling})"
    most = max(power.seconds, key=power.seconds.__getitem__, default="none")
    now += f", most time in {most}" if most != "none" else ""
    return f"{now}; {power.detail}" if power.detail else now


def vtcm(backend: Any) -> str:
    """The device's fast memory, when it tells."""
    return f", {backend.vtcm_mb} MiB VTCM" if backend.vtcm_mb else ""


def memory_of(pid: int) -> dict[str, int] | None:
    """Physical memory of a process in bytes; None when we may not see it."""
    sums = {"Pss": 0, "Private_Clean": 0, "Private_Dirty": 0, "Rss": 0}
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in sums:
                    sums[name] = int(rest.split()[0]) * 1024
        return {
            "pss_bytes": sums["Pss"],
            "private_bytes": sums["Private_Clean"] + sums["Private_Dirty"],
            "rss_bytes": sums["Rss"],
        }
    return None
