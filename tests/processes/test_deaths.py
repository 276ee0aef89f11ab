# SPDX-License-Identifier: Apache-2.0
"""Clients that die: the others get their right results, and the broker gets everything back."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import TENSOR_BYTES, MakeModel, adder
from tests.memory_kinds import memory_words as memory_words
from tests.raw_peer import RawPeer
from tests.waiting import PATIENCE_SECONDS, wait_exit, wait_readable, wait_until

from qnnbroker.client import connect
from qnnbroker.v1 import control_pb2 as pb

CLIENT = Path(__file__).parents[1] / "client_process.py"


@pytest.fixture
def broker(shared_broker: BrokerProcess) -> BrokerProcess:
    return shared_broker


class Client:
    """One client process."""

    def __init__(self, broker: BrokerProcess, model: Path, seed: int, count: int) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(CLIENT),
                str(broker.runtime_dir),
                str(model),
                str(seed),
                str(count),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait_running(self) -> None:
        assert self.process.stdout is not None
        wait_readable(self.process.stdout.fileno(), "the client runs", 60)
        assert self.process.stdout.readline() == b"running\n"

    def finish(self) -> int:
        """Lets it end; how many runs it has done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        last = self.process.stdout.read().split()
        assert self.process.wait(PATIENCE_SECONDS) == 0, last
        assert last[0] == b"done"
        return int(last[1])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@contextlib.contextmanager
def clients(broker: BrokerProcess, model: Path, count: int) -> Iterator[list[Client]]:
    made = [Client(broker, model, seed, 0) for seed in range(count)]
    try:
        yield made
    finally:
        for client in made:
            client.close()


def test_ten_clients_share_one_context_and_four_are_killed_in_mid_run(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    model = make_model("adder", adder(execute_us=200))
    before = broker.gauges()
    with clients(broker, model, 10) as crowd:
        for client in crowd:
            client.wait_running()
        counters = broker.counters()
        assert counters["contexts"] == 1
        assert counters["loads_total"] == 1
        assert counters["sessions"] == 10
        for client in crowd[:4]:
            client.process.kill()
        broker.wait_counters(sessions=6, sessions_closing=0, bindings=6, buffers=6)
        runs = [client.finish() for client in crowd[4:]]
    assert min(runs) >= 1
    broker.wait_gauges(before)


def test_clients_that_die_at_any_time_leave_nothing(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    """Killed before, during and after the handshake, the load, the binding, the runs."""
    model = make_model("adder", adder(execute_us=100))
    before = broker.gauges()
    with RawPeer(broker.attach_path, broker.stub) as bystander:
        graph = bystander.load(model).model.graphs[0]
        buffer, memory = bystander.alloc(4096)
        places = [(n, buffer, i * TENSOR_BYTES, TENSOR_BYTES) for i, n in enumerate("aby")]
        binding = bystander.bind(graph.graph_id, places[:2], places[2:])
        for moment in range(8):
            read, write = os.pipe()
            child = os.fork()
            if not child:  # only system calls and our own frames from here on: no gRPC in a fork
                code = 9
                with contextlib.suppress(BaseException):
                    os.close(read)
                    act(moment, broker, str(model))
                    os.write(write, b"x")
                    signal.pause()
                os._exit(code)
            os.close(write)
            wait_readable(read, f"the child did step {moment}")
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            bystander.execute(binding)
        memory.close()
    broker.wait_gauges(before)


def act(moment: int, broker: BrokerProcess, model: str) -> None:
    """What a child does before it is killed."""
    from tests.raw_peer import RawAttach

    raw = RawAttach(broker.attach_path)
    keep.append(raw)
    if moment >= 1:
        raw.hello()
    for _ in range(max(0, moment - 1)):
        keep.append(raw.alloc(65536))


keep: list[object] = []


def test_a_client_killed_while_its_execute_runs_is_gone_when_that_ends(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    model = make_model("adder", adder("slow"))
    quick = make_model("quick")
    before = broker.gauges()
    broker.set_faults("hang=graphExecute@slow:*")
    with clients(broker, model, 1) as (victim,):
        broker.wait_hanging(1)
        victim.process.kill()
        victim.process.wait()
        broker.wait_counters(sessions=0, sessions_closing=1, buffers=0, bindings=0)
        held = broker.counters()
        assert held["contexts"] == 1  # the library still works with it
        assert held["mappings"] >= 1
        broker.set_faults("unhang")
        broker.wait_gauges(before)
    with connect(broker.runtime_dir) as session, session.load(quick) as loaded:
        assert list(loaded.graph.inputs) == ["a", "b"]
    broker.wait_gauges(before)


def test_a_session_ends_with_its_process_though_a_child_holds_the_socket(
    broker: BrokerProcess,
) -> None:
    """The connection stays open in the child; the broker sees by the pidfd that the owner died."""
    before = broker.gauges()
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from tests.raw_peer import RawAttach\n"
        "raw = RawAttach(Path(sys.argv[1]))\nraw.hello()\nraw.alloc(4096)\n"
        "child = os.fork()\n"
        "if child == 0:\n    signal.pause()\n"
        "print(child, flush=True)\nsys.stdin.read()\nos._exit(0)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(broker.attach_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=CLIENT.parents[1],
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert broker.counters()["buffers"] == 1
            parent.stdin.close()
            assert parent.wait(PATIENCE_SECONDS) == 0
            broker.wait_counters(sessions=0, buffers=0)
            os.kill(child, 0)  # still there, with the socket
            broker.wait_gauges(before)
        finally:
            os.kill(child, signal.SIGKILL)
            wait_exit(child, "the child is killed")
    assert "the process is gone" in broker.log()


def test_the_fork_of_a_client_does_not_keep_its_session(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    """The client package closes the connection in the child, so a closed session ends at once."""
    before = broker.gauges()
    session = connect(broker.runtime_dir)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    session.close()
    broker.wait_gauges(before)
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0


def test_a_cancelled_call_frees_its_place_in_the_queue(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(max_in_flight=2)
    model = make_model("adder", adder("slow"))
    broker.set_faults("hang=graphExecute@slow:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        graph = peer.load(model).model.graphs[0]
        buffer, memory = peer.alloc(4096)
        places = [(n, buffer, i * TENSOR_BYTES, TENSOR_BYTES) for i, n in enumerate("aby")]
        binding = peer.bind(graph.graph_id, places[:2], places[2:])
        request = pb.ExecuteRequest(binding_id=binding)
        running = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        queued = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_counters(in_flight=2)
        assert peer.refused_call("Execute", request).reason == "CREDITS"
        assert queued.cancel()
        broker.wait_counters(in_flight=1)
        assert (
            peer.refused_call_status("Execute", request, 0.05) == grpc.StatusCode.DEADLINE_EXCEEDED
        )
        broker.wait_counters(in_flight=1)
        broker.set_faults("unhang")
        assert running.result(PATIENCE_SECONDS).timing.execute_ns > 0
        peer.execute(binding)
        memory.close()


@pytest.mark.parametrize("how", ["close", "kill the socket"])
def test_queued_executes_of_an_ended_session_do_not_run(
    broker: BrokerProcess, make_model: MakeModel, how: str
) -> None:
    model = make_model("adder", adder("slow"), adder("other"))
    broker.set_faults("hang=graphExecute@slow:1")
    with (
        RawPeer(broker.attach_path, broker.stub) as staying,
        RawPeer(broker.attach_path, broker.stub) as going,
    ):
        futures = []
        for peer, name in [(staying, "slow"), (going, "other")]:
            graphs = {g.name: g.graph_id for g in peer.load(model).model.graphs}
            buffer, memory = peer.alloc(4096)
            memory.close()
            places = [(n, buffer, i * TENSOR_BYTES, TENSOR_BYTES) for i, n in enumerate("aby")]
            binding = peer.bind(graphs[name], places[:2], places[2:])
            request = pb.ExecuteRequest(binding_id=binding)
            futures.append(broker.stub.Execute.future(request, metadata=peer.metadata))
            if peer is staying:
                broker.wait_hanging(1)
        broker.wait_counters(in_flight=2)
        going.close() if how == "close" else going.sock.shutdown(2)
        error = futures[1].exception(PATIENCE_SECONDS)
        assert isinstance(error, grpc.Call)
        assert error.code() == grpc.StatusCode.CANCELLED
        broker.set_faults("unhang")
        assert futures[0].result(PATIENCE_SECONDS).timing.execute_ns > 0
    wait_until(lambda: broker.counters()["contexts"] == 0, "the context is freed")
    assert [c.arguments["name"] for c in broker.calls("graphExecute")] == ["slow"]


def test_sessions_of_many_threads_come_and_go(broker: BrokerProcess, make_model: MakeModel) -> None:
    model = make_model()
    before = broker.gauges()
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                with connect(broker.runtime_dir) as session, session.load(model) as loaded:
                    loaded.graph.bind().run()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    broker.wait_gauges(before)
