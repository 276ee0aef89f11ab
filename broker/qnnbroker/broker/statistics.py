# SPDX-License-Identifier: Apache-2.0
"""Counters and gauges by stable names: frozen snapshots for status and for tests."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from qnnbroker.native.counters import live_counts
from qnnbroker.native.qnn_memory import executes
from qnnbroker.v1 import control_pb2 as pb

from .buffer_memory import RPCMEM
from .contexts import ContextStore
from .steady import holding
from .verifying import TrialCounts

if TYPE_CHECKING:
    from .service import BrokerService


_GRAPH_FIELDS = frozenset(pb.GraphStatistics.DESCRIPTOR.fields_by_name)


def counters(service: "BrokerService") -> dict[str, int]:
    """Everything that is counted. Names that end in _total only grow; the others are gauges."""
    sessions = list(service.sessions)
    graphs = [g for c in service.contexts.all() if c.native for g in c.native.graphs.values()]
    values = {
        "sessions": len(sessions),
        "sessions_closing": service.sessions.closing_count,
        "sessions_opened_total": service.sessions.opened_total,
        "buffers": sum(len(s.buffers) for s in sessions),
        "buffer_bytes": sum(s.buffers.total_bytes for s in sessions),
        "bindings": sum(len(s.bindings) for s in sessions),
        "models": len(service.models),
        "contexts": len(service.contexts),
        "contexts_closing": service.contexts.closing_count,
        "loads_total": service.contexts.loads_total,
        "loads_joined_total": service.contexts.joined_loads_total,
        "load_errors_total": service.contexts.load_errors_total,
        **store_counters(service.contexts),
        "resident_executes": sum(g.statistics()["run_count"] for g in graphs),
        "execute_errors_total": service.execute_errors,
        "inline_copied_bytes_total": service.copied_bytes,
        **memory_counters(service),
        "in_flight": in_flight(service),
        "open_fds": len(os.listdir("/proc/self/fd")) - 1,
        "mappings": mapping_count(),
        "threads": len(os.listdir("/proc/self/task")),
    }
    values |= {f"native_{name}": count for name, count in live_counts().items()}
    return values


def store_counters(contexts: ContextStore) -> dict[str, int]:
    """How binaries came in: held by lease or copied, tried or known, and created from what."""
    created = contexts.creator.counts
    values = {f"creates_{how}_total": count for how, count in created.items()}
    values["binaries_leased_total"] = holding.leased
    values["binaries_copied_total"] = holding.copied
    trials = contexts.verifier.counts if contexts.verifier else TrialCounts()
    values["trials_total"] = trials.trials
    values["trials_accepted_total"] = trials.accepted
    values["trials_rejected_total"] = trials.rejected
    values["trials_without_witness_total"] = trials.without_witness
    values["verdicts_used_total"] = trials.remembered
    return values


def in_flight(service: "BrokerService") -> int:
    """Submissions queued or running, whichever way they came."""
    natives = [s.executor_session for s in service.sessions]
    if service.inline_session is not None:
        natives.append(service.inline_session)
    return sum(n.statistics()["in_flight"] for n in natives)


def memory_counters(service: "BrokerService") -> dict[str, int]:
    """What became of the memory of buffers: registered with contexts, or used by address."""
    memory = service.backend.memory
    registered, raw = executes()
    return {
        "registrations": memory.live,
        "registrations_made_total": memory.made_total,
        "registration_hits_total": memory.hits_total,
        "registrations_refused_total": memory.refused_total,
        "registrations_lost_total": memory.lost_total,
        "raw_bindings_total": memory.raw_bindings_total,
        "registered_executes_total": registered,
        "raw_executes_total": raw,
        "copied_bytes_total": service.copied_bytes,
        "rpcmem_bytes": sum(s.buffers.bytes_of(RPCMEM) for s in service.sessions),
    }


def quantiles(stats: Mapping[str, int], what: str) -> pb.Quantiles:
    """Median and 99th percentile of one of the native histograms, ns."""
    return pb.Quantiles(p50_ns=stats[f"{what}_p50_ns"], p99_ns=stats[f"{what}_p99_ns"])


def mapping_count() -> int:
    """Shared memory mappings of this process (memfds), buffers and rings alike."""
    with open("/proc/self/maps") as f:
        return sum("/memfd:" in line for line in f)


def graph_statistics(contexts: ContextStore) -> list[pb.GraphStatistics]:
    """Per graph of every resident context."""
    rows = []
    for context in contexts.all():
        if context.native is None:
            continue
        for graph in context.native.graphs.values():
            stats = graph.statistics()
            rows.append(
                pb.GraphStatistics(
                    context_id=context.context_id,
                    graph=graph.spec.name,
                    queue=quantiles(stats, "queue"),
                    execute=quantiles(stats, "execute"),
                    total=quantiles(stats, "total"),
                    copied_bytes=graph.copied_bytes,
                    # Of what else the backend counts, what the message has.
                    **{name: n for name, n in stats.items() if name in _GRAPH_FIELDS},
                )
            )
    return rows
