# SPDX-License-Identifier: Apache-2.0
"""Bindings that outlive what they stand on, tensors that do not fit, paths of no models."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.broker_process import BrokerProcess
from tests.fake_models import SHAPE, TENSOR_BYTES, MakeModel, mixed, numbers
from tests.processes.conftest import Attach
from tests.processes.ready import Ready

from qnnbroker.protos.errors import (
    BrokerError,
    InvalidRequest,
    LeaseRevoked,
    NotFound,
    Unsupported,
)
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2

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
