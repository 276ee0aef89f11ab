# SPDX-License-Identifier: Apache-2.0
"""Peers that lie in gRPC calls: tokens, ids, regions, tensors and paths that are not theirs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import TENSOR_BYTES
from tests.processes.conftest import Attach
from tests.processes.ready import Ready
from tests.raw_peer import binding_request, refusal
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.protos.errors import (
    BrokerError,
    InvalidRequest,
    LimitExceeded,
    NotAllowed,
    NotFound,
)
from qnnbroker.protos.status import SESSION_METADATA_KEY
from qnnbroker.v1 import control_pb2 as pb

# --- tokens

NEEDING_A_SESSION = {
    "CreateBinding": pb.CreateBindingRequest(),
    "ReleaseBinding": pb.ReleaseBindingRequest(),
    "Execute": pb.ExecuteRequest(),
}


@pytest.mark.parametrize("method", NEEDING_A_SESSION)
def test_what_needs_a_session_says_so_without_one(
    shared_broker: BrokerProcess, method: str
) -> None:
    call = getattr(shared_broker.stub, method)
    error = refusal(lambda: call(NEEDING_A_SESSION[method], timeout=PATIENCE_SECONDS))
    assert isinstance(error, NotAllowed)
    assert error.reason == "SESSION_REQUIRED"


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (b"", NotAllowed),
        (b"short", NotAllowed),
        (bytes(17), NotAllowed),
        (bytes(16), NotFound),
        (b"\xff" * 16, NotFound),
    ],
)
def test_a_token_that_is_none_is_refused(
    shared_broker: BrokerProcess, token: bytes, kind: type[BrokerError]
) -> None:
    metadata = ((SESSION_METADATA_KEY, token),)
    for method, request in {**NEEDING_A_SESSION, "Infer": pb.InferRequest(name="x")}.items():
        call = getattr(shared_broker.stub, method)
        error = refusal(lambda c=call, r=request: c(r, metadata=metadata, timeout=9))  # type: ignore[misc]
        assert isinstance(error, kind), method


def test_a_token_is_worthless_once_its_session_has_ended(
    ready: Ready, shared_broker: BrokerProcess
) -> None:
    binding = ready.bind()
    ready.peer.sock.close()
    shared_broker.wait_counters(sessions=0)
    error = ready.peer.refused_call("Execute", pb.ExecuteRequest(binding_id=binding))
    assert isinstance(error, NotFound)
    assert error.reason == "SESSION_UNKNOWN"
    assert ready.peer.refused_load("/x").reason == "SESSION_UNKNOWN"


def test_a_bit_of_the_token_wrong_is_another_token(ready: Ready) -> None:
    good = ready.peer.token
    for byte in range(16):
        ready.peer.token = bytes([*good[:byte], good[byte] ^ 1, *good[byte + 1 :]])
        assert ready.peer.refused_call("Execute", pb.ExecuteRequest()).reason == "SESSION_UNKNOWN"


# --- other people's things


def test_graphs_models_and_bindings_of_another_session_are_not_found(
    make_ready: Callable[[], Ready],
) -> None:
    owner, thief = make_ready(), make_ready()
    bindings = [owner.bind(), owner.bind()]
    request = binding_request(owner.graph_id, thief.inputs, thief.outputs)
    assert thief.peer.refused_call("CreateBinding", request).reason == "GRAPH_UNKNOWN"
    for method in ("DescribeModel", "UnloadModel"):
        message = getattr(pb, f"{method}Request")(model_id=owner.model_id)
        assert thief.peer.refused_call(method, message).reason == "MODEL_UNKNOWN"
    infer = pb.InferRequest(model_id=owner.model_id)
    assert thief.peer.refused_call("Infer", infer).reason == "MODEL_UNKNOWN"
    for method in ("Execute", "ReleaseBinding"):
        message = getattr(pb, f"{method}Request")(binding_id=bindings[1])
        assert thief.peer.refused_call(method, message).reason == "BINDING_UNKNOWN"
    assert owner.peer.execute(bindings[1]).copied_bytes == 0


def test_a_model_that_a_session_holds_is_not_unloaded_by_name_by_others(
    make_ready: Callable[[], Ready], attach: Attach, shared_broker: BrokerProcess
) -> None:
    owner, other = make_ready(), attach()
    name = owner.peer.call("DescribeModel", pb.DescribeModelRequest(model_id=owner.model_id))
    request = pb.UnloadModelRequest(name=name.model.content_hash[:12])
    for error in (
        other.refused_call("UnloadModel", request),
        refusal(lambda: shared_broker.stub.UnloadModel(request, timeout=9)),
    ):
        assert isinstance(error, NotAllowed)
        assert error.reason == "NOT_THE_OWNER"


def test_a_buffer_of_another_session_cannot_be_bound(
    make_ready: Callable[[], Ready],
) -> None:
    owner, thief = make_ready(), make_ready()
    foreign, memory = owner.peer.alloc(4096)  # the owner's second: the thief has only one
    for which in (thief.inputs, thief.outputs):
        before = which[0]
        which[0] = (before[0], foreign, before[2], before[3])
        error = thief.peer.refused_call("CreateBinding", thief.request())
        assert isinstance(error, NotFound)
        assert error.reason == "BUFFER_UNKNOWN"
        which[0] = before
    memory.close()


# --- regions

Change = Callable[[Ready], None]


def at(index: int, **changes: Any) -> Change:
    """Another buffer, offset or size of the input (0, 1) or the output (2)."""

    def change(r: Ready) -> None:
        places = r.outputs if index == 2 else r.inputs
        name, buffer, offset, size = places[index % 2]
        places[index % 2] = (
            changes.get("name", name),
            changes.get("buffer", buffer),
            changes.get("offset", offset),
            changes.get("size", size),
        )

    return change


def drop(index: int) -> Change:
    return lambda r: (r.outputs if index == 2 else r.inputs).pop()  # type: ignore[return-value]


WRONG: dict[str, tuple[Change, type[BrokerError], str]] = {
    "no such buffer": (at(0, buffer=0), NotFound, "BUFFER_UNKNOWN"),
    "a buffer of the future": (at(1, buffer=2 << 32 | 1), NotFound, "BUFFER_UNKNOWN"),
    "the largest id": (at(2, buffer=2**64 - 1), NotFound, "BUFFER_UNKNOWN"),
    "one byte short": (at(0, size=TENSOR_BYTES - 1), InvalidRequest, "TENSOR_MISMATCH"),
    "one byte long": (at(2, size=TENSOR_BYTES + 1), InvalidRequest, "TENSOR_MISMATCH"),
    "no bytes": (at(1, size=0), InvalidRequest, "TENSOR_MISMATCH"),
    "all bytes there are": (at(1, size=2**64 - 1), InvalidRequest, "TENSOR_MISMATCH"),
    "past the end": (at(2, offset=8192 - TENSOR_BYTES + 4), InvalidRequest, "BAD_OFFSET"),
    "at the end": (at(0, offset=8192), InvalidRequest, "BAD_OFFSET"),
    "an offset that wraps": (at(2, offset=2**64 - 4), InvalidRequest, "BAD_OFFSET"),
    "an offset that wraps to good": (
        at(2, offset=2**64 - TENSOR_BYTES),
        InvalidRequest,
        "BAD_OFFSET",
    ),
    "a negative offset of 32 bits": (at(0, offset=2**32 - 4), InvalidRequest, "BAD_OFFSET"),
    "misaligned by one": (at(0, offset=1), InvalidRequest, "BAD_ALIGNMENT"),
    "misaligned by two": (at(2, offset=1026), InvalidRequest, "BAD_ALIGNMENT"),
    "output over input": (at(2, offset=0), InvalidRequest, "OVERLAP"),
    "output over half an input": (
        at(2, offset=TENSOR_BYTES + TENSOR_BYTES // 2),
        InvalidRequest,
        "OVERLAP",
    ),
    "output over the last element": (at(2, offset=2 * TENSOR_BYTES - 4), InvalidRequest, "OVERLAP"),
    "an input is missing": (drop(0), InvalidRequest, "TENSOR_MISMATCH"),
    "the output is missing": (drop(2), InvalidRequest, "TENSOR_MISMATCH"),
    "an unknown name": (at(0, name="c"), InvalidRequest, "TENSOR_MISMATCH"),
    "an empty name": (at(2, name=""), InvalidRequest, "TENSOR_MISMATCH"),
    "the same input twice": (at(0, name="b"), InvalidRequest, "TENSOR_MISMATCH"),
    "one more input": (lambda r: r.inputs.append(("y", *r.outputs[0][1:])), InvalidRequest, ""),
    "one more output": (lambda r: r.outputs.append(("z", r.buffer, 4096, 128)), InvalidRequest, ""),
    "the output twice": (lambda r: r.outputs.append(r.outputs[0]), InvalidRequest, ""),
    "inputs as outputs": (lambda r: r.outputs.extend(r.inputs), InvalidRequest, ""),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_region_is_refused_by_name(
    ready: Ready, shared_broker: BrokerProcess, what: str
) -> None:
    change, kind, reason = WRONG[what]
    change(ready)
    error = ready.peer.refused_call("CreateBinding", ready.request())
    assert isinstance(error, kind)
    assert error.reason == (reason or "TENSOR_MISMATCH")
    assert shared_broker.counters()["bindings"] == 0


def test_inputs_may_share_bytes_and_tensors_may_touch(ready: Ready) -> None:
    expected = ready.fill(3)
    name, buffer, _, size = ready.inputs[1]
    assert ready.peer.execute(ready.bind()).copied_bytes == 0
    assert ready.output() == expected
    ready.inputs[1] = (name, buffer, 0, size)
    ready.peer.execute(ready.bind())
    a = np.frombuffer(ready.memory[:TENSOR_BYTES], np.float32)
    assert ready.output() == (a + a).tobytes()
    ready.outputs[0] = ("y", buffer, 8192 - TENSOR_BYTES, TENSOR_BYTES)
    ready.peer.execute(ready.bind())
    assert bytes(ready.memory[8192 - TENSOR_BYTES :]) == (a + a).tobytes()


@pytest.mark.parametrize("id", [0, 1, 2**64 - 1])
def test_a_graph_that_is_none_cannot_be_bound(ready: Ready, id: int) -> None:
    ready.graph_id = id
    error = ready.peer.refused_call("CreateBinding", ready.request())
    assert isinstance(error, NotFound)
    assert error.reason == "GRAPH_UNKNOWN"


def test_a_session_has_no_more_bindings_than_it_may(ready: Ready) -> None:
    bindings = [ready.bind() for _ in range(20)]
    error = ready.peer.refused_call("CreateBinding", ready.request())
    assert isinstance(error, LimitExceeded)
    assert error.reason == "BINDINGS"
    ready.peer.call("ReleaseBinding", pb.ReleaseBindingRequest(binding_id=bindings[3]))
    ready.bind()
