# SPDX-License-Identifier: Apache-2.0
"""How many native objects of each kind are alive in this process."""

_NAMES = {
    "regions": QB_COUNT_REGION,
    "libraries": QB_COUNT_LIBRARY,
    "backends": QB_COUNT_BACKEND,
    "devices": QB_COUNT_DEVICE,
    "contexts": QB_COUNT_CONTEXT,
    "graphs": QB_COUNT_GRAPH,
    "runnables": QB_COUNT_RUNNABLE,
    "sessions": QB_COUNT_SESSION,
    "bindings": QB_COUNT_BINDING,
    "submissions": QB_COUNT_SUBMISSION,
    "rings": QB_COUNT_RING,
    "registrations": QB_COUNT_REGISTRATION,
    "rpcmem": QB_COUNT_RPCMEM,
}


def live_counts():
    """Number of live native objects by kind; a snapshot, safe from any thread."""
    return {name: qb_counter_value(<qb_counter>which) for name, which in _NAMES.items()}
