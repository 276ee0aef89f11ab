# SPDX-License-Identifier: Apache-2.0
"""Trials: a binary that would hurt the broker hurts a process of its own, and is remembered."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import MakeModel, adder, numbers
from tests.raw_peer import refusal
from tests.waiting import PATIENCE_SECONDS, wait_exit, wait_until

from qnnbroker.client import LoadStage, Model, Session, connect
from qnnbroker.protos.errors import (
    BrokerError,
    DeadlineExpired,
    InvalidRequest,
    LimitExceeded,
    VersionMismatch,
)
from qnnbroker.v1 import control_pb2 as pb

CREATE = "contextCreateFromBinary"
StartVerifying = Callable[..., BrokerProcess]


@pytest.fixture
def start(start_broker: StartBroker, tmp_path: Path) -> StartVerifying:
    """Starts brokers that try what the fake loads, too."""

    def make(**options: Any) -> BrokerProcess:
        defaults = {"verify": "always", "verdict_dir": str(tmp_path / "verdicts")}
        broker = start_broker(**(defaults | options))
        broker.accidents_expected = True  # refusals are warnings
        return broker

    return make


@pytest.fixture
def broker(start: StartVerifying) -> BrokerProcess:
    return start()


@pytest.fixture
def session(broker: BrokerProcess) -> Iterator[Session]:
    with connect(broker.runtime_dir) as session:
        yield session


def works(model: Model) -> None:
    a, b = numbers(3)
    (result,) = model.graph.run({"a": a, "b": b}).values()
    np.testing.assert_array_equal(result, a + b)


def children(broker: BrokerProcess) -> list[int]:
    """The trial processes of a broker."""
    tasks = Path(f"/proc/{broker.pid}/task")
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def trials(broker: BrokerProcess) -> tuple[int, int]:
    counters = broker.counters()
    return counters["trials_total"], counters["verdicts_used_total"]


def test_a_new_binary_is_tried_once_and_the_verdict_is_kept(
    start: StartVerifying, make_model: MakeModel, tmp_path: Path
) -> None:
    path, stages = make_model(), list[LoadStage]()
    broker = start()
    with connect(broker.runtime_dir) as session:
        with session.load(path, progress=lambda p: stages.append(p.stage)) as model:
            works(model)
        assert [s.name for s in dict.fromkeys(stages)] == [
            "HASHING",
            "VERIFYING",
            "MAPPING",
            "CREATING",
            "READY",
        ]
        broker.wait_counters(contexts=0)
        assert trials(broker) == (1, 0)
        with session.load(path) as model:
            works(model)
        assert trials(broker) == (1, 1)
    broker.stop()
    (kept,) = (tmp_path / "verdicts").iterdir()
    assert json.loads(kept.read_text())["accepted"] is True
    broker = start()
    with connect(broker.runtime_dir) as session, session.load(path) as model:
        works(model)
        assert trials(broker) == (0, 1)


def test_trust_loads_without_a_trial(start: StartVerifying, make_model: MakeModel) -> None:
    broker = start(trust=True)
    with connect(broker.runtime_dir) as session, session.load(make_model()) as model:
        works(model)
    assert trials(broker) == (0, 0)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (f"crash={CREATE}@bad:*", "died of SIGSEGV while creating"),
        (f"crash={CREATE}@bad:*:abort", "died of SIGABRT while creating"),
        ("crash=graphExecute@bad:*", "died of SIGSEGV while executing"),
        (f"fail={CREATE}@bad:*:5005", "refuses the binary (creating)"),
        ("fail=graphExecute@bad:*:1100", "refuses the binary (executing)"),
    ],
)
def test_a_binary_that_harms_is_refused_now_and_later_and_harms_nobody(
    broker: BrokerProcess, session: Session, make_model: MakeModel, fault: str, says: str
) -> None:
    pid = session.broker_pid
    bad = make_model("bad", adder("bad"))
    with session.load(make_model()) as good:
        broker.set_faults(fault)
        with pytest.raises(BrokerError) as first:
            session.load(bad)
        assert says in str(first.value)
        tried = trials(broker)
        with pytest.raises(type(first.value), match="remembered") as second:
            session.load(bad)
        assert (second.value.reason, trials(broker)) == (first.value.reason, (tried[0], 1))
        works(good)
        assert broker.counters()["contexts"] == 1
    assert session.server_info().pid == pid


def test_a_binary_that_hangs_is_given_up_and_tried_again_with_more_time(
    start: StartVerifying, make_model: MakeModel
) -> None:
    path = make_model()
    broker = start(trial_seconds=1.0)
    with connect(broker.runtime_dir) as session:
        broker.set_faults(f"hang={CREATE}:1")
        with pytest.raises(InvalidRequest, match="not done after 1 s of creating") as refused:
            session.load(path)
        assert refused.value.ids["trial"] == "hung"
        wait_until(lambda: children(broker) == [], "the trial is gone")
        with pytest.raises(InvalidRequest, match="remembered"):
            session.load(path)
    broker.stop()
    broker = start(trial_seconds=20.0)
    with connect(broker.runtime_dir) as session, session.load(path) as model:
        works(model)


def test_what_is_wrong_with_the_machine_is_not_the_binarys_fault(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    path = make_model()
    broker.set_faults(f"fail={CREATE}:1:1002")
    with pytest.raises(LimitExceeded) as refused:
        session.load(path)
    assert refused.value.reason == "NPU_MEMORY"
    broker.set_faults()
    with session.load(path) as model:
        works(model)


def test_binaries_of_two_classes_are_kept_apart(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    with session.load(make_model("one", adder("one"), binary_class="A")) as one:
        same = make_model("same", adder("same"), binary_class="A")
        other = make_model("other", adder("other"), binary_class="B")
        with session.load(same) as model:
            works(model)
        with pytest.raises(VersionMismatch, match="cannot be in one process") as refused:
            session.load(other)
        assert refused.value.reason == "BINARY_CLASS"
        works(one)
        before = trials(broker)
        with pytest.raises(VersionMismatch, match="cannot be in one process"):
            session.load(other)
        assert trials(broker)[0] == before[0]
    broker.wait_counters(contexts=0)
    with session.load(other) as model:  # alone it is as good as any
        works(model)
        with pytest.raises(VersionMismatch):
            session.load(same)


def test_two_classes_loaded_at_once_do_not_meet_either(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    paths = [make_model(c, adder(c), binary_class=c) for c in ("A", "B")]
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def load(path: Path) -> None:
        with connect(broker.runtime_dir) as session:
            barrier.wait()
            try:
                model = session.load(path)
            except VersionMismatch as error:
                outcomes.append(error.reason)
                barrier.wait()
            else:
                outcomes.append("loaded")
                barrier.wait()
                works(model)

    threads = [threading.Thread(target=load, args=(p,)) for p in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["BINARY_CLASS", "loaded"]


def test_a_load_given_up_ends_its_trial_and_leaves_nothing(
    broker: BrokerProcess, session: Session, make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model()
    before = broker.gauges()
    broker.set_faults(f"hang={CREATE}:1")
    call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_hanging(1)
    (context,) = broker.stub.ListModels(pb.ListModelsRequest()).contexts
    assert (context.state, list(context.names)) == ("verifying", ["adder"])
    (child,) = children(broker)
    call.cancel()
    wait_exit(child, "the trial is gone")
    broker.wait_gauges(before)
    assert not list(tmp_path.glob("verdicts/*"))
    broker.set_faults()
    with session.load(path) as model:
        works(model)


def test_equal_loads_join_one_trial_and_one_may_leave(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    path = make_model()
    broker.set_faults(f"hang={CREATE}:1")
    leaving = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_hanging(1)
    staying = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_counters(loads_joined_total=1)
    leaving.cancel()
    broker.set_faults("unhang")
    assert list(staying)[-1].HasField("model")
    assert trials(broker)[0] == 1


def test_a_trial_ends_with_its_broker(broker: BrokerProcess, make_model: MakeModel) -> None:
    broker.set_faults(f"hang={CREATE}:1")
    call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(make_model())))
    broker.wait_hanging(1)
    assert call.is_active()
    (child,) = children(broker)
    broker.kill()
    wait_exit(child, "the trial is gone")


def test_a_broker_that_stops_does_not_wait_for_a_trial(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    broker.set_faults(f"hang={CREATE}:1")
    call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(make_model())))
    broker.wait_hanging(1)
    assert call.is_active()
    (child,) = children(broker)
    assert broker.stop() == 0
    wait_exit(child, "the trial is gone")


@pytest.mark.parametrize("when", ["systemContextGetBinaryInfo", CREATE, "graphExecute"])
def test_a_file_truncated_while_it_is_tried_is_tried_and_loaded_as_it_was(
    broker: BrokerProcess, make_model: MakeModel, when: str
) -> None:
    path = make_model()
    broker.set_faults(f"hang={when}:1")
    call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_hanging(1)
    writer = threading.Thread(target=os.truncate, args=(path, 0))
    writer.start()
    broker.set_faults("unhang")
    assert list(call)[-1].HasField("model")
    writer.join(PATIENCE_SECONDS)
    assert path.stat().st_size == 0
    with connect(broker.runtime_dir) as session:
        with pytest.raises(InvalidRequest, match="empty"):
            session.load(path)


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize(
    ("what", "wanted", "found"),
    [
        ({"arch": 68, "soc": 43}, "73", "68"),
        ({"arch": 73, "soc": 57}, "43", "57"),
        ({"arch": 73, "soc": 43, "build_id": "v2.99.0.1"}, "2.x up to 2.51.0", "2.99.0"),
        ({"arch": 73, "soc": 43, "build_id": "v1.50.0.1"}, "2.x up to 2.51.0", "1.50.0"),
        ({"arch": 73, "soc": 43, "backend_id": 9}, "6", "9"),
        ({"arch": 73, "soc": 43, "core_api": "2.99.0"}, "2.x up to 2.40.0", "2.99.0"),
        ({"arch": 73, "soc": 43, "core_api": "3.1.0"}, "2.x up to 2.40.0", "3.1.0"),
        ({"arch": 73, "soc": 43, "backend_api": "5.52.0"}, "5.x up to 5.51.0", "5.52.0"),
        ({"arch": 73, "soc": 43, "backend_api": "4.1.0"}, "5.x up to 5.51.0", "4.1.0"),
    ],
)
def test_a_binary_for_another_chip_or_library_is_refused_on_hardware(
    start: StartVerifying,
    make_model: MakeModel,
    verify: str,
    what: dict[str, Any],
    wanted: str,
    found: str,
) -> None:
    broker = start(verify=verify, switch_words=("device_arch=73", "soc=43", "hardware=on"))
    older = {"build_id": "v2.40.0.1", "core_api": "2.10.0", "backend_api": "5.0.1"}
    right = make_model("right", arch=73, soc=43, **older)
    with connect(broker.runtime_dir) as session, session.load(right) as model:
        works(model)
        with pytest.raises(VersionMismatch) as refused:
            session.load(make_model("wrong", adder("wrong"), **what))
        assert (refused.value.ids["wanted"], refused.value.ids["found"]) == (wanted, found)
        works(model)
    assert all(c.arguments.get("graph") != "wrong" for c in broker.calls(CREATE))


def test_what_differs_on_an_emulated_device_is_shown_and_warned_about(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    with session.load(make_model(arch=73, soc=60)) as model:
        works(model)
        (context,) = broker.stub.ListModels(pb.ListModelsRequest()).contexts
        assert list(context.warnings) == [
            "compiled for DSP arch 73, SoC 60; the emulation, which calls itself DSP arch 68, SoC "
            "30, runs it all the same: there is nothing to do"
        ]
    assert "WARNING" in broker.log()
    assert "compiled for DSP arch 73, SoC 60; the emulation" in broker.log()


def test_models_that_are_not_resident_have_a_state_too(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    with session.load(make_model("good")):
        pass
    broker.set_faults(f"crash={CREATE}@bad:*")
    error = refusal(
        lambda: list(
            broker.stub.LoadModel(
                pb.LoadModelRequest(path=str(make_model("bad", adder("bad"))), name="mine")
            )
        )
    )
    assert isinstance(error, InvalidRequest)
    broker.wait_counters(contexts=0)
    assert not broker.stub.ListModels(pb.ListModelsRequest()).contexts
    known, failed = broker.stub.ListModels(pb.ListModelsRequest(all=True)).contexts
    assert (known.state, list(known.names)) == ("known", ["good"])
    assert (failed.state, failed.state_reason, list(failed.names)) == (
        "failed",
        "BAD_FILE",
        ["mine"],
    )
    assert "SIGSEGV" in failed.state_detail
    assert 0 <= failed.state_seconds < PATIENCE_SECONDS


def test_a_deadline_of_the_caller_ends_the_trial(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    path = make_model()
    broker.set_faults(f"hang={CREATE}:1")
    with pytest.raises(DeadlineExpired):
        session.load(path, timeout=1.0)
    wait_until(lambda: children(broker) == [], "the trial is gone")
