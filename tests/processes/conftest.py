# SPDX-License-Identifier: Apache-2.0
"""One broker for many tests, which must be as before after each of them."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.bound_ring import Bound, MakeBound
from tests.broker_process import BrokerProcess, all_stopped, spawn_broker
from tests.fake_models import MakeModel, adder, inline_inputs, model_maker
from tests.processes.ready import Ready
from tests.raw_peer import RawAttach, RawPeer

from qnnbroker.v1 import control_pb2 as pb

Connect = Callable[[], RawAttach]
Attach = Callable[[], RawPeer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="module")
def module_broker(
    tmp_path_factory: pytest.TempPathFactory, memory_words: tuple[str, ...]
) -> Iterator[BrokerProcess]:
    with tempfile.TemporaryDirectory(prefix="qb") as directory:
        broker = spawn_broker(
            Path(directory),
            tmp_path_factory.mktemp("broker"),
            switch_words=memory_words,
            max_buffer_bytes=1 << 24,
            max_session_bytes=1 << 26,
            max_buffers=40,
            max_bindings=20,
            max_in_flight=8,
            max_message_bytes=1 << 23,
        )
        with all_stopped([broker]):
            warm_up(broker, model_maker(tmp_path_factory.mktemp("warm")))
            yield broker


def warm_up(broker: BrokerProcess, make_model: MakeModel) -> None:
    """What a broker makes once, for the first that needs it, and keeps: the share of the inline."""
    path = make_model()
    list(broker.stub.LoadModel(pb.LoadModelRequest(path=str(path), name="warm")))
    broker.stub.Infer(pb.InferRequest(name="warm", inputs=inline_inputs(0)))
    broker.stub.UnloadModel(pb.UnloadModelRequest(name="warm"))
    broker.wait_counters(contexts=0, contexts_closing=0)


@pytest.fixture
def shared_broker(module_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """The module's broker; after each test it holds what it held before."""
    module_broker.start_afresh()
    before = module_broker.gauges()
    yield module_broker
    module_broker.set_faults("unhang")
    module_broker.wait_gauges(before)
    assert module_broker.process.poll() is None


@pytest.fixture
def connect(shared_broker: BrokerProcess) -> Iterator[Connect]:
    """Makes attach connections that have said nothing yet."""
    made: list[RawAttach] = []

    def make() -> RawAttach:
        made.append(RawAttach(shared_broker.attach_path))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


@pytest.fixture
def attach(shared_broker: BrokerProcess) -> Iterator[Attach]:
    """Makes attached clients."""
    made: list[RawPeer] = []

    def make() -> RawPeer:
        made.append(RawPeer(shared_broker.attach_path, shared_broker.stub))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture
def adder_path(make_model: MakeModel) -> Path:
    return make_model("adder")


@pytest.fixture
def make_ready(attach: Attach, adder_path: Path) -> Iterator[Callable[[], Ready]]:
    made: list[Ready] = []

    def make() -> Ready:
        peer = attach()
        model = peer.load(adder_path).model
        buffer, memory = peer.alloc(8192)
        made.append(Ready(peer, model.graphs[0].graph_id, model.model_id, buffer, memory))
        return made[-1]

    yield make
    for ready in made:
        ready.memory.close()


@pytest.fixture
def ready(make_ready: Callable[[], Ready]) -> Ready:
    return make_ready()


@pytest.fixture
def make_bound(shared_broker: BrokerProcess, make_model: MakeModel) -> Iterator[MakeBound]:
    made: list[Bound] = []
    model = make_model("adder", adder("g"))

    def make() -> Bound:
        made.append(Bound(shared_broker, model))
        return made[-1]

    yield make
    for one in made:
        one.close()
