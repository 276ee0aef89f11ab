# SPDX-License-Identifier: Apache-2.0
"""Trials beside what is loaded, when the file of that is no longer what was loaded."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder
from tests.native.qnn_models import CompiledModel, compiled
from tests.processes.test_verifying import works
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.client import Model, connect
from qnnbroker.protos.errors import VersionMismatch
from qnnbroker.v1 import control_pb2 as pb

StartVerifying = Callable[..., BrokerProcess]


@pytest.fixture
def start(start_broker: StartBroker, tmp_path: Path) -> StartVerifying:
    """Starts brokers that try what the fake loads, too."""

    def make(**options: Any) -> BrokerProcess:
        broker = start_broker(verify="always", verdict_dir=str(tmp_path / "verdicts"), **options)
        broker.accidents_expected = True  # refusals are warnings
        return broker

    return make


def verdicts(folder: Path) -> dict[str, dict[str, Any]]:
    """What is kept on disk, by content hash."""
    kept = [json.loads(p.read_text()) for p in (folder / "verdicts").iterdir()]
    return {k["content_hash"]: k for k in kept}


def test_a_binary_that_cannot_be_tried_beside_what_is_loaded_is_not_let_in(
    start: StartVerifying, make_model: MakeModel, tmp_path: Path
) -> None:
    broker = start()
    first = make_model("first", adder("first"), binary_class="A")
    same = make_model("same", adder("same"), binary_class="A")
    other = make_model("other", adder("other"), binary_class="B")
    content = first.read_bytes()
    with connect(broker.runtime_dir) as session, session.load(first) as model:
        first.write_bytes(same.read_bytes())  # in place, as compilers do
        for path in (same, other):
            with pytest.raises(VersionMismatch, match="has to be tried beside") as refused:
                session.load(path)
            assert refused.value.reason == "BINARY_CLASS"
        works(model)
        assert broker.counters()["trials_without_witness_total"] == 2
        assert list(verdicts(tmp_path)) == [model.content_hash]  # nothing was found out
        first.write_bytes(content)
        with session.load(same) as second:
            works(second)
        with pytest.raises(VersionMismatch, match="cannot be in one process"):
            session.load(other)
        works(model)


def test_on_hardware_it_is_let_in_but_its_verdict_says_that_it_was_tried_alone(
    start: StartVerifying, make_model: MakeModel, tmp_path: Path
) -> None:
    broker = start(switch_words=("device_arch=73", "soc=43"))
    first, second, third = (make_model(n, adder(n), arch=73, soc=43) for n in ("a", "b", "c"))
    with connect(broker.runtime_dir) as session, session.load(first) as a:
        content = first.read_bytes()
        first.write_bytes(b"something else")
        with session.load(second) as b:
            works(a)
            works(b)
            kept = verdicts(tmp_path)
            assert kept[b.content_hash]["binary_class"] == b.content_hash[:16]
            assert kept[a.content_hash]["binary_class"] == a.content_hash[:16]
        first.write_bytes(content)
        with session.load(third) as c:  # beside the first again, whose class it is then
            works(c)
            kept = verdicts(tmp_path)
            assert kept[c.content_hash]["binary_class"] == a.content_hash[:16]
            assert broker.counters()["trials_without_witness_total"] == 1


def runs_right(model: Model, wanted: CompiledModel) -> None:
    """It gives what ONNX Runtime got for the same inputs."""
    (found,) = model.graph.run(wanted.inputs).values()
    np.testing.assert_array_equal(found, next(iter(wanted.outputs.values())))


@pytest.mark.qnn
@pytest.mark.parametrize("other", ["conv_no_soc", "conv_arch", "conv_soc_30"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_two_classes_of_the_emulation_are_kept_apart(
    start_broker: StartBroker, tmp_path: Path, other: str, turned: bool
) -> None:
    """The same graph, compiled with a SoC model and without: together they would crash or fail.

    That with an arch alone says that it is for a SoC, so only the trial can tell; and so it is with
    a SoC of another DSP arch, the one that the emulation calls its own.
    """
    order = (other, "conv_u8") if turned else ("conv_u8", other)
    broker = start_broker(backend="qnn", verdict_dir=str(tmp_path / "verdicts"))
    broker.accidents_expected = True
    paths, wanted = [], [compiled(name) for name in order]
    for one in wanted:
        paths.append(tmp_path / f"{one.name}.bin")
        paths[-1].write_bytes(one.binary)
    with connect(broker.runtime_dir) as session:
        with session.load(paths[0]) as first:
            for _ in range(2):  # tried, then remembered
                with pytest.raises(VersionMismatch, match="cannot be in one process") as refused:
                    session.load(paths[1])
                assert "the same --soc-model" in str(refused.value)
                assert refused.value.reason == "BINARY_CLASS"
                runs_right(first, wanted[0])
            assert broker.counters()["trials_total"] == 3  # the first, beside it, and alone
        broker.wait_counters(contexts=0, contexts_closing=0)
        with session.load(paths[1]) as second:  # there is nothing wrong with it
            runs_right(second, wanted[1])
        assert session.server_info().pid == broker.pid
    kept = verdicts(tmp_path)
    assert all(k["accepted"] for k in kept.values())
    assert len({k["binary_class"] for k in kept.values()}) == 2


def test_a_witness_that_somebody_wants_to_write_is_held_until_the_trial_ends(
    start: StartVerifying, make_model: MakeModel
) -> None:
    broker = start()
    first, second = (make_model(n, adder(n)) for n in ("first", "second"))
    with connect(broker.runtime_dir) as session, session.load(first) as model:
        broker.set_faults("hang=contextCreateFromBinary@second:1")
        call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(second)))
        broker.wait_hanging(1)
        writer = threading.Thread(target=os.truncate, args=(first, 0))
        writer.start()
        broker.set_faults("unhang")
        assert list(call)[-1].HasField("model")
        writer.join(PATIENCE_SECONDS)
        assert first.stat().st_size == 0
        works(model)


@pytest.mark.qnn
def test_models_for_two_chips_of_one_arch_go_together(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(backend="qnn", verdict_dir=str(tmp_path / "verdicts"))
    broker.accidents_expected = True
    names = ("conv_u8", "conv_soc_43")
    with connect(broker.runtime_dir) as session:
        models = []
        for name in names:
            path = tmp_path / f"{name}.bin"
            path.write_bytes(compiled(name).binary)
            models.append(session.load(path))
        for name, model in zip(names, models, strict=True):
            runs_right(model, compiled(name))


@pytest.mark.qnn
def test_untried_binaries_are_kept_apart_by_what_they_say(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    broker = start_broker(backend="qnn", trust=True)
    broker.accidents_expected = True
    paths = {}
    for name in ("conv_u8", "conv_no_soc"):
        paths[name] = tmp_path / f"{name}.bin"
        paths[name].write_bytes(compiled(name).binary)
    with connect(broker.runtime_dir) as session, session.load(paths["conv_u8"]) as model:
        with pytest.raises(VersionMismatch, match="compiled without a SoC model"):
            session.load(paths["conv_no_soc"])
        runs_right(model, compiled("conv_u8"))
        assert broker.counters()["trials_total"] == 0
