# SPDX-License-Identifier: Apache-2.0
"""Files that others change, replace or truncate while they are loaded, and afterwards."""

import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder
from tests.native.qnn_models import compiled
from tests.processes.test_handing_over import TENSORS, Attach, hand, handed, read_only
from tests.processes.test_loading import CREATE, infer, load
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.cli.wrapper_writing import Place, wrapper_bytes
from qnnbroker.client import BrokerError, LoadProgress, LoadStage, connect
from qnnbroker.v1 import control_pb2 as pb


def rename_over(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    path.with_name("new").rename(path)


def write_into(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b" ")


def truncate(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("change", [rename_over, write_into, truncate])
@pytest.mark.parametrize("when", [CREATE, "systemContextGetBinaryInfo"])
def test_a_file_that_is_changed_while_it_is_loaded_is_loaded_as_it_was(
    broker: BrokerProcess, make_model: MakeModel, change: Callable[[Path], None], when: str
) -> None:
    path = make_model()
    content = path.read_bytes()
    before = broker.gauges()
    broker.set_faults(f"hang={when}:1")
    call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_hanging(1)
    # Who opens it for writing is held back by the broker's lease, so it takes a thread.
    writer = threading.Thread(target=change, args=(path,))
    writer.start()
    broker.set_faults("unhang")
    model = list(call)[-1].model
    writer.join(PATIENCE_SECONDS)
    assert not writer.is_alive()
    assert model.content_hash == hashlib.sha256(content).hexdigest()
    infer(broker, "adder")
    broker.stub.UnloadModel(pb.UnloadModelRequest(name="adder"), timeout=PATIENCE_SECONDS)
    broker.wait_gauges(before | {"native_sessions": broker.counters()["native_sessions"]})


def test_a_file_rewritten_after_its_load_is_another_model(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    first = load(broker, make_model("adder", adder("one")))[-1].model
    second = load(broker, make_model("adder", adder("two")), replace=True)[-1].model
    assert first.content_hash != second.content_hash
    assert [g.name for g in second.graphs] == ["two"]
    infer(broker, "adder")  # the newer of that name: it took the older one's place
    broker.wait_counters(contexts=1, models=1)


@pytest.mark.parametrize("change", [write_into, truncate])
def test_a_file_handed_over_and_changed_before_its_load_is_refused_or_what_it_is_now(
    attach: Attach, make_model: MakeModel, change: Callable[[Path], None]
) -> None:
    """Nothing is held yet: it may be long until somebody loads it."""
    path, peer = make_model(), attach()
    answer = handed(hand(peer, path, read_only(path)))
    handed(hand(peer, "adder.manifest.json", [], answer.file_id))
    change(path)
    if change is truncate:
        assert "is empty" in str(peer.refused_load(path, file_id=answer.file_id))
    else:
        model = peer.load(path, file_id=answer.file_id).model
        assert model.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_wrapper_handed_over_and_changed_before_its_load_is_refused(
    attach: Attach, make_model: MakeModel
) -> None:
    binary, peer = make_model(), attach()
    path = binary.with_name("w.onnx")
    for size in (1000, 2 << 20):  # read at once, and looked around in
        place = Place(binary.read_bytes().ljust(size, b"\n"))
        path.write_bytes(wrapper_bytes("add", TENSORS[:2], TENSORS[2:], place, "v2"))
        answer = handed(hand(peer, path, read_only(path)))
        handed(hand(peer, "w.manifest.json", [], answer.file_id))
        with open(path, "r+b") as file:
            file.truncate(500)
        refused = peer.refused_load(path, file_id=answer.file_id)
        assert "changed" in str(refused)


@pytest.mark.parametrize("change", [write_into, truncate])
def test_a_file_that_is_changed_while_a_reset_creates_it_again_is_created_as_it_was(
    broker: BrokerProcess, make_model: MakeModel, change: Callable[[Path], None]
) -> None:
    path = make_model()
    load(broker, path)
    broker.set_faults(f"hang={CREATE}:1")
    reset = broker.stub.ResetBackend.future(pb.ResetBackendRequest())
    broker.wait_hanging(1)
    writer = threading.Thread(target=change, args=(path,))
    writer.start()
    broker.set_faults("unhang")
    assert reset.result(PATIENCE_SECONDS).context_count == 1
    writer.join(PATIENCE_SECONDS)
    infer(broker, "adder")


@pytest.mark.qnn
def test_the_real_library_survives_a_truncation_at_every_stage(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(backend="qnn", verdict_dir=str(tmp_path / "verdicts"))
    broker.accidents_expected = True
    wanted, outcomes = compiled("dense"), []
    (expected,) = wanted.outputs.values()
    for stage, verified in itertools.product(LoadStage, (False, True)):
        path = tmp_path / f"{stage.name}-{verified}.bin"
        path.write_bytes(wanted.binary)
        with connect(broker.runtime_dir) as session:
            if verified:
                session.load(path).unload()
            else:
                for verdict in (tmp_path / "verdicts").glob("*"):
                    verdict.unlink()
            broker.wait_counters(contexts=0, contexts_closing=0)
            writers: list[threading.Thread] = []

            def strike(progress: LoadProgress) -> None:
                if progress.stage is stage and not writers:  # noqa: B023
                    writers.append(threading.Thread(target=truncate, args=(path,)))  # noqa: B023
                    writers[0].start()  # noqa: B023

            try:
                model = session.load(path, progress=strike)
            except BrokerError as error:
                outcomes.append(error.reason)
            else:
                (found,) = model.graph.run(wanted.inputs).values()
                np.testing.assert_array_equal(found, expected)
                outcomes.append("loaded")
            for writer in writers:
                writer.join(PATIENCE_SECONDS)
                assert path.stat().st_size == 0
            assert session.server_info().pid == broker.pid
    assert "loaded" in outcomes
    assert set(outcomes) <= {"loaded", "BAD_FILE"}
