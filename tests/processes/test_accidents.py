# SPDX-License-Identifier: Apache-2.0
"""What happens to a broker from outside: signals, directories, a stderr that nobody reads."""

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder, numbers
from tests.waiting import PATIENCE_SECONDS, wait_exit, wait_until

from qnnbroker.client import BrokerError, BrokerLost, LimitExceeded, connect
from qnnbroker.protos.paths import ATTACH_SOCKET, GRPC_SOCKET
from qnnbroker.v1 import control_pb2 as pb

CREATE = "contextCreateFromBinary"


# --- the process that tries a binary


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP"])
def test_a_trial_that_somebody_ends_says_nothing_about_the_binary(
    start_broker: StartBroker, make_model: MakeModel, tmp_path: Path, number: str
) -> None:
    verdicts = tmp_path / "verdicts"
    seconds = 2.0 if number == "SIGSTOP" else 60.0
    broker = start_broker(verify="always", verdict_dir=str(verdicts), trial_seconds=seconds)
    broker.accidents_expected = True
    path = make_model()
    broker.set_faults(f"hang={CREATE}:1")
    failure: list[BaseException] = []

    def load() -> None:
        try:
            with connect(broker.runtime_dir) as session:
                session.load(path)
        except BaseException as error:
            failure.append(error)

    loading = threading.Thread(target=load)
    loading.start()
    broker.wait_hanging(1)
    (child,) = trial_of(broker)
    os.kill(child, signal.Signals[number])
    if number == "SIGINT":  # which Python only sees between two calls
        broker.set_faults("unhang")
    loading.join(PATIENCE_SECONDS)
    (error,) = failure
    assert isinstance(error, BrokerError)
    assert error.reason != "BAD_FILE"
    wait_exit(child, "the trial is gone")
    assert not list(verdicts.glob("*"))
    broker.set_faults()
    with connect(broker.runtime_dir) as session, session.load(path) as model:
        a, b = numbers(1)
        assert (model.graph.run({"a": a, "b": b})["y"] == a + b).all()


def trial_of(broker: BrokerProcess) -> list[int]:
    """Processes that the broker started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == broker.pid:
                found.append(int(stat.parent.name))
    return found


# --- files without end


def test_loads_of_files_without_end_that_nobody_waits_for_keep_nobody_waiting(
    start_broker: StartBroker, make_model: MakeModel, tmp_path: Path
) -> None:
    broker = start_broker(load_threads=1)
    broker.accidents_expected = True
    before = broker.gauges()
    calls = []
    for n in range(3):
        huge = tmp_path / f"huge{n}.bin"
        huge.touch()
        os.truncate(huge, 1 << 42)
        call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(huge)))
        calls.append(call)
        if n == 0:  # it has the one thread from now on
            assert next(iter(call)).stage == pb.LOAD_STAGE_HASHING
    for call in calls:
        call.cancel()
    with connect(broker.runtime_dir) as session, session.load(make_model()) as model:
        assert model.graphs
    broker.wait_gauges(before)
    assert broker.stop() == 0


# --- the runtime directory


def test_a_broker_that_stops_leaves_the_sockets_of_the_next_one_in_a_new_directory(
    start_broker: StartBroker, runtime_dir: Path, make_model: MakeModel
) -> None:
    old = start_broker()
    aside = runtime_dir.with_name(runtime_dir.name + "-aside")
    runtime_dir.rename(aside)
    runtime_dir.mkdir(mode=0o700)
    new = start_broker()
    assert old.stop() == 0
    for name in (ATTACH_SOCKET, GRPC_SOCKET):
        assert (runtime_dir / name).is_socket()
    with connect(runtime_dir) as session, session.load(make_model()) as model:
        assert model.graphs
    assert new.stop() == 0
    for path in aside.iterdir():
        path.unlink()
    aside.rmdir()


# --- clients that outlive their broker, or never say goodbye


def test_a_session_never_talks_to_the_next_broker_of_its_directory(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker()
    with connect(broker.runtime_dir) as session:
        session.load(make_model())
        broker.kill()
        start_broker()
        for call in (session.statistics, session.server_info, lambda: session.load(make_model())):
            with pytest.raises(BrokerLost):
                call()


@pytest.mark.parametrize("rest_seconds", [0.0, 0.01, 600.0])
@pytest.mark.parametrize("last", ["session.statistics()", "binding.run()", "raise SystemExit(0)"])
def test_a_program_that_closes_nothing_ends(
    broker: BrokerProcess, make_model: MakeModel, rest_seconds: float, last: str
) -> None:
    program = (
        "import sys\n"
        "from qnnbroker.client import channel, connect\n"
        f"channel.REST_SECONDS = {rest_seconds}\n"
        "session = connect(sys.argv[1])\n"
        "binding = session.load(sys.argv[2]).graph.bind()\n"
        "session.statistics()\n"
        f"{last}\n"
    )
    before = broker.gauges()
    model = make_model("adder", adder())
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program, str(broker.runtime_dir), str(model)],
            timeout=60,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
    broker.wait_gauges(before)


# --- its log


def test_a_stderr_that_nobody_reads_stops_nothing(runtime_dir: Path, make_model: MakeModel) -> None:
    reader, writer = os.pipe()
    config = {
        "runtime_dir": str(runtime_dir),
        "backend": "fake",
        "log_level": "debug",
        "ready_fd": writer,
    }
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "qnnbroker.broker", json.dumps(config)],
        stderr=subprocess.PIPE,
        pass_fds=[writer],
    ) as process:
        try:
            assert process.stderr is not None
            fcntl.fcntl(process.stderr.fileno(), fcntl.F_SETPIPE_SZ, 4096)
            os.close(writer)
            with open(reader, "rb") as ready:
                assert ready.read() == b"ready\n"
            model = make_model()
            for _ in range(100):  # each says something: many times what the pipe holds
                with connect(runtime_dir) as session:
                    assert session.load(model).graphs
            started = time.monotonic()
            process.terminate()
            wait_until(lambda: process.poll() is not None, "it ends", PATIENCE_SECONDS)
            assert process.returncode == 0
            assert time.monotonic() - started < PATIENCE_SECONDS
        finally:
            process.kill()


# --- file descriptors


def test_a_broker_without_file_descriptors_says_so_and_goes_on(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker()
    broker.accidents_expected = True
    model = make_model()
    with connect(broker.runtime_dir) as session:
        session.load(model).unload()
        soft, hard = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
        # Those that it has stay; there is no next one.
        highest = max(int(name) for name in os.listdir(f"/proc/{broker.pid}/fd"))
        fill = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(64)]
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
        for one in fill:  # takes the numbers below that are free
            one.setblocking(False)
            with contextlib.suppress(OSError):
                one.connect(str(broker.attach_path))
        with pytest.raises(LimitExceeded):
            session.load(model)
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (soft, hard))
        for one in fill:
            one.close()
        with session.load(model) as again:  # the session is still there
            a, b = numbers(1)
            assert (again.graph.run({"a": a, "b": b})["y"] == a + b).all()
