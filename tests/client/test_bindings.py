# SPDX-License-Identifier: Apache-2.0
"""Bindings: runs without copies, shared and given memory, and what they refuse."""

import numpy as np
import pytest

from qnnbroker.client import (
    Binding,
    BrokerError,
    Graph,
    InvalidRequest,
    LeaseRevoked,
    Session,
    SessionClosed,
    Timing,
    connect,
)
from qnnbroker.client.spans import Place

from .conftest import BrokerProcess, MakeModel, held


@pytest.fixture
def graph(session: Session, make_model: MakeModel) -> Graph:
    """y = a + b, float32[2, 3]."""
    return session.load(make_model()).graph


def address(array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> int:
    return int(array.__array_interface__["data"][0])


def test_a_binding_runs_on_what_its_inputs_hold(graph: Graph) -> None:
    with graph.bind() as binding:
        binding.inputs["a"][:] = 1
        binding.inputs["b"][:] = [[1, 2, 3], [4, 5, 6]]
        y = binding.outputs["y"]
        timing = binding.run()
        assert y.tolist() == [[2, 3, 4], [5, 6, 7]]
        binding.inputs["a"][0, 0] = 100
        binding.run()
        assert y[0, 0] == 101
    assert timing.copied_bytes == 0
    assert timing.execute_ns > 0
    assert isinstance(timing, Timing)


def test_inputs_are_writable_and_outputs_are_not(graph: Graph) -> None:
    with graph.bind() as binding:
        assert all(a.flags.writeable for a in binding.inputs.values())
        y = binding.outputs["y"]
        with pytest.raises(ValueError, match="read-only"):
            y[:] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            y.flags.writeable = True


def test_tensors_of_the_own_buffer_are_aligned_and_apart(session: Session, graph: Graph) -> None:
    with graph.bind() as binding:
        starts = sorted(address(a) for a in (*binding.inputs.values(), *binding.outputs.values()))
        assert [s % 128 for s in starts] == [0, 0, 0]
        assert [b - a for a, b in zip(starts, starts[1:], strict=False)] == [128, 128]
        assert held(session)["buffers"] == 1


def test_closing_gives_everything_back_and_leaves_held_arrays_readable(
    session: Session, graph: Graph
) -> None:
    with graph.bind() as binding:
        binding.inputs["a"][:] = 4
        binding.run()
        kept = binding.outputs["y"]
    assert held(session)["bindings"] == 0
    assert held(session)["buffers"] == 0
    assert kept.sum() == 24
    assert binding.closed
    assert dict(binding.inputs) == dict(binding.outputs) == {}
    binding.close()
    for use in (binding.run, binding.arrays):
        with pytest.raises(LeaseRevoked, match="graph 'add' is closed"):
            use()


def test_an_output_becomes_the_next_input_without_a_copy(session: Session, graph: Graph) -> None:
    """Two bindings over the same two buffers: state goes to and fro."""
    with session.alloc(64) as first, session.alloc(64) as second:
        there = graph.bind(inputs={"a": first}, outputs={"y": second})
        back = graph.bind(inputs={"a": second}, outputs={"y": (first, 0)})
        with there, back:
            there.inputs["b"][:] = back.inputs["b"][:] = 1
            for _ in range(3):
                there.run()
                back.run()
            assert first.numpy(np.float32, (2, 3)).tolist() == [[6.0] * 3] * 2
            assert address(there.outputs["y"]) == address(back.inputs["a"])
            with pytest.raises(BufferError):
                first.release()
    assert held(session)["buffers"] == 0


def test_a_binding_over_given_buffers_makes_none(session: Session, graph: Graph) -> None:
    with session.alloc(4096) as buffer:
        places = {"a": (buffer, 0), "b": (buffer, 128)}
        with graph.bind(inputs=places, outputs={"y": (buffer, 256)}) as binding:
            assert held(session)["buffers"] == 1
            buffer.numpy(np.float32, 6)[:] = 2
            binding.run()
            assert buffer.numpy(np.float32, 6, 256).tolist() == [2.0] * 6
        assert held(session)["buffers"] == 1


def refused(graph: Graph, place: Place, name: str = "a") -> BrokerError:
    with pytest.raises(BrokerError) as info:
        graph.bind(inputs={name: place})
    assert held(graph.session)["bindings"] == 0
    return info.value


def test_places_that_do_not_hold_the_tensor_are_refused(session: Session, graph: Graph) -> None:
    buffer = session.alloc(4096)
    beyond = refused(graph, (buffer, 4096 - 20))
    assert isinstance(beyond, InvalidRequest)
    assert beyond.reason == "BAD_OFFSET"
    assert "24 bytes from offset 4076 leave buffer" in str(beyond)
    assert refused(graph, (buffer, 2)).reason == "BAD_ALIGNMENT"
    assert "no input 'c'; its inputs are 'a', 'b'" in str(refused(graph, buffer, "c"))
    with pytest.raises(InvalidRequest, match="no output 'a'"):
        graph.bind(outputs={"a": buffer})
    buffer.release()
    assert isinstance(refused(graph, buffer), LeaseRevoked)
    assert held(session)["buffers"] == 0


def test_a_buffer_of_another_session_is_refused(broker: BrokerProcess, graph: Graph) -> None:
    with connect(broker.runtime_dir) as other, other.alloc(100) as buffer:
        assert "another session" in str(refused(graph, buffer))


def test_a_binding_that_the_broker_refuses_leaves_nothing_behind(
    session: Session, graph: Graph
) -> None:
    with session.alloc(4096) as buffer:
        with pytest.raises(InvalidRequest) as info:
            graph.bind(inputs={"a": buffer}, outputs={"y": buffer})
        assert info.value.reason == "OVERLAP"
        assert held(session)["buffers"] == 1
        assert held(session)["bindings"] == 0


def test_a_binding_ends_with_its_session(session: Session, graph: Graph) -> None:
    binding: Binding = graph.bind()
    binding.inputs["a"][:] = 3
    session.close()
    assert binding.inputs["a"].sum() == 18
    with pytest.raises(SessionClosed):
        binding.run()
    binding.close()


def test_names_say_what_they_are(session: Session, graph: Graph) -> None:
    with graph.bind() as binding:
        assert repr(binding) == f"<Binding {binding.binding_id} of graph 'add'>"
        assert binding.graph is graph
    assert "closed" in repr(binding)
