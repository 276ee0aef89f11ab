# SPDX-License-Identifier: Apache-2.0
"""Tensors inline in a message: checked against the graph, and laid out for the backend."""

from collections.abc import Iterable, Sequence

from qnnbroker.protos.errors import InvalidRequest
from qnnbroker.protos.tensors import element_type
from qnnbroker.v1 import types_pb2

from .backends.base import Span
from .bindings import check_names
from .models import GraphView


def check_inputs(graph: GraphView, tensors: Iterable[types_pb2.InlineTensor]) -> list[Span]:
    """Spans over the messages' bytes, in the order of the graph's inputs.

    Raises:
        InvalidRequest: reason TENSOR_MISMATCH; a missing, unknown, repeated or ill-fitting tensor.
        Unsupported: reason DTYPE.
    """
    given: dict[str, types_pb2.InlineTensor] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise InvalidRequest(f"input {tensor.name!r} is given twice", reason="TENSOR_MISMATCH")
        given[tensor.name] = tensor
    check_names("input", graph.inputs, given)
    spans: list[Span] = []
    for spec in graph.inputs:
        tensor = given[spec.name]
        element, shape = element_type(tensor.dtype), tuple(tensor.shape)
        if element != spec.element or shape != spec.shape:
            raise InvalidRequest(
                f"input {spec.name!r} wants {spec.element}{list(spec.shape)}, "
                f"found {element}{list(shape)}",
                reason="TENSOR_MISMATCH",
            )
        if len(tensor.data) != spec.size_bytes:
            raise InvalidRequest(
                f"input {spec.name!r} needs {spec.size_bytes} bytes, found {len(tensor.data)}",
                reason="TENSOR_MISMATCH",
            )
        spans.append((tensor.data, 0, spec.size_bytes))
    return spans


def output_buffers(graph: GraphView) -> list[bytearray]:
    """Room for each output, in the graph's order."""
    return [bytearray(spec.size_bytes) for spec in graph.outputs]


def output_tensors(graph: GraphView, buffers: Sequence[bytearray]) -> list[types_pb2.InlineTensor]:
    """The outputs as messages."""
    return [
        types_pb2.InlineTensor(
            name=spec.name,
            dtype=spec.element.number,  # type: ignore[arg-type]
            shape=spec.shape,
            data=bytes(buffer),
        )
        for spec, buffer in zip(graph.outputs, buffers, strict=True)
    ]
