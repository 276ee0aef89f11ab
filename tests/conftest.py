# SPDX-License-Identifier: Apache-2.0
"""What all tests share: a deadline, private runtime directories, real brokers, leak checks."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.broker_process import BrokerProcess, all_stopped, spawn_broker
from tests.fake_models import MakeModel, model_maker
from tests.waiting import SLOW_TEST_SECONDS, TEST_SECONDS, deadline

from qnnbroker.native.counters import live_counts

StartBroker = Callable[..., BrokerProcess]

_dump_to = pytest.StashKey[int]()
_exit_status = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # While output is not captured: where a stuck test's stacks go.
    config.stash[_dump_to] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2)
    # A shell that starts us in the background has SIGINT ignored, which our children would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves without the QNN library's teardown, which races with `exit`; as the broker does."""
    os.close(config.stash[_dump_to])
    if live_counts()["libraries"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(_exit_status, pytest.ExitCode.INTERNAL_ERROR))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A failure never hangs."""
    seconds = SLOW_TEST_SECONDS if item.get_closest_marker("slow") else TEST_SECONDS
    with deadline(seconds, item.name, item.config.stash[_dump_to]):
        return (yield)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Private, and short enough for socket paths, which `tmp_path` is not always."""
    with tempfile.TemporaryDirectory(prefix="qb") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def memory_words() -> tuple[str, ...]:
    """Switches of the fake for every broker of a module; see `tests.memory_kinds`."""
    return ()


@pytest.fixture
def start_broker(
    runtime_dir: Path, tmp_path: Path, memory_words: tuple[str, ...]
) -> Iterator[StartBroker]:
    """Starts brokers, on `runtime_dir` unless told otherwise; see `spawn_broker`."""
    started: list[BrokerProcess] = []

    def start(
        directory: Path = runtime_dir, switch_words: Sequence[str] = (), **options: Any
    ) -> BrokerProcess:
        words = (*memory_words, *switch_words)
        started.append(spawn_broker(directory, tmp_path, switch_words=words, **options))
        return started[-1]

    with all_stopped(started):
        yield start


@pytest.fixture
def broker(start_broker: StartBroker) -> BrokerProcess:
    """A broker of this test alone."""
    return start_broker()


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes context binaries for the fake."""
    return model_maker(tmp_path)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """This process has no more fds, mappings of shared memory and native objects than before."""
    gc.collect()
    before = _held()
    yield
    gc.collect()
    assert _held() - before == Counter()  # less is fine: what came before may only end meanwhile


def _held() -> Counter[str]:
    with open("/proc/self/maps") as f:
        mappings = sum("/memfd:" in line for line in f)
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    # A QNN library is loaded once and never unloaded; pytest holds a test's own graphs until later.
    counts = {k: v for k, v in live_counts().items() if k not in ("libraries", "graphs")}
    return Counter(fds) + Counter({"mappings": mappings, **counts})
