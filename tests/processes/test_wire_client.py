# SPDX-License-Identifier: Apache-2.0
"""A client in C, written from WIRE.md alone, against a real broker."""

import itertools
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel, adder, numbers
from tests.raw_peer import Metadata, binding_request
from tests.waiting import PATIENCE_SECONDS, wait_readable

from qnnbroker.client import connect
from qnnbroker.native.fake import FakeGraph, FakeTensor
from qnnbroker.protos.status import SESSION_METADATA_KEY
from qnnbroker.v1 import control_pb2 as pb

OK, UNKNOWN, CREDITS, LATE, CANCELLED = 0, 2, 5, 7, 9
BYTES = 1000


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wire") / "wire_client"
    source = Path(__file__).parents[1] / "native" / "wire_client.c"
    subprocess.run(
        ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(path), str(source)],
        check=True,
    )
    return path


class WireClient:
    """The C program, and for it the calls that need gRPC."""

    def __init__(self, program: Path, broker: BrokerProcess, model: Path) -> None:
        self.broker = broker
        self.process = subprocess.Popen(
            [str(program), str(broker.attach_path)],
            bufsize=0,  # what `wait_readable` looks at is not read ahead
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        kind, token = self.answer().split()
        assert kind == "session"
        self.metadata: Metadata = ((SESSION_METADATA_KEY, bytes.fromhex(token)),)
        kind, buffer, size = self.answer().split()
        assert (kind, int(size)) == ("buffer", 65536)
        self.buffer = int(buffer)
        loaded = list(
            broker.stub.LoadModel(
                pb.LoadModelRequest(path=str(model)),
                metadata=self.metadata,
                timeout=PATIENCE_SECONDS,
            )
        )[-1]
        self.graph = loaded.model.graphs[0].graph_id
        self._places = itertools.count(0, 2048)

    def bind(self) -> tuple[int, int, int]:
        """A binding of its own: id, and where input and output lie."""
        at = next(self._places)
        x, y = ("x", self.buffer, at, BYTES), ("y", self.buffer, at + 1024, BYTES)
        request = binding_request(self.graph, [x], [y])
        answer = self.broker.stub.CreateBinding(
            request, metadata=self.metadata, timeout=PATIENCE_SECONDS
        )
        return answer.binding_id, at, at + 1024

    def answer(self) -> str:
        assert self.process.stdout is not None
        wait_readable(self.process.stdout.fileno(), "the C client answers")
        line = self.process.stdout.readline().decode()
        assert line, self.process.stderr and self.process.stderr.read().decode()
        return line.strip()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        self.process.stdin.flush()

    def ask(self, *words: object) -> list[str]:
        self.tell(*words)
        return self.answer().split()

    def close(self) -> None:
        with self.process:
            self.process.kill()


@pytest.fixture
def wire_client(
    program: Path, shared_broker: BrokerProcess, make_model: MakeModel
) -> Iterator[Callable[[], WireClient]]:
    tensors = [FakeTensor(n, "uint8", (BYTES,)) for n in "xy"]
    model = make_model("bytes", FakeGraph("g", (tensors[0],), (tensors[1],), ops=("copy",)))
    made: list[WireClient] = []

    def make() -> WireClient:
        made.append(WireClient(program, shared_broker, model))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_it_runs_a_binding_and_gets_what_went_in(
    wire_client: Callable[[], WireClient],
) -> None:
    client = wire_client()
    binding, at, to = client.bind()
    assert client.ask("run", binding, 2000, at, to, BYTES) == ["ran", "2000"]
    again, at, to = client.bind()
    assert client.ask("run", again, 100, at, to, BYTES) == ["ran", "100"]


def test_it_keeps_many_in_flight_and_has_its_limit(
    wire_client: Callable[[], WireClient], shared_broker: BrokerProcess
) -> None:
    client = wire_client()
    binding, *_ = client.bind()
    assert client.ask("submit", binding, 8) == ["done"] + ["0"] * 8
    assert client.ask("submit", binding + 1, 3) == ["done"] + [str(UNKNOWN)] * 3
    assert client.ask("late", binding) == ["done", str(LATE)]


def test_it_cancels_what_is_queued(
    wire_client: Callable[[], WireClient], shared_broker: BrokerProcess
) -> None:
    other, client = wire_client(), wire_client()
    busy, *_ = other.bind()
    binding, *_ = client.bind()
    shared_broker.set_faults("hang=graphExecute@g:1")
    other.tell("submit", busy, 1)
    shared_broker.wait_hanging(1)
    assert client.ask("cancel", binding) == ["done", str(CANCELLED)]
    shared_broker.set_faults("unhang")
    assert other.answer() == "done 0"


def test_it_is_thrown_out_for_a_bad_slot_and_nobody_else(
    wire_client: Callable[[], WireClient],
) -> None:
    liar, client = wire_client(), wire_client()
    binding, at, to = client.bind()
    assert liar.ask("break", liar.bind()[0]) == ["thrown", "out"]
    assert client.ask("run", binding, 100, at, to, BYTES) == ["ran", "100"]


@pytest.mark.parametrize("kind", ["runs", "refusals", "late runs", "cancels of nothing"])
def test_two_that_flood_their_rings_shut_nobody_out(
    wire_client: Callable[[], WireClient],
    shared_broker: BrokerProcess,
    make_model: MakeModel,
    kind: str,
) -> None:
    """They go on until they are told: somebody who waits for their end waits in vain."""
    floods = [wire_client() for _ in range(2)]
    for flood in floods:
        own = flood.bind()[0]
        target = own if kind in ("runs", "late runs") else 77
        flood.tell("flood", target, int(kind == "late runs"), int(kind == "cancels of nothing"))
    with (
        connect(shared_broker.runtime_dir) as session,
        session.load(make_model("adder", adder())) as model,
        model.graph.bind() as binding,
    ):
        for n in range(20):
            a, b = numbers(n)
            binding.inputs["a"][...], binding.inputs["b"][...] = a, b
            binding.run(timeout=PATIENCE_SECONDS)
            assert (binding.outputs["y"] == a + b).all()
            session.statistics()
    statuses = {"runs": OK, "refusals": UNKNOWN, "late runs": LATE, "cancels of nothing": 0}
    for flood in floods:
        flood.tell("stop")
        word, count, status = flood.answer().split()
        assert word == "flooded"
        assert int(count) > 100
        assert int(status) == statuses[kind]
