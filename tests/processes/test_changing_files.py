# SPDX-License-Identifier: Apache-2.0
"""Files that others change, replace or truncate while they are loaded, and afterwards."""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import MakeModel, adder
from tests.processes.test_loading import CREATE, infer, load
from tests.waiting import PATIENCE_SECONDS

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
    second = load(broker, make_model("adder", adder("two")))[-1].model
    assert first.content_hash != second.content_hash
    assert [g.name for g in second.graphs] == ["two"]
    infer(broker, "adder")  # the newer of that name: it took the older one's place
    broker.wait_counters(contexts=1, models=1)
