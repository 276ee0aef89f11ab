# SPDX-License-Identifier: Apache-2.0
"""Clients that give up at any moment of a load, an unload or a replacement leave no fd open.

Each of some threads does one thing after the other, chosen by its seed: loads that are cancelled,
or whose client is gone, by path and by descriptor, of files that somebody has open for writing;
models without a session that take each other's names; buffers whose answer nobody reads; trials.
"""

import contextlib
import json
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import SHAPE, MakeModel, adder
from tests.native.qnn_models import compiled
from tests.processes.test_handing_over import sha256
from tests.raw_peer import RawPeer
from tests.stress import scaled
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.protos.attach import Kind, pack
from qnnbroker.v1 import attach_pb2, control_pb2_grpc
from qnnbroker.v1 import control_pb2 as pb

THREADS = 4
#: What takes a while to hash and to copy.
LARGE_BYTES = 24 << 20
NAMES = ("first", "second")


class Client:
    """One thread that behaves badly, over and over."""

    def __init__(
        self, broker: BrokerProcess, models: Sequence[Path], seed: int, longest: float
    ) -> None:
        self.random = random.Random(seed)
        self.models = models
        self.verdicts = verdicts_of(models)
        self.longest = longest
        self.path = broker.attach_path
        self.target = f"unix:{broker.grpc_path}"

    def step(self) -> None:
        """One thing, and its end before its time or after it."""
        chosen = self.random.choice(
            [self.load] * 4 + [self.hand] * 4 + [self.replace] * 2 + [self.hold, self.try_anew]
        )
        with grpc.insecure_channel(
            self.target, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            with contextlib.suppress(grpc.RpcError):
                chosen(stub)

    def moment(self) -> None:
        """Any time between none and `longest`, mostly short."""
        threading.Event().wait(self.longest * self.random.random() ** 2)

    def model(self) -> Path:
        return self.random.choice(self.models)

    def give_up(self, call: Any, peer: RawPeer | None = None) -> None:
        """Ends a load after a moment, if it is not over then, in one of the ways."""
        way = self.random.randrange(4)
        if way == 0:
            list(call)
            return
        self.moment()
        if way == 1 and peer is not None:
            peer.close()
            self.moment()
        call.cancel()  # or the channel is closed with the call under way

    def load(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        with RawPeer(self.path, stub) as peer:
            request = pb.LoadModelRequest(path=str(self.model()))
            self.give_up(stub.LoadModel(request, metadata=peer.metadata), peer)

    def hand(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        path = self.model()
        with RawPeer(self.path, stub) as peer:
            beside: dict[str, Path] = {str(path): path}
            wanted, file_id = [(str(path), False)], 0
            while wanted:
                name, optional = wanted.pop()
                source = beside.get(name, path.parent / name)
                fds = [] if optional and not source.exists() else [os.open(source, os.O_RDONLY)]
                body = attach_pb2.LoadFdRequest(file_id=file_id, path=name)
                peer.send(pack(Kind.LOADFD, 1, body.SerializeToString()), fds)
                for fd in fds:
                    os.close(fd)
                if self.random.random() < 0.2:
                    return
                frame = peer.receive()
                assert frame is not None
                answer = attach_pb2.LoadFdResponse.FromString(frame.body)
                file_id, wanted = answer.file_id, [(w.name, w.optional) for w in answer.wanted]
            request = pb.LoadModelRequest(path=str(path), file_id=file_id)
            self.give_up(stub.LoadModel(request, metadata=peer.metadata), peer)

    def replace(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        name = self.random.choice(NAMES)
        request = pb.LoadModelRequest(
            path=str(self.model()), name=name, replace=True, keep_alive_seconds=-1
        )
        self.give_up(stub.LoadModel(request))
        if self.random.random() < 0.5:
            stub.UnloadModel(pb.UnloadModelRequest(name=name), timeout=PATIENCE_SECONDS)

    def hold(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        """A load while somebody has the file open for writing: no lease is to be had."""
        with open(self.model(), "r+b"):
            self.load(stub)

    def try_anew(self, stub: control_pb2_grpc.ControlServiceStub) -> None:
        """What was found out about all binaries is forgotten; buffers on the way."""
        for verdict in self.verdicts.glob("*"):
            verdict.unlink(missing_ok=True)
        with RawPeer(self.path, stub) as peer:
            body = attach_pb2.AllocRequest(size_bytes=self.random.randrange(1, 1 << 23))
            peer.send(pack(Kind.ALLOC, 1, body.SerializeToString()))
            self.moment()


def settled(broker: BrokerProcess) -> bool:
    """Nothing of anybody is left, nor on its way."""
    counters = broker.counters()
    return not any(
        counters[name]
        for name in ("sessions", "models", "contexts", "contexts_closing", "buffers", "bindings")
    )


def verdicts_of(models: Sequence[Path]) -> Path:
    """Where the broker keeps what it finds out about them."""
    return models[0].with_name("verdicts")


def give_up_often(
    broker: BrokerProcess, models: Sequence[Path], *, seed: int, steps: int, longest: float
) -> None:
    """The threads, and then a broker that holds what it held before."""
    clients = [Client(broker, models, seed * THREADS + n, longest) for n in range(THREADS)]
    for path in models:  # what is made once and kept is there afterwards
        list(broker.stub.LoadModel(pb.LoadModelRequest(path=str(path), name="warm", replace=True)))
    broker.stub.UnloadModel(pb.UnloadModelRequest(name="warm"))
    wait_until(lambda: settled(broker), "nothing is left of warming up")
    before = broker.fds()
    wrong: list[BaseException] = []

    def work(client: Client) -> None:
        try:
            for _ in range(steps):
                client.step()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for name in NAMES:
        with contextlib.suppress(grpc.RpcError):
            broker.stub.UnloadModel(pb.UnloadModelRequest(name=name), timeout=PATIENCE_SECONDS)
    wait_until(lambda: settled(broker), "nothing is left of the clients")
    last: list[str] = []

    def back() -> bool:
        last[:] = broker.fds()
        return last == before

    try:
        wait_until(back, "the fds are those from before")
    except BaseException:
        print("seed", seed, "more:", *(set(last) - set(before)), "now:", *last, sep="\n")
        raise


@pytest.fixture
def fake_models(make_model: MakeModel) -> list[Path]:
    """Two small ones, a large one, and a wrapper with its binary inside and a manifest."""
    models = [make_model(name, adder(name), create_us=20_000) for name in ("one", "two")]
    models.append(make_model("large", adder("large"), file_bytes=LARGE_BYTES))
    inside = make_model("inside", adder("inside"), file_bytes=LARGE_BYTES)
    tensors = [Tensor(name, "float32", SHAPE) for name in ("a", "b", "y")]
    wrapper = inside.with_name("wrapper.onnx")
    place = Place(inside.read_bytes())
    wrapper.write_bytes(wrapper_bytes("inside", tensors[:2], tensors[2:], place, "v2"))
    manifest = {
        "format": 1,
        "wrapper": {"name": wrapper.name, "sha256": sha256(wrapper)},
        "binary": {"name": "", "sha256": sha256(inside)},
    }
    wrapper.with_suffix(".manifest.json").write_text(json.dumps(manifest))
    return [*models, wrapper]


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(scaled(2, 20)))
@pytest.mark.parametrize("words", [(), ("file_mapped=on",)])
def test_what_was_opened_for_clients_that_gave_up_is_closed(
    start_broker: StartBroker, fake_models: list[Path], seed: int, words: tuple[str, ...]
) -> None:
    kept = str(verdicts_of(fake_models))
    broker = start_broker(switch_words=words, verify="always", verdict_dir=kept)
    give_up_often(broker, fake_models, seed=seed, steps=25, longest=0.15)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.qnn
def test_so_it_is_with_the_real_library(start_broker: StartBroker, tmp_path: Path) -> None:
    models = []
    for name in ("conv_u8", "conv_soc_43"):
        models.append(tmp_path / f"{name}.bin")
        models[-1].write_bytes(compiled(name).binary)
    broker = start_broker(backend="qnn", verdict_dir=str(verdicts_of(models)))
    give_up_often(broker, models, seed=scaled(3, 4), steps=scaled(6, 60), longest=0.6)
