# SPDX-License-Identifier: Apache-2.0
"""The arena of a session: growth, reuse, fragments, limits, and who may still use what."""

import gc
import os

import numpy as np
import pytest
from tests.waiting import wait_until

from qnnbroker.client import DeadlineExpired, Graph, Session, connect
from qnnbroker.client.arena import ALIGNMENT_BYTES, FIRST_BYTES, LARGEST_BYTES, Span, aligned

from .conftest import BrokerProcess, MakeModel, copier, held


@pytest.fixture
def graph(session: Session, make_model: MakeModel) -> Graph:
    return session.load(make_model("copies", copier("g", shape=(32,)))).graph


def take(session: Session, size: int) -> Span:
    return session.arena.take(session, size)


def test_sizes_and_places_are_aligned(session: Session) -> None:
    spans = [take(session, size) for size in (1, 128, 129, 0)]
    assert [s.offset for s in spans] == [0, 128, 256, 512]
    assert all(s.buffer is spans[0].buffer for s in spans)
    assert aligned(1) == aligned(ALIGNMENT_BYTES) == ALIGNMENT_BYTES
    for span in spans:
        span.close()
    assert held(session)["buffers"] == 0


def test_a_thousand_bindings_take_a_handful_of_buffers(
    broker: BrokerProcess, session: Session, graph: Graph
) -> None:
    before = len(os.listdir(f"/proc/{broker.process.pid}/fd"))
    bindings = [graph.bind() for _ in range(1000)]
    after = len(os.listdir(f"/proc/{broker.process.pid}/fd"))
    statistics = session.arena.statistics()
    assert held(session)["bindings"] == 1000
    assert held(session)["buffers"] == statistics.buffers <= 4
    assert after - before <= 4
    assert statistics.spans == 1000
    assert statistics.used_bytes == 1000 * 2 * ALIGNMENT_BYTES
    assert statistics.total_bytes == statistics.used_bytes + statistics.free_bytes
    for i, binding in enumerate(bindings):
        binding.inputs["x"][:] = i
    for i in (0, 1, 500, 999):
        bindings[i].run()
        assert (bindings[i].outputs["y"] == i).all()
    for binding in bindings:
        binding.close()
    assert held(session)["buffers"] == 0


def test_spans_are_reused_and_neighbours_become_one(session: Session) -> None:
    kept = take(session, 128)
    spans = [take(session, 1024) for _ in range(10)]
    for span in spans[1:9:2]:
        span.close()
    fragmented = session.arena.statistics()
    assert fragmented.largest_free_bytes < fragmented.free_bytes
    assert take(session, 1024).offset == spans[1].offset
    for span in spans[2:9:2]:
        span.close()
    assert take(session, 2048).offset == spans[2].offset  # two that were neighbours
    kept.close()


def test_what_is_large_gets_a_buffer_of_its_own_size(session: Session) -> None:
    small, large = take(session, 128), take(session, 3 * FIRST_BYTES + 1)
    assert large.buffer is not small.buffer
    large.close()
    assert session.arena.statistics().buffers == 1
    assert LARGEST_BYTES > FIRST_BYTES


def test_an_array_that_is_kept_is_never_somebody_elses_memory(graph: Graph) -> None:
    with graph.bind():  # keeps the buffer
        first = graph.bind()
        first.inputs["x"][:] = 7
        first.run()
        kept = first.outputs["y"][4:]  # a view of the array
        first.close()
        assert graph.session.arena.statistics().held_back == 1
        others = [graph.bind() for _ in range(5)]
        for other in others:
            other.inputs["x"][:] = 9
            other.run()
        assert (kept == 7).all()
        del kept
        gc.collect()
        again = graph.bind()
        assert graph.session.arena.statistics().held_back == 0
        again.inputs["x"][:] = 1
        again.run()


def test_a_late_run_keeps_its_span_until_it_is_over(
    broker: BrokerProcess, session: Session, graph: Graph
) -> None:
    with graph.bind():
        late = graph.bind()
        late.inputs["x"][:] = 5
        broker.faults.set("hang=graphExecute:1")
        with pytest.raises(DeadlineExpired):
            late.run(timeout=0.2)
        late.close()
        assert session.arena.statistics().held_back == 1
        others = [graph.bind() for _ in range(3)]
        for other in others:
            other.outputs["y"]  # theirs alone
        before = [np.array(other.outputs["y"]) for other in others]
        broker.faults.set("unhang")
        wait_until(lambda: held(session)["in_flight"] == 0, "the late run is over")
        for other, was in zip(others, before, strict=True):
            assert np.array_equal(other.outputs["y"], was)
        wait_until(lambda: held_back_after_a_bind(session, graph) == 0, "its span is free")


def held_back_after_a_bind(session: Session, graph: Graph) -> int:
    graph.bind().close()
    return session.arena.statistics().held_back


def test_a_session_that_ends_with_bindings_leaves_its_arrays_readable(
    broker: BrokerProcess, make_model: MakeModel
) -> None:
    with connect(broker.runtime_dir) as session:
        binding = session.load(make_model("copies", copier("g", shape=(32,)))).graph.bind()
        binding.inputs["x"][:] = 3
        binding.run()
        y = binding.outputs["y"]
    assert (y == 3).all()


def test_cpu_access_costs_nothing_on_a_memfd(session: Session) -> None:
    buffer = session.alloc(100)
    assert (buffer.kind, buffer.needs_sync) == ("memfd", False)
    with buffer.cpu_access(), buffer.cpu_access(write=False) as nothing:
        assert nothing is None
    assert buffer.cpu_access() is buffer.cpu_access(read=False)
    buffer.release()
