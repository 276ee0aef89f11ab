# SPDX-License-Identifier: Apache-2.0
"""Sessions: how they begin, who may use them, and the ways they end."""

import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import wait_until

from qnnbroker.client import (
    BrokerLost,
    BrokerUnavailable,
    Session,
    SessionClosed,
    VersionMismatch,
    connect,
)
from qnnbroker.native.counters import live_counts
from qnnbroker.protos import attach as frames
from qnnbroker.protos import paths

from .conftest import BrokerProcess, MakeModel, copier, held, running_broker

A = np.ones((2, 3), np.float32)


def test_a_session_tells_who_it_is_attached_to(broker: BrokerProcess, session: Session) -> None:
    assert session.session_id > 0
    assert session.broker_pid == broker.process.pid == session.server_info().pid
    assert session.broker_version == session.server_info().broker_version
    assert session.limits.max_buffer_bytes > 0
    assert session.statistics().counters["sessions"] == 1


def test_the_directory_comes_from_the_environment(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(paths.RUNTIME_DIR_ENV, str(broker.runtime_dir))
    with connect() as session:
        assert session.broker_pid == broker.process.pid


def test_no_broker_is_an_error_at_once(runtime_dir: Path) -> None:
    with pytest.raises(BrokerUnavailable, match=str(runtime_dir)):
        connect(runtime_dir)


def test_waiting_for_a_broker_that_never_comes_ends(runtime_dir: Path) -> None:
    with pytest.raises(BrokerUnavailable):
        connect(runtime_dir, wait=True, timeout=0.1)


def test_waiting_finds_a_broker_that_comes_later(runtime_dir: Path) -> None:
    found: list[int] = []

    def wait() -> None:
        with connect(runtime_dir, wait=True, timeout=60) as session:
            found.append(session.broker_pid)

    thread = threading.Thread(target=wait)
    thread.start()
    with running_broker(runtime_dir) as started:
        thread.join()
        assert found == [started.process.pid]


def test_waiting_outlasts_a_broker_that_ends_during_the_handshake(runtime_dir: Path) -> None:
    found: list[int] = []

    def wait() -> None:
        with connect(runtime_dir, wait=True, timeout=60) as session:
            found.append(session.broker_pid)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ending:
        ending.bind(str(runtime_dir / paths.ATTACH_SOCKET))
        ending.listen()
        thread = threading.Thread(target=wait)
        thread.start()
        ending.accept()[0].close()
    with running_broker(runtime_dir) as started:
        thread.join()
        assert found == [started.process.pid]


def test_a_broker_of_another_version_is_told_apart(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "PROTOCOL_MIN", 99)
    monkeypatch.setattr(frames, "PROTOCOL_MAX", 99)
    with pytest.raises(VersionMismatch, match="99") as info:
        connect(broker.runtime_dir)
    assert info.value.reason == "PROTOCOL_VERSION"


def test_the_end_of_a_session_is_seen_by_the_broker(broker: BrokerProcess) -> None:
    with connect(broker.runtime_dir) as watcher:
        with connect(broker.runtime_dir) as session:
            session.alloc(10)
            assert held(watcher)["sessions"] == 2
        wait_until(lambda: held(watcher)["sessions"] == 1, "one session is left")
        assert held(watcher)["buffers"] == 0


def test_a_closed_session_refuses_everything_but_close(
    session: Session, make_model: MakeModel
) -> None:
    model = session.load(make_model())
    buffer = session.alloc(1)
    session.close()
    session.close()
    assert session.closed
    for use in (
        session.server_info,
        session.statistics,
        lambda: session.alloc(1),
        lambda: session.load("x"),
        lambda: model.graph.run({"a": A, "b": A}),
        model.graph.bind,
        session.__enter__,
    ):
        with pytest.raises(SessionClosed, match="is closed") as info:
            use()
        assert info.value.reason == "CLOSED"
    model.unload()
    buffer.release()


def test_closing_ends_a_run_in_another_thread(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    binding = session.load(make_model("copies", copier("g"))).graph.bind()
    broker.faults.set("hang=graphExecute:*")
    caught: list[BaseException] = []

    def run() -> None:
        try:
            binding.run()
        except SessionClosed as exc:
            caught.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: held(session)["in_flight"] == 1, "the run is in flight")
    session.close()
    thread.join()  # it hangs to this moment
    assert len(caught) == 1


def test_a_broker_that_dies_is_lost_to_calls_under_way_and_later(
    mortal_broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(mortal_broker.runtime_dir) as session:
        path = make_model("copies", copier("g"))
        graph = session.load(path).graph
        caught: list[BaseException] = []
        binding = graph.bind()
        binding.inputs["x"][:] = 20
        mortal_broker.faults.set("hang=graphExecute:*")

        def run() -> None:
            try:
                binding.run()
            except BrokerLost as exc:
                caught.append(exc)

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: held(session)["in_flight"] == 1, "the run is in flight")
        mortal_broker.kill()
        thread.join()
        assert len(caught) == 1
        for use in (
            session.server_info,
            lambda: session.alloc(1),
            lambda: session.load(path),
            lambda: graph.run({"x": np.zeros(2, np.float32)}),
            graph.bind,
        ):
            with pytest.raises(BrokerLost, match=str(mortal_broker.runtime_dir)):
                use()
        assert binding.inputs["x"][0] == 20
        binding.close()
        graph.model.unload()


def test_a_new_broker_in_the_old_place_is_not_the_one_that_was_lost(
    mortal_broker: BrokerProcess, make_model: MakeModel
) -> None:
    directory = mortal_broker.runtime_dir
    with connect(directory) as session:
        graph = session.load(make_model()).graph
        graph.run({"a": A, "b": A})
        mortal_broker.kill()
        with running_broker(directory) as started:
            with pytest.raises(BrokerLost):
                graph.run({"a": A, "b": A})
            with connect(directory) as fresh:
                assert fresh.broker_pid == started.process.pid
                assert fresh.load(make_model()).graph.run({"a": A, "b": A})["y"].sum() == 12


def test_a_forgotten_session_warns_and_ends(broker: BrokerProcess, make_model: MakeModel) -> None:
    gc.collect()
    regions = live_counts()["regions"]
    with connect(broker.runtime_dir) as watcher:
        forgotten = connect(broker.runtime_dir)
        forgotten.load(make_model()).graph.run({"a": A, "b": A})
        del forgotten  # in a cycle with its models
        with pytest.warns(ResourceWarning, match="never closed: <Session"):
            gc.collect()
        wait_until(lambda: held(watcher)["sessions"] == 1, "the forgotten session is gone")
    gc.collect()
    assert live_counts()["regions"] == regions


def run_child(broker: BrokerProcess, program: str) -> str:
    """Runs Python code in a process of its own; `connect` is imported, `D` is the directory."""
    head = (
        "import os, sys, numpy as np\n"
        "from qnnbroker.client import *\n"
        f"D = {str(broker.runtime_dir)!r}\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + program],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FORKED = """
session = connect(D)
model = session.load({path!r})
ones = np.ones((2, 3), np.float32)
model.graph.run({{"a": ones, "b": ones}})
binding = model.graph.bind()
binding.inputs["a"][:] = 5
buffer = session.alloc(10)
pid = os.fork()
if pid == 0:
    uses = (session.server_info, session.statistics, lambda: session.alloc(1), binding.run,
            lambda: session.load("x"), lambda: model.graph.run({{"a": ones, "b": ones}}),
            model.graph.bind, lambda: buffer.numpy("u1", 1), session.__enter__)
    for use in uses:
        try:
            use()
        except SessionClosed as exc:
            assert exc.reason == "FORKED", exc
            assert str(os.getpid()) in str(exc) and str(os.getppid()) in str(exc), exc
        else:
            raise AssertionError(use)
    binding.close(); model.unload(); buffer.release(); session.close()
    assert binding.inputs["a"].sum() == 30
    with connect(D) as own:
        with own.load({path!r}) as model:
            assert model.graph.run({{"a": ones, "b": ones}})["y"].sum() == 12
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
binding.run()
print(binding.outputs["y"].sum())
session.close()
"""


def test_a_fork_may_not_use_the_session_and_the_parent_goes_on(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    assert run_child(broker, FORKED.format(path=str(make_model()))).strip() == "30.0"


def test_a_child_that_lives_on_does_not_keep_the_parents_session(broker: BrokerProcess) -> None:
    """The child holds a pipe open and waits; the parent has died; the broker sees the end."""
    reader, writer = os.pipe()
    program = f"""
session = connect(D)
if os.fork() == 0:
    os.read({reader}, 1)  # until the test closes its end
    os._exit(0)
os._exit(0)
"""
    head = f"import os\nfrom qnnbroker.client import connect\nD = {str(broker.runtime_dir)!r}\n"
    code = f"os.close({writer})\n"
    with connect(broker.runtime_dir) as watcher:
        subprocess.run(
            [sys.executable, "-c", head + code + program],
            pass_fds=[reader, writer],
            check=True,
            timeout=100,
        )
        wait_until(lambda: held(watcher)["sessions"] == 1, "the parent's session is gone")
    os.close(writer)
    os.close(reader)


def test_a_session_left_open_at_exit_makes_no_noise(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    program = (
        "import warnings; warnings.simplefilter('ignore', ResourceWarning)\n"
        "session = connect(D)\n"
        f"binding = session.load({str(make_model())!r}).graph.bind()\n"
        "array = binding.inputs['a']\n"
    )
    assert run_child(broker, program) == ""


def test_a_process_that_is_killed_leaves_nothing_behind(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    program = (
        "import os, signal\nfrom qnnbroker.client import connect\n"
        f"session = connect({str(broker.runtime_dir)!r})\n"
        f"session.load({str(make_model())!r}).graph.bind()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with connect(broker.runtime_dir) as watcher:
        done = subprocess.run([sys.executable, "-c", program], timeout=100)
        assert done.returncode == -9
        wait_until(lambda: held(watcher)["sessions"] == 1, "the dead session is gone")
        assert held(watcher)["buffers"] == held(watcher)["bindings"] == 0


def test_the_client_imports_neither_onnx_nor_onnxruntime_nor_qnn() -> None:
    program = (
        "import sys, qnnbroker.client\n"
        "print(*sorted({n.partition('.')[0] for n in sys.modules}))\n"
        "print(*sorted(n for n in sys.modules if n.startswith('qnnbroker.')))\n"
        "print(open('/proc/self/maps').read())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    tops, ours, maps = done.stdout.split("\n", 2)
    assert not {"onnx", "onnxruntime", "onnxruntime_qnn", "click", "rich"} & set(tops.split())
    assert not [n for n in ours.split() if n.startswith(("qnnbroker.broker.", "qnnbroker.cli."))]
    assert not [n for n in ours.split() if n.startswith("qnnbroker.native.qnn")]
    assert "libQnn" not in maps
