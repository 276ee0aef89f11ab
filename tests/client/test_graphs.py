# SPDX-License-Identifier: Apache-2.0
"""Graph.run: what is checked before anything leaves the process, and what comes back."""

import threading
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

from qnnbroker.client import (
    BackendError,
    DeadlineExpired,
    Graph,
    InvalidRequest,
    LeaseRevoked,
    Session,
    TensorSpec,
)
from qnnbroker.native.fake import FakeGraph, FakeTensor

from .conftest import BrokerProcess, MakeModel, copier, held

A = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def graph(session: Session, make_model: MakeModel) -> Graph:
    """y = a + b, float32[2, 3]."""
    return session.load(make_model()).graph


def test_a_graph_tells_its_tensors(graph: Graph) -> None:
    assert list(graph.inputs) == ["a", "b"]
    assert graph.outputs == {"y": TensorSpec("y", np.dtype(np.float32), (2, 3))}
    assert graph.inputs["a"].size_bytes == 24
    assert repr(graph) == "<Graph 'add': a: float32[2, 3], b: float32[2, 3] -> y: float32[2, 3]>"
    with pytest.raises(TypeError):
        graph.inputs["c"] = graph.inputs["a"]  # type: ignore[index]


def test_run_gives_fresh_arrays(graph: Graph) -> None:
    first = graph.run({"a": A, "b": A})
    second = graph.run({"a": A, "b": -A})
    np.testing.assert_array_equal(first["y"], 2 * A)
    assert not second["y"].any()
    first["y"][:] = 0  # writable, and nobody else's
    assert list(first) == ["y"]


def test_run_uses_one_binding_again_and_again(session: Session, graph: Graph) -> None:
    for _ in range(3):
        graph.run({"a": A, "b": A})
    assert held(session)["bindings"] == 1
    assert held(session)["buffers"] == 1


def test_arrays_of_any_strides_are_taken(graph: Graph) -> None:
    turned = np.asfortranarray(A)
    sparse = np.repeat(A, 2, axis=1)[:, ::2]
    backwards = A[::-1, ::-1][::-1, ::-1]
    assert not turned.flags.c_contiguous
    assert not sparse.flags.c_contiguous
    for array in (turned, sparse, backwards, np.broadcast_to(np.float32(1), (2, 3))):
        np.testing.assert_array_equal(graph.run({"a": array, "b": A})["y"], array + A)


@pytest.mark.parametrize(
    ("inputs", "message", "tensor"),
    [
        ({"a": A}, r"'add' misses its input 'b'; its inputs are 'a', 'b'", "b"),
        ({}, r"misses its input 'a', 'b'", "a"),
        ({"a": A, "b": A, "c": A}, r"'add' has no input 'c'; its inputs are 'a', 'b'", "c"),
        ({"a": A, "B": A}, r"has no input 'B'", "B"),
        ({"a": A, "b": A.astype("f8")}, r"'b' .*wants float32\[2, 3\], found float64\[2, 3\]", "b"),
        ({"a": A, "b": A.astype(">f4")}, r"found >f4\[2, 3\]", "b"),
        ({"a": A, "b": A.T}, r"wants float32\[2, 3\], found float32\[3, 2\]", "b"),
        ({"a": A, "b": A[None]}, r"found float32\[1, 2, 3\]", "b"),
        ({"a": A, "b": np.float32(1)}, r"found float32\[\]", "b"),
        ({"a": A, "b": A.tolist()}, r"found float64\[2, 3\]", "b"),
        ({"a": A.view("i4"), "b": A}, r"'a' .*found int32", "a"),
        ({"a": None, "b": A}, r"'a' .*found object\[\]", "a"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_before_anything_is_sent(
    session: Session, graph: Graph, inputs: dict[str, Any], message: str, tensor: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as info:
        graph.run(inputs)
    assert info.value.reason == "TENSOR_MISMATCH"
    assert info.value.ids["tensor"] == tensor
    assert info.value.ids["graph"] == "add"
    assert held(session)["bindings"] == 0


DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64"]


@pytest.mark.parametrize(
    ("fake", "dtype"), [("bool8", "bool"), *((name, name) for name in (*DTYPES, *FLOATS))]
)
def test_each_dtype_goes_there_and_back(
    session: Session, make_model: MakeModel, fake: str, dtype: str
) -> None:
    graph = session.load(make_model("copies", copier("g", fake, (2, 2)))).graph
    x = np.array([[0, 1], [1, 0]]).astype(dtype)
    y = graph.run({"x": x})["y"]
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


def test_all_outputs_come_back_in_the_order_of_the_graph(
    session: Session, make_model: MakeModel
) -> None:
    x, y, z = (FakeTensor(name, "int32", (3,)) for name in "xyz")
    spec = FakeGraph("g", (x,), (z, y), ops=(("copy", "x", "y"), ("add", "x", "x", "z")))
    results = session.load(make_model("two", spec)).graph.run({"x": np.arange(3, dtype=np.int32)})
    assert list(results) == ["z", "y"]
    assert results["y"].tolist() == [0, 1, 2]
    assert results["z"].tolist() == [0, 2, 4]


HANG = "hang=graphExecute:*"
X = np.array([1, 2], np.float32)


def test_threads_run_at_once_each_with_its_own_binding(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    graph = session.load(make_model("copies", copier("g"))).graph
    broker.faults.set(HANG)
    results: dict[int, float] = {}

    def run(number: int) -> None:
        results[number] = graph.run({"x": np.array([0, number], np.float32)})["y"][1]

    threads = [threading.Thread(target=run, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: held(session)["in_flight"] == 6, "six runs are in flight")
    assert held(session)["bindings"] == 6
    broker.faults.set("unhang")
    for thread in threads:
        thread.join()
    assert results == {n: n for n in range(6)}
    assert held(session)["bindings"] == 4  # what stays ready


def test_a_run_that_fails_says_what_the_broker_said(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    graph = session.load(make_model("copies", copier("g"))).graph
    broker.faults.set("fail=graphExecute:1:1004")
    with pytest.raises(BackendError, match="1004"):
        graph.run({"x": X})
    assert held(session)["bindings"] == 0
    assert graph.run({"x": X})["y"].tolist() == X.tolist()


def test_a_late_run_does_not_leave_its_binding_to_the_next(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    graph = session.load(make_model("copies", copier("g"))).graph
    broker.faults.set(HANG)
    with pytest.raises(DeadlineExpired) as info:
        graph.run({"x": X}, timeout=0.5)
    assert info.value.reason in ("CALL", "RUNNING")
    assert held(session)["bindings"] == 0
    broker.faults.set("unhang")
    assert graph.run({"x": -X})["y"].tolist() == [-1, -2]


def test_an_unloaded_model_runs_nothing_more(session: Session, graph: Graph) -> None:
    graph.run({"a": A, "b": A})
    graph.model.unload()
    assert held(session)["bindings"] == 0
    assert held(session)["buffers"] == 0
    for use in (lambda: graph.run({"a": A, "b": A}), graph.bind):
        with pytest.raises(LeaseRevoked, match="model 'adder' is unloaded"):
            use()


def test_unloading_waits_for_runs_under_way_and_they_get_their_results(
    broker: BrokerProcess, session: Session, make_model: MakeModel
) -> None:
    graph = session.load(make_model("copies", copier("g"))).graph
    broker.faults.set(HANG)
    results: list[list[float]] = []
    runner = threading.Thread(target=lambda: results.append(graph.run({"x": X})["y"].tolist()))
    runner.start()
    wait_until(lambda: held(session)["in_flight"] == 1, "the run is in flight")
    unloader = threading.Thread(target=graph.model.unload)
    unloader.start()
    wait_until(lambda: graph.model.unloaded, "the unloading has begun")
    assert held(session)["models"] == 1
    broker.faults.set("unhang")
    for thread in (runner, unloader):
        thread.join()
    assert results == [X.tolist()]
    assert held(session)["bindings"] == held(session)["buffers"] == held(session)["models"] == 0
