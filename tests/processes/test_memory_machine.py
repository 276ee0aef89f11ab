# SPDX-License-Identifier: Apache-2.0
"""Buffers, bindings and contexts in every order that chance finds: right results, nothing left.

A broker with registered memory and the stand-in for rpcmem, or by address over memfds; its clients
allocate, load, bind, run and give back in any order, die, and have their bindings parked and the
backend reset below them.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.broker_process import BrokerProcess, all_stopped, spawn_broker
from tests.fake_models import adder, model_maker, numbers
from tests.waiting import wait_until

from qnnbroker.client import Binding, Buffer, Model, Session, connect
from qnnbroker.native.fake import fake_qnn_dir, read_record
from qnnbroker.v1 import control_pb2 as pb

#: More of both for a long hunt.
EXAMPLES = int(os.environ.get("QNNBROKER_MACHINE_EXAMPLES", "12"))
STEPS = int(os.environ.get("QNNBROKER_MACHINE_STEPS", "25"))
DOOMED = Path(__file__).with_name("doomed_client.py")


@dataclass
class Client:
    """One session and what it holds."""

    session: Session
    models: list[Model] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)


class MemoryMachine(RuleBasedStateMachine):
    """The rules. `broker` and `paths` are set by the test."""

    broker: BrokerProcess
    paths: list[Path]
    before: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Client] = []
        self.seed = 0

    def pick(self, data: st.DataObject, of: list[Any]) -> Any:
        return of[data.draw(st.integers(0, len(of) - 1))]

    def client(self, data: st.DataObject) -> Client:
        if not self.clients or (len(self.clients) < 3 and data.draw(st.booleans())):
            self.clients.append(Client(connect(self.broker.runtime_dir)))
        return self.pick(data, self.clients)  # type: ignore[no-any-return]

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        client = self.client(data)
        client.models.append(client.session.load(self.pick(data, self.paths)))

    @rule(data=st.data(), size=st.integers(1, 20_000))
    def alloc(self, data: st.DataObject, size: int) -> None:
        client = self.client(data)
        kind: Any = data.draw(st.sampled_from([None, "memfd"]))
        client.buffers.append(client.session.alloc(size, kind=kind))

    @rule(data=st.data(), zero_copy=st.sampled_from([None, "auto", "off"]))
    def bind(self, data: st.DataObject, zero_copy: Any) -> None:
        client = self.client(data)
        if not client.models:
            client.models.append(client.session.load(self.paths[0]))
        graph = self.pick(data, client.models).graph
        large = [b for b in client.buffers if b.size_bytes >= 4096 and not b.released]
        given = bool(large) and data.draw(st.booleans())
        inputs = {"a": (self.pick(data, large), 128)} if given else {}
        client.bindings.append(graph.bind(inputs, zero_copy=zero_copy))

    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        client = self.client(data)
        for binding in client.bindings:
            self.seed += 1
            a, b = numbers(self.seed)
            binding.inputs["a"][:], binding.inputs["b"][:] = a, b
            assert binding.run().copied_bytes == 0
            assert np.array_equal(binding.outputs["y"], a + b)

    @rule(data=st.data())
    def release_binding(self, data: st.DataObject) -> None:
        client = self.client(data)
        if client.bindings:
            client.bindings.pop(data.draw(st.integers(0, len(client.bindings) - 1))).close()

    @rule(data=st.data())
    def release_buffer(self, data: st.DataObject) -> None:
        client = self.client(data)
        if client.buffers:
            client.buffers.pop(data.draw(st.integers(0, len(client.buffers) - 1))).drop()

    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        client = self.client(data)
        if client.models:
            client.models.pop(data.draw(st.integers(0, len(client.models) - 1))).unload()
            client.bindings = [b for b in client.bindings if not b.closed]

    @rule()
    def park(self) -> None:
        self.broker.stub.ParkBindings(pb.ParkBindingsRequest(), timeout=20)

    @rule()
    def reset_backend(self) -> None:
        self.broker.stub.ResetBackend(pb.ResetBackendRequest(), timeout=20)

    @rule(data=st.data())
    def client_goes(self, data: st.DataObject) -> None:
        if self.clients:
            self.clients.pop(data.draw(st.integers(0, len(self.clients) - 1))).session.close()

    @rule(data=st.data())
    def kill_client(self, data: st.DataObject) -> None:
        """One in another process, in the middle of its runs."""
        command = [sys.executable, str(DOOMED), str(self.broker.runtime_dir)]
        with subprocess.Popen(
            [*command, str(self.pick(data, self.paths))], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"running\n"
            child.kill()

    @invariant()
    def what_is_counted_is_what_there_is(self) -> None:
        def agrees() -> bool:  # once what is being given back is
            counters = self.broker.counters()
            assert counters["native_rpcmem"] >= 0
            return counters["registrations"] == counters["native_registrations"]

        wait_until(agrees, "as many registrations here as in the library")

    def teardown(self) -> None:
        for client in self.clients:
            client.session.close()
        self.broker.wait_gauges(self.before)


@pytest.fixture(params=["registered", "raw"])
def machine_broker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BrokerProcess]:
    rpcmem = tmp_path / "rpcmem"
    rpcmem.touch()
    monkeypatch.setenv("QNNBROKER_FAKE_RPCMEM", str(rpcmem))
    words = [f"record={tmp_path / 'calls'}"]
    options: dict[str, Any] = {}
    if request.param == "registered":
        words.append("mem_register=on")
        options = {"rpcmem_library": str(fake_qnn_dir() / "rpcmem" / "libcdsprpc.so")}
    with tempfile.TemporaryDirectory(prefix="qb") as directory:
        broker = spawn_broker(Path(directory), tmp_path, switch_words=words, **options)
        with all_stopped([broker]):
            yield broker
            counters = broker.counters()
            left = ("registrations", "native_registrations", "native_rpcmem", "native_contexts")
            assert {name: counters[name] for name in left} == dict.fromkeys(left, 0)
    errors = [c.arguments["what"] for c in read_record(tmp_path / "calls") if c.name == "error"]
    assert errors == []
    calls = Counter(line.split()[1] for line in rpcmem.read_text().splitlines())
    assert calls["alloc"] == calls["free"]
    assert calls["bad_free"] == 0
    assert (calls["alloc"] > 0) == (request.param == "registered")


@pytest.mark.slow
def test_no_order_of_events_leaks_or_breaks_anything(
    machine_broker: BrokerProcess, tmp_path: Path
) -> None:
    make = model_maker(tmp_path)
    paths = [make("first"), make("second", adder("other")), make("third", adder("add", ops=()))]
    with connect(machine_broker.runtime_dir) as warm_up:  # opens the records
        warm_up.load(paths[0]).graph.bind().run()
    machine_broker.wait_counters(contexts=0, contexts_closing=0, sessions_closing=0)
    machine = type(
        "Machine",
        (MemoryMachine,),
        {"broker": machine_broker, "paths": paths, "before": machine_broker.gauges()},
    )
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize="QNNBROKER_MACHINE_EXAMPLES" not in os.environ,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
