# SPDX-License-Identifier: Apache-2.0
"""CPU time of a broker and of attached clients while nobody does anything.

Every client has a session, a model and a binding, and has run. Percent are of one core.
"""

import contextlib
import time

from ..brokers import broker, fake_model
from ..processes import ask_all, children
from ..rows import Mode, Row, Target
from ..usage import cpu_ns, with_descendants

ORDER = 7
TARGETS = [
    Target("idle_cpu_percent", "broker and 16 attached idle clients", "<", 0.5, "%"),
]


def run(mode: Mode) -> list[Row]:
    """CPU time in ms, and percent of a core."""
    count, seconds = mode.pick(2, 16, 16), mode.pick(0.5, 2.0, 10.0)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(fake_model("idle"))
        where = stack.enter_context(broker("fake"))
        bare = stack.enter_context(children(1))
        clients = stack.enter_context(children(count))
        ask_all(bare, "clients:nothing_but_numpy")
        ask_all(clients, "clients:attach", directory=str(where.directory), path=str(model))
        ask_all(clients, "clients:run", count=20)
        parts = {
            "broker": with_descendants(where.pid),
            f"{count} clients": [child.pid for child in clients],
            "a process that only waits": [child.pid for child in bare],
        }
        time.sleep(min(4.0, seconds))  # what follows a run, the end of a channel for one, is over
        before = {what: cpu_ns(pids) for what, pids in parts.items()}
        started = time.monotonic()
        time.sleep(seconds)
        elapsed = time.monotonic() - started
        used = {what: (cpu_ns(pids) - before[what]) for what, pids in parts.items()}
    rows = [Row(f"{what}, {seconds:g} s", "CPU time", ns / 1e6, "ms") for what, ns in used.items()]
    of_ours = sum(list(used.values())[:2]) / 1e9 / elapsed * 100
    nothing = list(used.values())[2] / 1e9 / elapsed * 100
    rows.append(
        Row(
            f"broker and {count} clients",
            "CPU",
            of_ours,
            "%",
            vs="a process that only waits",
            vs_value=nothing,
            ratio=of_ours / nothing if nothing else None,
            target="idle_cpu_percent",
        )
    )
    return rows
