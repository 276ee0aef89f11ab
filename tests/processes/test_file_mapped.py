# SPDX-License-Identifier: Apache-2.0
"""What a context is created from: the file's pages through callbacks, a mapping, or the heap."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder
from tests.native.qnn_models import compiled
from tests.processes.test_layouts import works
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.cli.wrapper_writing import Place, Tensor, wrapper_bytes
from qnnbroker.client import Unsupported, connect
from qnnbroker.native.fake import FakeCall
from qnnbroker.v1 import control_pb2 as pb

MAPPED = "contextCreateFromBinaryWithCallback"
BIG = {"file_bytes": 5 << 20}


def created(broker: BrokerProcess) -> dict[str, int]:
    counters = broker.counters()
    return {
        k.removeprefix("creates_").removesuffix("_total"): v
        for k, v in counters.items()
        if k.startswith("creates_") and v
    }


def mapped_creations(broker: BrokerProcess) -> list[FakeCall]:
    """Without that by which the broker finds out at its start whether there is such a call."""
    return [c for c in broker.calls(MAPPED) if c.number("size") > 64]


@pytest.fixture
def mapping(start_broker: StartBroker) -> BrokerProcess:
    """A broker whose library reads binaries through callbacks."""
    return start_broker(switch_words=("file_mapped=on",))


def test_a_library_that_takes_it_reads_the_files_own_pages_as_long_as_the_context_lives(
    mapping: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("adder", **BIG)
    fds = mapping.fds()
    with connect(mapping.runtime_dir) as session:
        works(session, path)
        assert created(mapping) == {"callback": 1}
        (call,) = mapped_creations(mapping)
        assert call.number("aligned") == 5 << 20
        maps = Path(f"/proc/{mapping.pid}/maps").read_text()
        assert str(path) in maps
        works(session, path)
    mapping.wait_counters(contexts=0, contexts_closing=0, sessions=0)
    assert str(path) not in Path(f"/proc/{mapping.pid}/maps").read_text()
    wait_until(lambda: mapping.fds() == fds, "no fd of the file is left")


def test_such_a_context_is_asked_what_it_can_do_before_anybody_binds(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(switch_words=("file_mapped=on", "mem_register=on"))
    with connect(broker.runtime_dir) as session:
        model = session.load(make_model())
        info = broker.stub.GetServerInfo(pb.GetServerInfoRequest()).backend
        (memory,) = [c for c in info.capabilities if c.name == "memory_registration"]
        assert (memory.supported, memory.evidence.startswith("memRegister -> custom: 0")) == (
            True,
            True,
        )
        asked = len(broker.calls("memRegister"))
        with model.graph.bind() as binding:
            assert binding.memory == "registered"
            assert len(broker.calls("memRegister")) == asked + 3


def test_a_file_that_is_truncated_while_a_context_reads_it_becomes_a_copy(
    mapping: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("adder", **BIG)
    with connect(mapping.runtime_dir) as session:
        works(session, path)
        writer = threading.Thread(target=os.truncate, args=(path, 0))
        writer.start()
        writer.join(PATIENCE_SECONDS)
        assert path.stat().st_size == 0
        model = session.models[0]
        works_on = {"a": _ones(), "b": _ones()}
        (result,) = model.graph.run(works_on).values()  # the fake reads every page at an execute
        assert (result == 2).all()
        assert mapping.counters()["binaries_copied_total"] == 1
        assert "reads a copy now" in mapping.log()


def test_loads_that_hang_do_not_keep_a_truncated_file_from_becoming_a_copy(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(switch_words=("file_mapped=on",), load_threads=1)
    path = make_model("adder", **BIG)
    slow = make_model("slow", adder("slow"))
    with connect(broker.runtime_dir) as session:
        works(session, path)
        broker.set_faults("hang=contextCreateFromBinary:1")
        call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(slow)))
        broker.wait_hanging(1)
        writer = threading.Thread(target=os.truncate, args=(path, 0))
        writer.start()
        writer.join(PATIENCE_SECONDS)
        assert path.stat().st_size == 0
        (result,) = session.models[0].graph.run({"a": _ones(), "b": _ones()}).values()
        assert (result == 2).all()
        broker.set_faults("unhang")
        assert list(call)[-1].HasField("model")


def _ones() -> Any:
    return np.ones((4, 8), np.float32)


def test_a_binary_inside_a_wrapper_does_not_start_at_a_page(
    mapping: BrokerProcess, make_model: MakeModel
) -> None:
    binary = make_model("adder", **BIG)
    tensors = [Tensor(n, "float32", (4, 8)) for n in ("a", "b", "y")]
    wrapper = binary.with_name("embedded.onnx")
    place = Place(binary.read_bytes())
    wrapper.write_bytes(wrapper_bytes("add", tensors[:2], tensors[2:], place, "v2"))
    with connect(mapping.runtime_dir) as session:
        works(session, wrapper)
        assert created(mapping) == {"callback_refused": 1, "mapping": 1}
    with connect(mapping.runtime_dir) as session:  # which says nothing about others
        works(session, make_model("other", adder("other")))
        assert created(mapping)["callback"] == 1


def test_a_failed_creation_leaves_nothing_lent(
    mapping: BrokerProcess, make_model: MakeModel
) -> None:
    before = mapping.gauges()
    mapping.set_faults("fail=contextCreateFromBinary:1:1002")
    with connect(mapping.runtime_dir) as session:
        with pytest.raises(Exception, match="1002"):
            session.load(make_model("adder", **BIG))
    mapping.wait_gauges(before)


def test_a_library_without_it_is_asked_once_and_a_mapping_is_used(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(broker.runtime_dir) as session:
        for name in ("one", "two"):
            works(session, make_model(name, adder(name)))
    assert created(broker) == {"callback_refused": 1, "mapping": 2}
    assert mapped_creations(broker) == []  # its capability says no
    assert "created from a plain mapping" in broker.log()


def test_require_refuses_where_there_is_no_callback(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(file_mapped_weights="require")
    broker.accidents_expected = True
    with connect(broker.runtime_dir) as session:
        with pytest.raises(Unsupported, match="file_mapped_weights = require"):
            session.load(make_model())


def test_only_off_uses_the_heap(start_broker: StartBroker, make_model: MakeModel) -> None:
    broker = start_broker(file_mapped_weights="off", switch_words=("file_mapped=on",))
    with connect(broker.runtime_dir) as session:
        works(session, make_model("adder", **BIG))
    assert created(broker) == {"heap": 1}


@pytest.mark.qnn
@pytest.mark.parametrize(("mode", "how"), [("auto", "mapping"), ("off", "heap")])
def test_the_emulation_takes_a_mapping_or_the_heap(
    start_broker: StartBroker, tmp_path: Path, mode: str, how: str
) -> None:
    broker = start_broker(
        backend="qnn", file_mapped_weights=mode, verdict_dir=str(tmp_path / "verdicts")
    )
    broker.accidents_expected = True
    path = tmp_path / "model.bin"
    path.write_bytes(compiled("dense").binary)
    with connect(broker.runtime_dir) as session, session.load(path) as model:
        model.graph.run(compiled("dense").inputs)
        assert created(broker)[how] == 1
        assert str(path) not in Path(f"/proc/{broker.pid}/maps").read_text()
