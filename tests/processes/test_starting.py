# SPDX-License-Identifier: Apache-2.0
"""How a broker starts, or says why not."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel
from tests.raw_peer import RawAttach
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.broker.config import BrokerConfig
from qnnbroker.client import BrokerUnavailable, connect
from qnnbroker.protos.paths import LOCK_FILE


def run_broker(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A broker that is not expected to start."""
    return subprocess.run(
        [sys.executable, "-m", "qnnbroker.broker", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


def test_the_sockets_are_ours_alone(broker: BrokerProcess) -> None:
    assert names(broker.runtime_dir) == {"attach.sock", "grpc.sock", LOCK_FILE}
    for path in (broker.attach_path, broker.grpc_path):
        info = path.lstat()
        assert stat.S_ISSOCK(info.st_mode)
        assert info.st_mode & 0o077 == 0
    assert f"{broker.pid}" in (broker.runtime_dir / LOCK_FILE).read_text()


def test_a_second_broker_is_refused_and_disturbs_nobody(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(broker.runtime_dir) as session, session.load(make_model()) as model:
        config = BrokerConfig(runtime_dir=str(broker.runtime_dir), backend="fake")
        second = run_broker(config.to_json())
        assert second.returncode == 1
        assert second.stdout == ""
        assert len(second.stderr.splitlines()) == 1
        assert f"pid {broker.pid}" in second.stderr
        assert str(broker.runtime_dir) in second.stderr
        model.graph.bind().run()
    with connect(broker.runtime_dir) as session:
        assert session.broker_pid == broker.pid


def test_two_at_once_on_one_directory_are_one(start_broker: StartBroker) -> None:
    both = [start_broker(wait_ready=False) for _ in range(2)]
    wait_until(lambda: any(b.process.poll() is not None for b in both), "one of them gives up")
    loser, winner = sorted(both, key=lambda b: b.process.poll() is None)
    assert loser.wait_exit() == 1
    assert "already running" in loser.log()
    with connect(winner.runtime_dir, wait=True) as session:
        assert session.broker_pid == winner.pid


def test_what_a_killed_broker_left_is_replaced(start_broker: StartBroker) -> None:
    first = start_broker()
    first.kill()
    assert first.attach_path.exists()
    with pytest.raises(BrokerUnavailable):
        connect(first.runtime_dir)
    second = start_broker()
    with connect(second.runtime_dir) as session:
        assert session.broker_pid == second.pid
        assert session.server_info().pid == second.pid
    assert names(second.runtime_dir) == {"attach.sock", "grpc.sock", LOCK_FILE}
    assert second.stop() == 0
    assert names(second.runtime_dir) == {LOCK_FILE}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "usage"),
        (["{}", "{}"], 2, "usage"),
        (["nonsense"], 2, "not JSON"),
        (["[]"], 2, "JSON object"),
        (['{"max_buffers": 0}'], 2, "max_buffers"),
        (['{"nonsense": 0}'], 2, "nonsense"),
        (['{"backend": "qnn", "qnn_lib_dir": "/nowhere"}'], 1, "/nowhere"),
        (['{"backend": "fake", "attach_fd": 2}'], 1, "fd 2"),
        (['{"backend": "fake", "attach_fd": 999}'], 1, "fd 999"),
    ],
)
def test_a_broker_that_cannot_start_says_why_in_one_line(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, says: str
) -> None:
    monkeypatch.setenv("QNNBROKER_RUNTIME_DIR", str(runtime_dir))
    done = run_broker(*arguments)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = [x for x in done.stderr.splitlines() if " INFO " not in x]
    assert len(lines) == 1
    assert says in lines[0]
    assert names(runtime_dir) <= {LOCK_FILE}


def a_file(directory: Path) -> Path:
    path = directory / "f"
    path.touch()
    return path


def below_a_file(directory: Path) -> Path:
    return a_file(directory) / "r"


def open_to_all(directory: Path) -> Path:
    (directory / "open").mkdir()
    (directory / "open").chmod(0o777)
    return directory / "open"


def too_long(directory: Path) -> Path:
    return directory / ("x" * 100)


def with_a_lock_that_is_a_directory(directory: Path) -> Path:
    (directory / LOCK_FILE).mkdir()
    return directory


@pytest.mark.parametrize(
    "make", [a_file, below_a_file, open_to_all, too_long, with_a_lock_that_is_a_directory]
)
def test_an_unfit_runtime_directory_is_refused_in_one_line(
    runtime_dir: Path, make: Callable[[Path], Path]
) -> None:
    directory = make(runtime_dir)
    done = run_broker(BrokerConfig(runtime_dir=str(directory), backend="fake").to_json())
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_library_that_does_not_start_ends_the_broker(start_broker: StartBroker) -> None:
    broker = start_broker(switch_words=["fail=deviceCreate:1:14002"], wait_ready=False)
    assert broker.wait_exit() == 1
    assert "cannot start" in broker.log()
    assert "14002" in broker.log()
    assert names(broker.runtime_dir) == {LOCK_FILE}


def test_clients_that_come_while_the_library_starts_are_served(start_broker: StartBroker) -> None:
    """The attach socket is there first; who comes early waits in its queue."""
    broker = start_broker(switch_words=["delay=deviceCreate:1:400000"], wait_ready=False)
    wait_until(broker.attach_path.exists, "the attach socket is there")
    assert not broker.grpc_path.exists()
    with connect(broker.runtime_dir) as session:
        assert session.server_info().pid == broker.pid


def test_an_inherited_listener_is_served_and_left_to_its_owner(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    with tempfile.TemporaryDirectory(prefix="qb") as name:
        path = Path(name) / "attach.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            early = RawAttach(path)
            pids = []
            for _ in range(2):  # one broker after the other on the same listener
                broker = start_broker(
                    Path(name), attach_fd=listener.fileno(), pass_fds=[listener.fileno()]
                )
                pids.append(broker.pid)
                if len(pids) == 1:
                    assert early.hello().broker_pid == broker.pid
                with connect(name) as session, session.load(make_model()) as model:
                    assert session.broker_pid == broker.pid
                    model.graph.bind().run()
                assert broker.stop() == 0
                assert path.exists()
            early.close()
            waiting = RawAttach(path)  # the queue is still there without any broker
            waiting.close()


@pytest.mark.parametrize("family", ["stream", "not listening", "a file"])
def test_an_inherited_fd_that_is_no_attach_listener_is_refused(
    runtime_dir: Path, family: str
) -> None:
    kind = socket.SOCK_STREAM if family == "stream" else socket.SOCK_SEQPACKET
    with socket.socket(socket.AF_UNIX, kind) as sock, tempfile.TemporaryFile() as file:
        fd = file.fileno() if family == "a file" else sock.fileno()
        if family == "stream":
            sock.bind(str(runtime_dir / "x"))
            sock.listen()
        config = BrokerConfig(runtime_dir=str(runtime_dir), backend="fake", attach_fd=fd)
        done = subprocess.run(
            [sys.executable, "-m", "qnnbroker.broker", config.to_json()],
            capture_output=True,
            text=True,
            pass_fds=[fd],
            timeout=PATIENCE_SECONDS,
        )
    assert done.returncode == 1
    assert f"fd {fd}" in done.stderr
    assert "Traceback" not in done.stderr


def test_nobody_at_the_other_end_of_ready_is_no_reason_to_die(runtime_dir: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    config = BrokerConfig(runtime_dir=str(runtime_dir), backend="fake", ready_fd=write)
    with subprocess.Popen(
        [sys.executable, "-m", "qnnbroker.broker", config.to_json()],
        pass_fds=[write],
        stderr=subprocess.PIPE,
    ) as process:
        os.close(write)
        with connect(runtime_dir, wait=True) as session:
            assert session.broker_pid == process.pid
        process.terminate()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        assert process.wait() == 0
