# SPDX-License-Identifier: Apache-2.0
"""Loading: one context for the same bytes, shared, joined, cancelled, expired and refused."""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.broker_process import BrokerProcess
from tests.conftest import StartBroker
from tests.fake_models import TENSOR_BYTES, MakeModel, adder, inline_inputs, numbers
from tests.raw_peer import RawPeer, refusal
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.client import connect
from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    VersionMismatch,
)
from qnnbroker.v1 import control_pb2 as pb

CREATE = "contextCreateFromBinary"


def load(broker: BrokerProcess, path: Path, **options: Any) -> list[pb.LoadModelResponse]:
    """A load without a session: all its messages."""
    request = pb.LoadModelRequest(path=str(path), **options)
    return list(broker.stub.LoadModel(request, timeout=PATIENCE_SECONDS))


def infer(broker: BrokerProcess, name: str) -> None:
    """Runs a model without a session, and checks the result."""
    request = pb.InferRequest(name=name, inputs=inline_inputs(1))
    answer = broker.stub.Infer(request, timeout=PATIENCE_SECONDS)
    a, b = numbers(1)
    assert answer.outputs[0].data == (a + b).tobytes()


@pytest.fixture
def broker(shared_broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """The module's broker, without models of nobody at the end."""
    yield shared_broker
    shared_broker.set_faults("unhang")
    for info in shared_broker.stub.ListModels(pb.ListModelsRequest()).contexts:
        with contextlib.suppress(grpc.RpcError):
            while True:
                shared_broker.stub.UnloadModel(pb.UnloadModelRequest(name=info.content_hash))


def test_progress_goes_through_its_stages_and_ends_with_the_model(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("adder", file_bytes=20 << 20)
    messages = load(broker, path, name="mine")
    stages = [m.stage for m in messages]
    assert stages == sorted(stages)
    assert set(stages) == {
        pb.LOAD_STAGE_HASHING,
        pb.LOAD_STAGE_MAPPING,
        pb.LOAD_STAGE_CREATING,
        pb.LOAD_STAGE_READY,
    }
    assert [m.HasField("model") for m in messages] == [False] * (len(messages) - 1) + [True]
    hashing = [m.bytes_done for m in messages if m.stage == pb.LOAD_STAGE_HASHING]
    assert hashing == sorted(hashing)
    assert hashing[-1] == path.stat().st_size
    model = messages[-1].model
    assert model.content_hash == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (model.name, model.source_path) == ("mine", str(path))
    assert [g.name for g in model.graphs] == ["add"]
    assert not messages[-1].shared


def test_the_same_bytes_from_two_paths_are_one_context(
    broker: BrokerProcess, make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model()
    other = tmp_path / "copy.bin"
    shutil.copy(path, other)
    link = tmp_path / "link.bin"
    link.symlink_to(path)
    with connect(broker.runtime_dir) as one, connect(broker.runtime_dir) as two:
        models = [one.load(path), two.load(other), one.load(link), two.load(path)]
        assert len({m.content_hash for m in models}) == 1
        assert [m.shared for m in models] == [False, True, True, True]
        counters = broker.counters()
        assert (counters["contexts"], counters["models"], counters["loads_total"]) == (1, 4, 1)
        for model in models:
            model.graph.bind().run()
        (info,) = broker.stub.ListModels(pb.ListModelsRequest()).contexts
        assert (info.session_count, info.holder_count, info.run_count) == (2, 4, 4)
        for model in models[:3]:
            model.unload()
        models[3].graph.bind().run()
    broker.wait_counters(contexts=0, models=0, native_contexts=0)
    assert len(broker.calls(CREATE)) == len(broker.calls("contextFree")) == 1


def test_concurrent_loads_of_the_same_bytes_are_one(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    paths = [make_model("one"), make_model("two")]
    broker.set_faults(f"hang={CREATE}:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        calls = [
            broker.stub.LoadModel(
                pb.LoadModelRequest(path=str(paths[n % 2])),
                metadata=peer.metadata if n < 3 else None,
            )
            for n in range(6)
        ]
        broker.wait_hanging(1)
        broker.wait_counters(loads_joined_total=5)
        broker.set_faults("unhang")
        last = [list(c)[-1] for c in calls]
        assert len({m.model.context_id for m in last}) == 1
        assert sorted(m.shared for m in last) == [False] + [True] * 5
        assert broker.counters()["loads_total"] == 1
    assert len(broker.calls(CREATE)) == 1


def test_a_failed_load_fails_all_who_joined_it_and_leaves_nothing(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model()
    before = broker.gauges()
    broker.set_faults(f"hang={CREATE}:1", f"fail={CREATE}:1:1002")
    calls = [broker.stub.LoadModel(pb.LoadModelRequest(path=str(path))) for _ in range(3)]
    broker.wait_hanging(1)
    broker.wait_counters(loads_joined_total=2)
    broker.set_faults("unhang")
    for call in calls:
        error = refusal(lambda c=call: list(c))  # type: ignore[misc]
        assert isinstance(error, LimitExceeded)
        assert (error.reason, error.ids["qnn_code"]) == ("NPU_MEMORY", "1002")
    broker.wait_gauges(before)
    load(broker, path)  # and the next one is a new one
    infer(broker, "adder")


def test_a_cancelled_load_leaves_nothing(broker: BrokerProcess, make_model: MakeModel) -> None:
    path = make_model()
    before = broker.gauges()
    broker.set_faults(f"hang={CREATE}:1")
    with RawPeer(broker.attach_path, broker.stub) as peer:
        request = pb.LoadModelRequest(path=str(path))
        first = broker.stub.LoadModel(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        second = broker.stub.LoadModel(request)
        broker.wait_counters(loads_joined_total=1)
        first.cancel()
        second.cancel()
        broker.set_faults("unhang")
        broker.wait_counters(contexts=0, models=0, native_contexts=0)
    broker.wait_gauges(before)


def test_a_load_cancelled_by_one_goes_on_for_the_other(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model()
    broker.set_faults(f"hang={CREATE}:1")
    first = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_hanging(1)
    second = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)))
    broker.wait_counters(loads_joined_total=1)
    first.cancel()
    broker.set_faults("unhang")
    assert list(second)[-1].shared
    infer(broker, "adder")
    assert broker.counters()["models"] == 1


def test_a_client_that_dies_while_it_loads_leaves_nothing(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model()
    before = broker.gauges()
    broker.set_faults(f"hang={CREATE}:1")
    peer = RawPeer(broker.attach_path, broker.stub)
    call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(path)), metadata=peer.metadata)
    broker.wait_hanging(1)
    peer.close()
    broker.wait_counters(sessions=0)
    broker.set_faults("unhang")
    error = refusal(lambda: list(call))
    assert isinstance(error, NotFound)
    assert error.reason == "SESSION_UNKNOWN"
    broker.wait_gauges(before)


def test_loads_cancelled_at_any_time_leave_nothing(
    broker: BrokerProcess, make_model: MakeModel, tmp_path: Path
) -> None:
    path = make_model("adder", file_bytes=9 << 20)
    copies = [shutil.copy(path, tmp_path / f"{turn}.bin") for turn in range(40)]
    before = broker.gauges()
    with RawPeer(broker.attach_path, broker.stub) as peer:
        for turn, copy in enumerate(copies):  # files whose hash is not known yet
            request = pb.LoadModelRequest(path=str(copy))
            call = broker.stub.LoadModel(request, metadata=peer.metadata)
            for _ in range(turn % 8):
                if next(call, None) is None:
                    break
            call.cancel()
        # What was delivered before the cancel is the session's until it ends.
    broker.wait_gauges(before)


@pytest.mark.parametrize("what", [f"hang={CREATE}:1", "hang=systemContextGetBinaryInfo:1"])
def test_a_slow_load_blocks_nobody(broker: BrokerProcess, make_model: MakeModel, what: str) -> None:
    slow = make_model("slow", adder("slow"))
    with (
        RawPeer(broker.attach_path, broker.stub) as loader,
        connect(broker.runtime_dir) as session,
        session.load(make_model()) as model,
    ):
        binding = model.graph.bind()
        broker.set_faults(what)
        call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(slow)), metadata=loader.metadata)
        wait_until(lambda: broker.counters()["contexts"] == 2, "the load is under way")
        for _ in range(20):
            binding.run()
        session.alloc(1 << 20).release()
        with session.load(make_model("third", adder("third"))) as third:
            third.graph.bind().run()
        with connect(broker.runtime_dir) as other:
            other.server_info()
        assert call.is_active()
        broker.set_faults("unhang")
        assert list(call)[-1].model.name == "slow"


def test_loads_that_hang_do_not_keep_others_from_what_is_resident(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(load_threads=1)
    path = make_model()
    other = Path(shutil.copy(path, path.with_name("copy.bin")))  # a file that is not known yet
    with connect(broker.runtime_dir) as one, one.load(path):
        broker.set_faults(f"hang={CREATE}:1")
        slow = make_model("slow", adder("slow"))
        call = broker.stub.LoadModel(pb.LoadModelRequest(path=str(slow)))
        broker.wait_hanging(1)
        with connect(broker.runtime_dir) as two:
            for found in (path, other):
                with two.load(found, timeout=PATIENCE_SECONDS) as model:
                    assert model.shared
                    model.graph.bind().run()
        broker.set_faults("unhang")
        assert list(call)[-1].HasField("model")


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (1002, LimitExceeded, "NPU_MEMORY"),
        (1008, VersionMismatch, "LIBRARY_VERSION"),
        (5008, VersionMismatch, "CONTEXT_BINARY_VERSION"),
        (5005, InvalidRequest, "BAD_FILE"),
        (1100, BackendError, "QNN_ERROR"),
        (4242, BackendError, "QNN_ERROR"),
    ],
)
def test_a_code_of_the_library_becomes_an_error_with_the_code(
    broker: BrokerProcess, make_model: MakeModel, code: int, kind: type[BrokerError], reason: str
) -> None:
    before = broker.gauges()
    broker.set_faults(f"fail={CREATE}:*:{code}")
    error = refusal(lambda: load(broker, make_model()))
    assert isinstance(error, kind)
    assert (error.reason, error.ids["qnn_code"]) == (reason, str(code))
    broker.wait_gauges(before)


# --- models of nobody


def test_a_model_of_nobody_goes_when_its_time_is_over(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    before = broker.gauges()
    load(broker, make_model("brief", adder("brief")), keep_alive_seconds=0.05)
    load(broker, make_model("lasting", adder("lasting")), keep_alive_seconds=-1)
    broker.wait_counters(models=1, contexts=1)
    assert refusal(lambda: infer(broker, "brief")).reason == "MODEL_UNKNOWN"
    infer(broker, "lasting")
    broker.stub.UnloadModel(pb.UnloadModelRequest(name="lasting"), timeout=PATIENCE_SECONDS)
    assert refusal(lambda: infer(broker, "lasting")).reason == "MODEL_UNKNOWN"
    broker.wait_gauges(before)


def test_a_model_of_nobody_stays_while_it_is_used(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("brief", adder("slow"))
    broker.set_faults("hang=graphExecute@slow:1")
    load(broker, path, keep_alive_seconds=0.05)
    call = broker.stub.Infer.future(pb.InferRequest(name="brief", inputs=inline_inputs(2)))
    broker.wait_hanging(1)
    with RawPeer(broker.attach_path, broker.stub) as peer:
        # A model of the session's own whose time is shorter than nobody's: none at all.
        peer.load(path)
    load(broker, make_model("other", adder("other")), keep_alive_seconds=0.2)
    broker.wait_counters(models=1)  # "other" went, which had more time than "brief"
    broker.set_faults("unhang")
    a, b = numbers(2)
    assert call.result(PATIENCE_SECONDS).outputs[0].data == (a + b).tobytes()
    broker.wait_counters(models=0, contexts=0)


def test_an_unload_while_it_is_used_takes_the_model_and_lets_the_use_end(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    path = make_model("adder", adder("slow"))
    broker.set_faults("hang=graphExecute@slow:1")
    load(broker, path, keep_alive_seconds=0.05)
    with RawPeer(broker.attach_path, broker.stub) as peer:
        model = peer.load(path).model
        buffer, memory = peer.alloc(4096)
        places = [(n, buffer, i * TENSOR_BYTES, TENSOR_BYTES) for i, n in enumerate("aby")]
        binding = peer.bind(model.graphs[0].graph_id, places[:2], places[2:])
        request = pb.ExecuteRequest(binding_id=binding)
        call = broker.stub.Execute.future(request, metadata=peer.metadata)
        broker.wait_hanging(1)
        peer.call("UnloadModel", pb.UnloadModelRequest(model_id=model.model_id))
        broker.stub.UnloadModel(pb.UnloadModelRequest(name="adder"), timeout=PATIENCE_SECONDS)
        assert broker.counters()["models"] == 0
        broker.set_faults("unhang")
        assert call.result(PATIENCE_SECONDS).timing.execute_ns > 0
        peer.execute(binding)
        memory.close()
    broker.wait_counters(contexts=0)


def test_a_name_that_means_two_models_is_no_name(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    with (
        RawPeer(broker.attach_path, broker.stub) as one,
        RawPeer(broker.attach_path, broker.stub) as two,
    ):
        hashes = [
            peer.load(make_model(name, adder(name)), name="same").model.content_hash
            for peer, name in ((one, "x"), (two, "y"))
        ]
        error = refusal(lambda: infer(broker, "same"))
        assert isinstance(error, InvalidRequest)
        infer(broker, hashes[0][:8])
        infer(broker, hashes[1])


def test_two_loads_of_different_models_go_on_at_once(
    start_broker: StartBroker, make_model: MakeModel
) -> None:
    broker = start_broker(load_threads=2)
    broker.set_faults(f"hang={CREATE}:1-2")
    calls = [
        broker.stub.LoadModel(pb.LoadModelRequest(path=str(make_model(n, adder(n)))))
        for n in ("one", "two")
    ]
    broker.wait_hanging(2)
    broker.set_faults("unhang")
    assert [list(c)[-1].model.name for c in calls] == ["one", "two"]
