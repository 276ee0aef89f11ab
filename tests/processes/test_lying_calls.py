# SPDX-License-Identifier: Apache-2.0
"""Peers that lie in gRPC calls: tokens, ids, regions, tensors and paths that are not theirs."""

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import SHAPE, TENSOR_BYTES, MakeModel, mixed, numbers
from tests.processes.conftest import Attach
from tests.raw_peer import RawPeer, binding_request, refusal
from tests.waiting import PATIENCE_SECONDS

from qnnbroker.protos.errors import (
    BrokerError,
    InvalidRequest,
    LeaseRevoked,
    LimitExceeded,
    NotAllowed,
    NotFound,
    Unsupported,
)
from qnnbroker.protos.status import SESSION_METADATA_KEY
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2

Place = tuple[str, int, int, int]


@dataclass
class Ready:
    """A client with a model, a buffer and good places in it."""

    peer: RawPeer
    graph_id: int
    model_id: int
    buffer: int
    memory: Any
    inputs: list[Place] = field(init=False)
    outputs: list[Place] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = [
            ("a", self.buffer, 0, TENSOR_BYTES),
            ("b", self.buffer, TENSOR_BYTES, TENSOR_BYTES),
        ]
        self.outputs = [("y", self.buffer, 2 * TENSOR_BYTES, TENSOR_BYTES)]

    def request(self) -> pb.CreateBindingRequest:
        return binding_request(self.graph_id, self.inputs, self.outputs)

    def bind(self) -> int:
        return self.peer.bind(self.graph_id, self.inputs, self.outputs)

    def fill(self, seed: int) -> bytes:
        """Writes inputs; the output they must give."""
        a, b = numbers(seed)
        self.memory[: 2 * TENSOR_BYTES] = a.tobytes() + b.tobytes()
        return bytes((a + b).tobytes())

    def output(self) -> bytes:
        return bytes(self.memory[2 * TENSOR_BYTES : 3 * TENSOR_BYTES])


@pytest.fixture
def make_ready(attach: Attach, adder_path: Path) -> Iterator[Callable[[], Ready]]:
    made: list[Ready] = []

    def make() -> Ready:
        peer = attach()
        model = peer.load(adder_path).model
        buffer, memory = peer.alloc(8192)
        made.append(Ready(peer, model.graphs[0].graph_id, model.model_id, buffer, memory))
        return made[-1]

    yield make
    for ready in made:
        ready.memory.close()


@pytest.fixture
def ready(make_ready: Callable[[], Ready]) -> Ready:
    return make_ready()


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


# --- bindings and what they stand on


def test_a_released_binding_is_stale_for_ever(ready: Ready) -> None:
    old = ready.bind()
    ready.peer.call("ReleaseBinding", pb.ReleaseBindingRequest(binding_id=old))
    new = ready.bind()
    for method in ("Execute", "ReleaseBinding"):
        message = getattr(pb, f"{method}Request")(binding_id=old)
        error = ready.peer.refused_call(method, message)
        assert isinstance(error, LeaseRevoked)
        assert error.reason == "STALE_GENERATION"
    ready.peer.execute(new)


def test_a_binding_keeps_the_memory_of_a_released_buffer(
    ready: Ready, shared_broker: BrokerProcess
) -> None:
    binding = ready.bind()
    mappings = shared_broker.counters()["mappings"]
    ready.peer.release(ready.buffer)
    error = ready.peer.refused_call("CreateBinding", ready.request())
    assert isinstance(error, LeaseRevoked)
    for seed in range(3):
        expected = ready.fill(seed)
        ready.peer.execute(binding)
        assert ready.output() == expected
    counters = shared_broker.counters()
    assert (counters["buffers"], counters["mappings"]) == (0, mappings)
    ready.peer.call("ReleaseBinding", pb.ReleaseBindingRequest(binding_id=binding))
    shared_broker.wait_counters(mappings=mappings - 1)


def test_a_binding_keeps_the_context_of_an_unloaded_model(
    ready: Ready, shared_broker: BrokerProcess
) -> None:
    binding = ready.bind()
    ready.peer.call("UnloadModel", pb.UnloadModelRequest(model_id=ready.model_id))
    for method in ("UnloadModel", "DescribeModel"):
        message = getattr(pb, f"{method}Request")(model_id=ready.model_id)
        assert ready.peer.refused_call(method, message).reason == "STALE_GENERATION"
    assert ready.peer.refused_call("CreateBinding", ready.request()).reason == "STALE_GENERATION"
    expected = ready.fill(5)
    ready.peer.execute(binding)
    assert ready.output() == expected
    assert shared_broker.counters()["contexts"] == 1
    ready.peer.call("ReleaseBinding", pb.ReleaseBindingRequest(binding_id=binding))
    shared_broker.wait_counters(contexts=0, contexts_closing=0, native_contexts=0)


# --- inline tensors


def inline(name: str, array: Any, **changes: Any) -> types_pb2.InlineTensor:
    values = {
        "name": name,
        "dtype": types_pb2.DATA_TYPE_FLOAT32,
        "shape": array.shape,
        "data": array.tobytes(),
    }
    return types_pb2.InlineTensor(**{**values, **changes})


A, B = numbers(0)
WRONG_INLINE: dict[str, tuple[list[types_pb2.InlineTensor], type[BrokerError]]] = {
    "nothing": ([], InvalidRequest),
    "one missing": ([inline("a", A)], InvalidRequest),
    "one too many": ([inline("a", A), inline("b", B), inline("c", B)], InvalidRequest),
    "one twice": ([inline("a", A), inline("a", A)], InvalidRequest),
    "a byte short": ([inline("a", A), inline("b", B, data=bytes(127))], InvalidRequest),
    "a byte long": ([inline("a", A), inline("b", B, data=bytes(129))], InvalidRequest),
    "no bytes": ([inline("a", A, data=b""), inline("b", B)], InvalidRequest),
    "another shape": ([inline("a", A, shape=(8, 4)), inline("b", B)], InvalidRequest),
    "a flat shape": ([inline("a", A, shape=(32,)), inline("b", B)], InvalidRequest),
    "another dtype": (
        [inline("a", A, dtype=types_pb2.DATA_TYPE_INT32), inline("b", B)],
        InvalidRequest,
    ),
    "no dtype": ([inline("a", A, dtype=0), inline("b", B)], Unsupported),
    "a dtype of the future": ([inline("a", A, dtype=77), inline("b", B)], Unsupported),
}


@pytest.mark.parametrize("what", WRONG_INLINE)
def test_wrong_inline_tensors_are_refused(ready: Ready, what: str) -> None:
    inputs, kind = WRONG_INLINE[what]
    error = ready.peer.refused_call(
        "Infer", pb.InferRequest(model_id=ready.model_id, inputs=inputs)
    )
    assert isinstance(error, kind)
    assert error.reason == ("DTYPE" if kind is Unsupported else "TENSOR_MISMATCH")


def test_infer_wants_a_model_and_one_of_its_graphs(ready: Ready) -> None:
    inputs = [inline("a", A), inline("b", B)]
    for request, reason in [
        (pb.InferRequest(inputs=inputs), "INVALID_ARGUMENT"),
        (pb.InferRequest(name="nobody", inputs=inputs), "MODEL_UNKNOWN"),
        (pb.InferRequest(model_id=99, inputs=inputs), "MODEL_UNKNOWN"),
        (pb.InferRequest(model_id=ready.model_id, graph="x", inputs=inputs), "GRAPH_UNKNOWN"),
    ]:
        assert ready.peer.refused_call("Infer", request).reason == reason
    good = pb.InferRequest(model_id=ready.model_id, graph="add", inputs=inputs)
    answer = ready.peer.call("Infer", good)
    assert answer.outputs[0].data == (A + B).tobytes()
    assert tuple(answer.outputs[0].shape) == SHAPE
    assert answer.timing.copied_bytes == 3 * TENSOR_BYTES


def test_tensors_of_every_width_go_through(attach: Attach, make_model: MakeModel) -> None:
    peer = attach()
    model = peer.load(make_model("mixed", mixed())).model
    x, h = np.array([1, 2, 255], np.uint8), np.arange(5, dtype=np.float16)
    l = np.array([2**40, -3], np.int64)  # noqa: E741
    answer = peer.call(
        "Infer",
        pb.InferRequest(
            model_id=model.model_id,
            inputs=[
                inline("l", l, dtype=types_pb2.DATA_TYPE_INT64),
                inline("x", x, dtype=types_pb2.DATA_TYPE_UINT8),
                inline("h", h, dtype=types_pb2.DATA_TYPE_FLOAT16),
            ],
        ),
    )
    assert [o.name for o in answer.outputs] == ["z", "s"]
    assert answer.outputs[0].data == x.tobytes()
    assert answer.outputs[1].data == struct.pack("<q", 2**40 - 3)


# --- paths


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("", InvalidRequest, "INVALID_ARGUMENT"),
        ("model.bin", InvalidRequest, "INVALID_ARGUMENT"),
        ("../model.bin", InvalidRequest, "INVALID_ARGUMENT"),
        ("/nowhere/model.bin", NotFound, "FILE_MISSING"),
        ("/nowhere/" + "ü漢" * 700, NotFound, "FILE_MISSING"),
        ("/nowhere/" + "x" * 5000, InvalidRequest, "BAD_FILE"),
        ("/with\0nul", InvalidRequest, "BAD_FILE"),
        ("/", InvalidRequest, "BAD_FILE"),
        ("/dev/zero", InvalidRequest, "BAD_FILE"),
        ("/proc/self/mem", InvalidRequest, "BAD_FILE"),
    ],
)
def test_a_path_that_names_no_model_is_refused(
    attach: Attach, path: str, kind: type[BrokerError], reason: str
) -> None:
    error = attach().refused_load(path)
    assert isinstance(error, (kind, InvalidRequest))
    assert error.reason in (reason, "BAD_FILE")


@pytest.mark.parametrize("content", [b"x", bytes(5000), os.urandom(9000), b"\x08\x01" * 3000])
def test_a_file_that_is_no_model_is_refused(attach: Attach, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    error = attach().refused_load(path)
    assert isinstance(error, (InvalidRequest, Unsupported)), repr(error)


def test_a_cut_binary_is_refused(attach: Attach, adder_path: Path) -> None:
    whole = adder_path.read_bytes()
    for length in (1, 100, len(whole) // 2, len(whole) - 1):
        adder_path.write_bytes(whole[:length])
        error = attach().refused_load(adder_path)
        assert isinstance(error, InvalidRequest)
        assert error.reason == "BAD_FILE"
