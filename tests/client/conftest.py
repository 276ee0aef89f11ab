# SPDX-License-Identifier: Apache-2.0
"""Real broker processes over the fake QNN library, sessions of them, and models to load."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.waiting import wait_until

from qnnbroker.client import Binding, Session, connect
from qnnbroker.client.control import Control
from qnnbroker.native.fake import (
    SWITCHES_ENV,
    FakeControl,
    FakeGraph,
    FakeTensor,
    switches,
    write_binary,
)
from qnnbroker.protos import paths


@dataclass
class BrokerProcess:
    """A broker in a process of its own. `faults` changes what its QNN library does."""

    runtime_dir: Path
    process: subprocess.Popen[bytes]
    faults: FakeControl

    def kill(self) -> None:
        """The way a crash ends it."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_broker(runtime_dir: Path, *words: str) -> Iterator[BrokerProcess]:
    """Starts a broker, waits until it is ready, kills it in the end. `words`: of the fake."""
    faults = FakeControl(runtime_dir / "faults")
    reader, writer = os.pipe()
    config = {
        "runtime_dir": str(runtime_dir),
        "backend": "fake",
        "log_level": "error",
        "max_buffer_bytes": 1 << 24,
        "ready_fd": writer,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "qnnbroker.broker", json.dumps(config)],
        env=os.environ | {SWITCHES_ENV: switches(*words, control=str(faults.path))},
        pass_fds=[writer],
    )
    os.close(writer)
    with process, open(reader, "rb") as ready:
        try:
            assert ready.read() == b"ready\n"
            yield BrokerProcess(runtime_dir, process, faults)
        finally:
            process.kill()


@contextmanager
def short_directory() -> Iterator[Path]:
    """Private, and short enough for socket paths, which `tmp_path` is not always."""
    with tempfile.TemporaryDirectory(prefix="qb") as name:
        yield Path(name)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A runtime directory without a broker."""
    with short_directory() as directory:
        yield directory


@pytest.fixture(scope="module", params=["raw", "registered"])
def shared_broker(request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    """Everything is the same whether tensors are used by address or by memory handle."""
    words = ["mem_register=on"] if request.param == "registered" else []
    with short_directory() as directory, running_broker(directory, *words) as running:
        yield running


@pytest.fixture
def broker(shared_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """A broker that holds nothing before the test, and must hold nothing after it."""
    yield shared_broker
    shared_broker.faults.set("unhang")
    control = Control(str(shared_broker.runtime_dir / paths.GRPC_SOCKET))
    nouns = [*"sessions sessions_closing buffers bindings models in_flight".split()]
    nouns += ["registrations", "native_registrations"]

    def nothing() -> bool:
        counters = control.statistics(30).counters
        return not any(counters[noun] for noun in nouns)

    wait_until(nothing, "the broker has taken everything back")
    control.close()


@pytest.fixture
def mortal_broker(runtime_dir: Path) -> Iterator[BrokerProcess]:
    """A broker for one test, which may kill it."""
    with running_broker(runtime_dir) as running:
        yield running


@pytest.fixture
def session(broker: BrokerProcess) -> Iterator[Session]:
    with connect(broker.runtime_dir) as made:
        yield made


MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a context binary of the given graphs. Default: "add", y = a + b, float32[2, 3]."""

    def make(name: str = "adder", *graphs: FakeGraph) -> Path:
        a, b, y = (FakeTensor(n, "float32", (2, 3)) for n in "aby")
        adder = FakeGraph("add", (a, b), (y,), ops=("add",))
        return write_binary(tmp_path / f"{name}.bin", graphs or [adder])

    return make


def copier(name: str, dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> FakeGraph:
    """A graph: y = x."""
    x, y = FakeTensor("x", dtype, shape), FakeTensor("y", dtype, shape)
    return FakeGraph(name, (x,), (y,), ops=("copy",))


def held(session: Session) -> dict[str, int]:
    """What all sessions of the broker hold: counts of sessions, buffers, bindings, models, ..."""
    return dict(session.statistics().counters)


#: Makes every execute of the graph "g" hang.
HANG = "hang=graphExecute@g:*"


def named(name: str) -> FakeGraph:
    return copier(name)


@pytest.fixture
def bindings(session: Session, make_model: MakeModel) -> Iterator[list[Binding]]:
    """Of the graph "g", which tests may make hang, and of "other"."""
    model = session.load(make_model("copies", named("g"), named("other")))
    made = [model.graphs[name].bind() for name in ("g", "other")]
    yield made
    for binding in made:
        binding.close()
