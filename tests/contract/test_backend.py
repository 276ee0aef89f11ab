# SPDX-License-Identifier: Apache-2.0
"""The contract that every backend keeps, on the fake QNN library and on the real one."""

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.fake_models import adder, numbers
from tests.implementations import FAKE_AND_REAL
from tests.native.qnn_models import compiled
from tests.waiting import wait_until

from qnnbroker.broker.backends.base import (
    Backend,
    BackendContext,
    BackendGraph,
    ClosableRunnable,
    Span,
)
from qnnbroker.broker.backends.opening import open_backend
from qnnbroker.broker.config import BrokerConfig
from qnnbroker.native.executor import Executor
from qnnbroker.native.fake import binary_bytes
from qnnbroker.native.region import Region
from qnnbroker.protos.errors import BrokerError, InvalidRequest, VersionMismatch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Implementation:
    """A backend with a model of one graph whose answer is known."""

    backend: Backend
    binary: bytes
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


def fake() -> Implementation:
    a, b = numbers(11)
    return Implementation(
        open_backend(BrokerConfig(runtime_dir="/unused", backend="fake")),
        binary_bytes([adder()], soc=60, arch=73),
        {"a": a, "b": b},
        {"y": a + b},
    )


def real() -> Implementation:
    model = compiled("dense")
    backend = open_backend(BrokerConfig(runtime_dir="/unused", backend="qnn"))
    return Implementation(backend, model.binary, model.inputs, model.outputs)


@pytest.fixture(
    scope="module",
    params=FAKE_AND_REAL,
)
def made(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    implementation = {"fake": fake, "real": real}[request.param]()
    yield implementation
    implementation.backend.close()
    implementation.backend.close()


@pytest.fixture
def context(made: Implementation, no_leaks: None) -> Iterator[BackendContext]:
    spec = made.backend.read_spec(made.binary)
    context = made.backend.create_context(made.binary, spec)
    yield context
    context.close()


@pytest.fixture
def graph(context: BackendContext) -> BackendGraph:
    (graph,) = context.graphs.values()
    return graph


class Bound:
    """A graph over arrays of its own."""

    def __init__(self, graph: BackendGraph, inputs: Mapping[str, Array]) -> None:
        self.inputs = [np.array(inputs[s.name]) for s in graph.spec.inputs]
        self.outputs = [np.zeros(s.shape, s.dtype) for s in graph.spec.outputs]
        ins: list[Span] = [(a.data, 0, a.nbytes) for a in self.inputs]
        outs: list[Span] = [(a.data, 0, a.nbytes) for a in self.outputs]
        self.runnable = graph.bind(ins, outs)


def run(runnable: ClosableRunnable, times: int = 1) -> list[tuple[int, int]]:
    """Status and QNN code of each execute, done by an executor like the broker's."""
    executor = Executor()
    executor.start()
    session = executor.session(1)
    binding = session.bind(runnable)
    done: list[tuple[int, int]] = []
    for ticket in range(times):
        assert binding.submit(ticket) == 0

    def collect() -> bool:
        done.extend((e[3], e[4]) for e in executor.drain() if e[0] == "completed")
        return len(done) == times

    wait_until(collect, f"{times} executes")
    binding.release()
    session.close()
    wait_until(lambda: ("session_idle", session) in executor.drain(), "the session is gone")
    binding.drop_runnable()
    executor.close()
    return done


def test_it_says_what_it_is(made: Implementation) -> None:
    info = made.backend.info
    assert info.name in ("qnn", "fake")
    assert info.provider
    assert info.build_id
    assert info.backend_id == 6
    assert os.path.isdir(info.library_dir)
    for version in (info.core_api_version, info.backend_api_version, info.system_api_version):
        assert len([int(n) for n in version.split(".")]) == 3
    assert (info.soc_model, info.dsp_arch) != (0, 0)


def test_a_binary_says_what_it_is_before_it_is_loaded(made: Implementation) -> None:
    spec = made.backend.read_spec(made.binary)
    (graph,) = spec.graphs
    assert {t.name: t.shape for t in graph.inputs} == {k: v.shape for k, v in made.inputs.items()}
    assert {t.name: t.dtype for t in graph.inputs} == {k: v.dtype for k, v in made.inputs.items()}
    assert {t.name: t.size_bytes for t in graph.outputs} == {
        k: v.nbytes for k, v in made.outputs.items()
    }
    assert (spec.soc_model, spec.backend_id) == (60, 6)
    assert 0 < spec.blob_bytes <= len(made.binary)
    assert spec.shared_weight_bytes <= spec.weight_bytes
    assert made.backend.read_spec(memoryview(made.binary)) == spec


@pytest.mark.parametrize("what", ["empty", "short", "zeros", "noise", "half", "text"])
def test_what_is_no_binary_is_refused(made: Implementation, what: str) -> None:
    data = {
        "empty": b"",
        "short": b"Q",
        "zeros": bytes(8192),
        "noise": np.random.default_rng(5).bytes(9000),
        "half": made.binary[: len(made.binary) // 2],
        "text": b"not a context binary\n" * 300,
    }[what]
    with pytest.raises((InvalidRequest, VersionMismatch)):
        made.backend.read_spec(data)


def test_its_graphs_are_those_of_the_binary(made: Implementation, context: BackendContext) -> None:
    spec = made.backend.read_spec(made.binary)
    assert {name: g.spec for name, g in context.graphs.items()} == {g.name: g for g in spec.graphs}


def test_a_graph_runs_and_counts(made: Implementation, graph: BackendGraph) -> None:
    bound = Bound(graph, made.inputs)
    assert run(bound.runnable, 3) == [(0, 0)] * 3
    for spec, array in zip(graph.spec.outputs, bound.outputs, strict=True):
        assert array.tobytes() == made.outputs[spec.name].tobytes()
    for spec, array in zip(graph.spec.inputs, bound.inputs, strict=True):
        assert array.tobytes() == made.inputs[spec.name].tobytes()
    counted = graph.statistics()
    assert (counted["run_count"], counted["error_count"]) == (3, 0)
    assert 0 < counted["execute_ns_min"] <= counted["execute_ns_max"]
    assert counted["execute_ns_total"] >= 3 * counted["execute_ns_min"]
    bound.runnable.close()


def test_spans_of_shared_memory_are_used_in_place(
    made: Implementation, graph: BackendGraph
) -> None:
    with Region.create(1 << 16) as region:
        spans, offset = [], 128
        for spec in (*graph.spec.inputs, *graph.spec.outputs):
            spans.append((region, offset, spec.size_bytes))
            offset += (spec.size_bytes + 127) // 128 * 128 + 128
        count = len(graph.spec.inputs)
        for (_, start, size), spec in zip(spans, graph.spec.inputs, strict=False):
            with region.view(start, size) as view:
                view[:] = made.inputs[spec.name].tobytes()
        runnable = graph.bind(spans[:count], spans[count:])
        assert run(runnable) == [(0, 0)]
        with pytest.raises(BufferError):
            region.close()
        runnable.close()
        runnable.close()
        assert runnable.closed
        for (_, start, size), spec in zip(spans[count:], graph.spec.outputs, strict=True):
            with region.view(start, size) as view:
                assert bytes(view) == made.outputs[spec.name].tobytes()
            with region.view(start + size, 128) as behind:
                assert not any(behind)  # nothing was written past the end


def wrong_spans(graph: BackendGraph, what: str) -> tuple[list[Any], list[Any]]:
    """Good spans but for one thing."""
    memory = [bytearray(s.size_bytes + 64) for s in (*graph.spec.inputs, *graph.spec.outputs)]
    sizes = [s.size_bytes for s in (*graph.spec.inputs, *graph.spec.outputs)]
    spans: list[Any] = [(m, 0, n) for m, n in zip(memory, sizes, strict=True)]
    count = len(graph.spec.inputs)
    first, last = spans[0], spans[-1]
    changed: dict[str, tuple[int, Any]] = {
        "a byte less": (0, (first[0], 0, first[2] - 1)),
        "a byte more": (-1, (last[0], 0, last[2] + 1)),
        "past the end": (-1, (last[0], 65, last[2])),
        "before the start": (0, (first[0], -1, first[2])),
        "a huge offset": (0, (first[0], 2**63 - 1, first[2])),
        "misaligned": (0, (first[0], 1, first[2])),
        "an output that is read-only": (-1, (bytes(last[0]), 0, last[2])),
        "an output over an input": (-1, first),
        "no buffer": (0, (None, 0, first[2])),
        "a hole in it": (0, (memoryview(bytearray(2 * first[2]))[::2], 0, first[2])),
    }
    if what == "one less":
        return spans[:count], spans[count:-1]
    if what == "one more":
        return [*spans[:count], first], spans[count:]
    index, span = changed[what]
    spans[index] = span
    return spans[:count], spans[count:]


@pytest.mark.parametrize(
    "what",
    [
        "a byte less",
        "a byte more",
        "past the end",
        "before the start",
        "a huge offset",
        "misaligned",
        "an output that is read-only",
        "an output over an input",
        "no buffer",
        "a hole in it",
        "one less",
        "one more",
    ],
)
def test_spans_that_do_not_fit_are_refused(graph: BackendGraph, what: str) -> None:
    inputs, outputs = wrong_spans(graph, what)
    if what == "an output over an input" and inputs[0][2] != outputs[-1][2]:
        outputs[-1] = (inputs[0][0], 0, outputs[-1][2])
    with pytest.raises((ValueError, OverflowError)):
        graph.bind(inputs, outputs)


def test_two_contexts_of_one_binary_are_independent(
    made: Implementation, context: BackendContext, graph: BackendGraph
) -> None:
    spec = made.backend.read_spec(made.binary)
    other = made.backend.create_context(made.binary, spec)
    (twin,) = other.graphs.values()
    bound, theirs = Bound(graph, made.inputs), Bound(twin, made.inputs)
    assert run(theirs.runnable) == [(0, 0)]
    theirs.runnable.close()
    other.close()
    other.close()
    assert run(bound.runnable) == [(0, 0)]
    bound.runnable.close()
    for ours, its in zip(bound.outputs, theirs.outputs, strict=True):
        assert ours.tobytes() == its.tobytes()


def test_a_context_is_not_freed_under_a_runnable(
    made: Implementation, graph: BackendGraph, context: BackendContext
) -> None:
    bound = Bound(graph, made.inputs)
    with pytest.raises(BufferError):
        context.close()
    assert run(bound.runnable) == [(0, 0)]
    bound.runnable.close()


def test_a_binary_may_vanish_once_it_is_loaded(made: Implementation, no_leaks: None) -> None:
    data = bytearray(made.binary)
    context = made.backend.create_context(data, made.backend.read_spec(data))
    data[:] = bytes(len(data))
    data.clear()  # would be a BufferError if somebody still exported it
    (graph,) = context.graphs.values()
    bound = Bound(graph, made.inputs)
    assert run(bound.runnable) == [(0, 0)]
    bound.runnable.close()
    context.close()
    for spec, array in zip(graph.spec.outputs, bound.outputs, strict=True):
        assert array.tobytes() == made.outputs[spec.name].tobytes()


def test_bytes_that_are_not_those_of_the_spec_are_an_error_of_ours(made: Implementation) -> None:
    spec = made.backend.read_spec(made.binary)
    with pytest.raises(BrokerError):
        made.backend.create_context(made.binary[:64], spec)


def test_several_threads_load_and_run_at_once(made: Implementation, no_leaks: None) -> None:
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(2):
                spec = made.backend.read_spec(made.binary)
                context = made.backend.create_context(made.binary, spec)
                (graph,) = context.graphs.values()
                bound = Bound(graph, made.inputs)
                wrong.extend(s for s in run(bound.runnable, 2) if s != (0, 0))
                bound.runnable.close()
                context.close()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_its_log_can_be_drained_at_any_time(made: Implementation) -> None:
    assert made.backend.log_fileno() >= -1
    for level, text in made.backend.drain_log():
        assert isinstance(level, int)
        assert isinstance(text, str)
