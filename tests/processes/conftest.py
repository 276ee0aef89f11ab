# SPDX-License-Identifier: Apache-2.0
"""One broker for many tests, which must be as before after each of them."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess, all_stopped, spawn_broker
from tests.fake_models import MakeModel
from tests.raw_peer import RawAttach, RawPeer

Connect = Callable[[], RawAttach]
Attach = Callable[[], RawPeer]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.processes)


@pytest.fixture(scope="module")
def module_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with tempfile.TemporaryDirectory(prefix="qb") as directory:
        broker = spawn_broker(
            Path(directory),
            tmp_path_factory.mktemp("broker"),
            max_buffer_bytes=1 << 24,
            max_session_bytes=1 << 26,
            max_buffers=40,
            max_bindings=20,
            max_in_flight=8,
            max_message_bytes=1 << 23,
        )
        with all_stopped([broker]):
            yield broker


@pytest.fixture
def shared_broker(module_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """The module's broker; after each test it holds what it held before."""
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
