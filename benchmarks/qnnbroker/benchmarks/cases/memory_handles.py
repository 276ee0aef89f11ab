# SPDX-License-Identifier: Apache-2.0
"""Shared memory: what bindings cost, by handle and by address, and what they leave behind.

Handles are those of the fake QNN library, which works through them alone; bytes copied are counted
on the real library, where memory is used by address. What is left behind is counted after a seeded
mix of clients that bind, run, go, are parked and have the backend reset below them.
"""

import contextlib
import gc
import os
import random
import time
from pathlib import Path

from qnnbroker.client import Binding, Graph, Session, connect
from qnnbroker.client.control import Control
from qnnbroker.native.fake import fake_qnn_dir
from qnnbroker.protos.paths import GRPC_SOCKET
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import control_pb2_grpc

from .. import models
from ..brokers import Broker, broker, fake_model
from ..rows import Mode, Row, Target, against, spread

ORDER = 7
BINDINGS = 1000
REGISTERING = "mem_register=on"
TARGETS = [
    Target(
        "arena_fds", "fds that a session of 1,000 bindings opens in the broker", "<=", 10, "fds"
    ),
    Target("bind_us", "creating a binding of a graph of 2 tensors, p50", "<=", 900, "us"),
    Target(
        "registered_run_over_raw",
        "null graph on the fake: run with memory handles / by address, p50",
        "<=",
        1.05,
        use_ratio=True,
    ),
    Target(
        "copied_bytes_run",
        "bytes copied between processes by a run, real library",
        "<=",
        0,
        "bytes",
    ),
    Target(
        "leaked_registrations",
        "registrations, rpcmem allocations and fds left after a mix of everything",
        "<=",
        0,
        "objects",
    ),
]


def run(mode: Mode) -> list[Row]:
    """Times in us, counts as they are."""
    with fake_model("null", 64, 64) as path:
        with broker("fake", switches=REGISTERING) as where:
            rows = [*_bindings(where, path), *_runs(where, path, mode.pick(200, 4000, 30000))]
        rows.append(_leaks(path, mode.pick(20, 150, 600)))
    return [*rows, _copies(mode)]


def _fds(where: Broker) -> int:
    return len(os.listdir(f"/proc/{where.pid}/fd"))


def _bindings(where: Broker, path: Path) -> list[Row]:
    """A thousand of them in one session: time of each, and the broker's fds."""
    with connect(where.directory) as warm_up:  # what is opened once
        warm_up.load(path).graph.bind().run()
    time.sleep(0.5)  # the connection of that client is closed in its own time
    before = _fds(where)
    with connect(where.directory) as session:
        graph = session.load(path).graph
        times, bindings = [], []
        for _ in range(BINDINGS):
            started = time.perf_counter_ns()
            bindings.append(graph.bind())
            times.append(time.perf_counter_ns() - started)
        fds = _fds(where) - before
        p50, p99 = spread("creating a binding", times, "us", scale=1e-3)
        return [
            p50.decides("bind_us"),
            p99,
            Row("session of 1,000 bindings", "fds", fds, "fds").decides("arena_fds"),
            Row(
                "session of 1,000 bindings",
                "buffers",
                session.arena.statistics().buffers,
                "buffers",
            ),
        ]


def _runs(where: Broker, path: Path, count: int) -> list[Row]:
    """Runs in turns, so that whatever else the machine does hits both alike."""
    with connect(where.directory) as session:
        graph = session.load(path).graph
        handles, address = graph.bind(zero_copy="require"), graph.bind(zero_copy="off")
        times: dict[str, list[int]] = {"registered": [], "raw": []}
        gc.disable()
        try:
            for _ in range(max(1, count // 100)):
                for binding in (handles, address):
                    _batch(binding, times[binding.memory])
        finally:
            gc.enable()
        raw = spread("null graph, by address", times["raw"], "us", scale=1e-3)
        known = against(
            spread("null graph, by memory handles", times["registered"], "us", scale=1e-3), raw
        )
        return [*raw, known[0].decides("registered_run_over_raw"), known[1]]


def _batch(binding: Binding, times: list[int]) -> None:
    for _ in range(100):
        started = time.perf_counter_ns()
        binding.run()
        times.append(time.perf_counter_ns() - started)


def _copies(mode: Mode) -> Row:
    """The most that any run reports, and the broker counts."""
    model = models.small(mode)
    with broker("qnn") as where, connect(where.directory) as session:
        graph = session.load(model.wrapper).graph
        with graph.bind() as binding:
            copied = max(binding.run().copied_bytes for _ in range(3))
            memory = binding.memory
        copied += session.statistics().counters["copied_bytes_total"]
    row = Row(f"{model.label}, tensors {memory}", "copied", copied, "bytes")
    return row.decides("copied_bytes_run")


def _leaks(path: Path, steps: int) -> Row:
    """What the broker holds after everybody has gone, over what it held before."""
    rpcmem = fake_qnn_dir() / "rpcmem" / "libcdsprpc.so"
    with broker("fake", switches=REGISTERING, rpcmem_library=str(rpcmem)) as where:
        control = Control(str(where.directory / GRPC_SOCKET))
        with connect(where.directory) as warm_up:
            warm_up.load(path).graph.bind().run()
        before = _settled(where, control)
        _mix(where, path, steps, random.Random(7))
        after = _settled(where, control)
        control.close()
    return Row(f"a mix of {steps} steps", "left", after - before, "objects").decides(
        "leaked_registrations"
    )


def _settled(where: Broker, control: Control) -> int:
    """Registrations, rpcmem and fds once nobody is attached, at their lowest for a while."""
    lowest, quiet = 1 << 30, 0
    while quiet < 20:
        counters = control.statistics(30).counters
        busy = counters["sessions"] + counters["sessions_closing"] + counters["contexts_closing"]
        held = counters["native_registrations"] + counters["native_rpcmem"] + _fds(where)
        quiet = quiet + 1 if not busy and held >= lowest else 0
        lowest = min(lowest, held) if not busy else lowest
        time.sleep(0.05)
    return lowest


def _mix(where: Broker, path: Path, steps: int, chance: random.Random) -> None:
    import grpc

    sessions: list[tuple[Session, Graph, list[Binding]]] = []
    with grpc.insecure_channel(f"unix:{where.directory / GRPC_SOCKET}") as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        for _ in range(steps):
            step = chance.randrange(8)
            if not sessions or (step == 0 and len(sessions) < 4):
                session = connect(where.directory)
                sessions.append((session, session.load(path).graph, []))
            session, graph, bindings = chance.choice(sessions)
            if step < 4:
                bindings.append(graph.bind())
            elif step == 4 and bindings:
                bindings.pop(chance.randrange(len(bindings))).close()
            elif step == 5:
                stub.ParkBindings(pb.ParkBindingsRequest())
            elif step == 6 and chance.random() < 0.2:
                stub.ResetBackend(pb.ResetBackendRequest())
            elif step == 7 and chance.random() < 0.3:
                sessions.remove((session, graph, bindings))
                session.close()
                continue
            for binding in bindings:
                binding.run()
        with contextlib.ExitStack() as stack:
            for session, _, _ in sessions:
                stack.callback(session.close)
