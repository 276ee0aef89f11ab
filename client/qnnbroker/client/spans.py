# SPDX-License-Identifier: Apache-2.0
"""Spans: where every tensor of a binding lies, as arrays here and as a request to the broker."""

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from qnnbroker.protos.errors import BrokerError, InvalidRequest
from qnnbroker.protos.tensors import TensorSpec
from qnnbroker.v1 import control_pb2, types_pb2

from .arena import Span, aligned
from .buffers import Buffer

if TYPE_CHECKING:
    from .graphs import Graph

#: Where a tensor lies: a buffer, from its start or from an offset in bytes.
Place = Buffer | tuple[Buffer, int]


class Spans:
    """Where every tensor of a graph lies: the places given, the rest in the session's arena.

    Raises:
        InvalidRequest: an unknown tensor; a buffer of another session; a bad offset.
        LimitExceeded: no room for more buffers.
        LeaseRevoked: a given buffer is released.
    """

    def __init__(
        self, graph: "Graph", inputs: Mapping[str, Place], outputs: Mapping[str, Place]
    ) -> None:
        self.own: Span | None = None
        self.inputs: dict[str, npt.NDArray[Any]] = {}
        self.outputs: dict[str, npt.NDArray[Any]] = {}
        #: Buffers that the CPU caches and the device does not see through; none for memfds.
        self.synchronised: list[Buffer] = []
        self.request = control_pb2.CreateBindingRequest(graph_id=graph.graph_id)
        self._graph = graph
        graph.check_names("input", graph.inputs, inputs)
        graph.check_names("output", graph.outputs, outputs)
        total = 0
        free: list[tuple[bool, TensorSpec, int]] = []
        for is_input, specs, given in (
            (True, graph.inputs, inputs),
            (False, graph.outputs, outputs),
        ):
            for spec in specs.values():
                if spec.name in given:
                    self._add(is_input, spec, *self._given(spec, given[spec.name]))
                else:
                    free.append((is_input, spec, total))
                    total += aligned(spec.size_bytes)
        if free:
            self.own = graph.session.arena.take(graph.session, total)
            for is_input, spec, offset in free:
                self._add(is_input, spec, self.own.buffer, self.own.offset + offset, self.own)

    def clear(self) -> None:
        """Gives up: no view stays, not even in a traceback, nor the span of the arena."""
        self.inputs.clear()
        self.outputs.clear()
        self.close()

    def forget_arrays(self) -> None:
        """Leaves the arrays to whoever holds them."""
        self.inputs, self.outputs = {}, {}

    def close(self, running_binding: int = 0) -> None:
        """The binding is gone; see Span.close."""
        if self.own is not None:
            with contextlib.suppress(BrokerError):
                self.own.close(running_binding)

    def _given(self, spec: TensorSpec, place: Place) -> tuple[Buffer, int]:
        buffer, offset = (place, 0) if isinstance(place, Buffer) else place
        if buffer.session is not self._graph.session:
            raise InvalidRequest(
                f"tensor {spec.name!r} lies in buffer {buffer.buffer_id} of another session"
            )
        return buffer, offset

    def _add(
        self,
        is_input: bool,
        spec: TensorSpec,
        buffer: Buffer,
        offset: int,
        span: Span | None = None,
    ) -> None:
        array = buffer.array(spec.dtype, spec.shape, offset, writable=is_input)
        if span is not None:
            span.track(array)
        if buffer.needs_sync and buffer not in self.synchronised:
            self.synchronised.append(buffer)
        region = control_pb2.TensorRegion(
            tensor=spec.name,
            region=types_pb2.BufferRef(
                buffer_id=buffer.buffer_id, offset_bytes=offset, size_bytes=spec.size_bytes
            ),
        )
        (self.inputs if is_input else self.outputs)[spec.name] = array
        (self.request.inputs if is_input else self.request.outputs).append(region)
