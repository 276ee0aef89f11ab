# SPDX-License-Identifier: Apache-2.0
"""Real models give through the broker, byte for byte, what they give without it."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import StartBroker
from tests.raw_peer import RawPeer
from tests.reference_runs import Tensors, reference

import zoo
from qnnbroker.client import connect
from qnnbroker.protos.tensors import TensorSpec, dtype_number
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.qnn,
    pytest.mark.skipif(
        importlib.util.find_spec("onnxruntime_qnn") is None,
        reason="onnxruntime-qnn is not installed",
    ),
]

Outputs = dict[str, bytes]
MAX_CASES = 3


def by_execute(peer: RawPeer, graph: types_pb2.GraphSpec, feeds: Tensors) -> Outputs:
    """Over shared memory: a buffer for every tensor, at an odd but aligned offset."""
    places: dict[str, tuple[str, int, int, int]] = {}
    memories: dict[str, Any] = {}
    for spec in (*graph.inputs, *graph.outputs):
        buffer, memories[spec.name] = peer.alloc(spec.size_bytes + 64)
        places[spec.name] = (spec.name, buffer, 64, spec.size_bytes)
    for name, array in feeds.items():
        memories[name][64 : 64 + array.nbytes] = array.tobytes()
    binding = peer.bind(
        graph.graph_id,
        [places[s.name] for s in graph.inputs],
        [places[s.name] for s in graph.outputs],
    )
    peer.execute(binding)
    outputs = {s.name: bytes(memories[s.name][64 : 64 + s.size_bytes]) for s in graph.outputs}
    for name, array in feeds.items():  # a run leaves its inputs alone
        assert bytes(memories[name][64 : 64 + array.nbytes]) == array.tobytes()
    for memory in memories.values():
        memory.close()
    return outputs


def by_infer(peer: RawPeer, model_id: int, feeds: Tensors) -> Outputs:
    """With the tensors in the messages."""
    inputs = [
        types_pb2.InlineTensor(
            name=name,
            dtype=dtype_number(array.dtype),  # type: ignore[arg-type]
            shape=array.shape,
            data=array.tobytes(),
        )
        for name, array in feeds.items()
    ]
    answer = peer.call("Infer", pb.InferRequest(model_id=model_id, inputs=inputs), 60)
    return {o.name: o.data for o in answer.outputs}


@pytest.mark.parametrize("name", ["silero_vad", "magika_fused", "blazeface", "ocr_cls"])
def test_results_are_those_of_the_library_and_of_onnx_runtime(
    start_broker: StartBroker, tmp_path: Path, name: str
) -> None:
    wrapper = zoo.compiled(name)
    cases = zoo.model(name).cases()[:MAX_CASES]
    feeds = [{k: np.ascontiguousarray(v) for k, v in c.feeds.items()} for c in cases]
    by_ort = reference("ort", wrapper, feeds, tmp_path)
    assert reference("native", wrapper, feeds, tmp_path) == by_ort
    broker = start_broker(backend="qnn")
    before = broker.gauges()
    with (
        RawPeer(broker.attach_path, broker.stub) as peer,
        connect(broker.runtime_dir) as session,
        session.load(wrapper) as loaded,
    ):
        model = peer.load(wrapper).model
        (graph,) = model.graphs
        for case, feed, expected in zip(cases, feeds, by_ort, strict=True):
            assert by_execute(peer, graph, feed) == expected
            assert by_infer(peer, model.model_id, feed) == expected
            outputs = loaded.graph.run(feed)
            assert {k: v.tobytes() for k, v in outputs.items()} == expected
            right, answer = case.check(outputs)
            assert right, f"{case.label}: {answer}"
        for spec in graph.outputs:
            assert TensorSpec.from_proto(spec).size_bytes == len(by_ort[0][spec.name])
        assert broker.counters()["contexts"] == 1
    broker.wait_gauges(before)
