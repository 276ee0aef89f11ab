# SPDX-License-Identifier: Apache-2.0
"""Binding: a graph together with the buffer spans of all its tensors, checked once, run often."""

import contextlib
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy.typing as npt

from qnnbroker.protos.errors import BrokerError, InvalidRequest, LeaseRevoked, WouldBlock
from qnnbroker.protos.tensors import TensorSpec
from qnnbroker.v1 import control_pb2, types_pb2

from .buffers import Buffer
from .submissions import Submission
from .timing import Timing

if TYPE_CHECKING:
    from .graphs import Graph

#: Where tensors start in the buffer that a binding makes for itself.
ALIGNMENT_BYTES = 128

#: Where a tensor lies: a buffer, from its start or from an offset in bytes.
Place = Buffer | tuple[Buffer, int]


class Binding:
    """A graph with memory for its tensors. Made by `Graph.bind`.

    `inputs` and `outputs` are arrays over the shared buffers: write the inputs, `run()`, read the
    outputs; nothing is copied. Outputs are read-only here and change with the next run.

    Threads: runs of one binding take turns; who may touch the arrays meanwhile is for the callers
    to agree on. Several bindings run at the same time. Fork: not usable in the child.
    """

    def __init__(self, graph: "Graph", binding_id: int, spans: "Spans") -> None:
        self._graph = graph
        self._session = graph.session
        self._binding_id = binding_id
        self._own = spans.own
        self._inputs = MappingProxyType(spans.inputs)
        self._outputs = MappingProxyType(spans.outputs)
        self._running = threading.Lock()
        self._closed = False

    @property
    def binding_id(self) -> int:
        return self._binding_id

    @property
    def graph(self) -> "Graph":
        return self._graph

    @property
    def inputs(self) -> Mapping[str, npt.NDArray[Any]]:
        """Writable arrays by tensor name; empty once closed."""
        return self._inputs

    @property
    def outputs(self) -> Mapping[str, npt.NDArray[Any]]:
        """Read-only arrays by tensor name; empty once closed."""
        return self._outputs

    @property
    def closed(self) -> bool:
        return self._closed

    def arrays(self) -> tuple[Mapping[str, npt.NDArray[Any]], Mapping[str, npt.NDArray[Any]]]:
        """Inputs and outputs together, for who must not lose them to a close meanwhile.

        Raises:
            LeaseRevoked: the binding is closed.
        """
        both = self._inputs, self._outputs
        self._check()  # after taking them: `close` says so first and drops them then
        return both

    def check(self) -> None:
        """Refuses a closed binding, or one of a session that is.

        Raises:
            LeaseRevoked, SessionClosed
        """
        self._session.check()
        self._check()

    def _check(self) -> None:
        if self._closed:
            raise LeaseRevoked(
                f"binding {self._binding_id} of graph {self._graph.name!r} is closed",
                binding_id=self._binding_id,
            )

    def run(self, *, timeout: float | None = None) -> Timing:
        """Runs the graph once on what the inputs hold now; the outputs are there when it returns.

        Args:
            timeout: seconds; None means the session's `call_timeout`.

        Raises:
            DeadlineExpired: too late; the run may still happen, so leave the arrays alone.
            LeaseRevoked: the binding is closed.
            BrokerLost, SessionClosed, BrokerError: what happened instead.
        """
        self._session.check()
        with self._running:
            self._check()
            return self._session.execute(self._binding_id, timeout)

    def submit(self, *, timeout: float | None = None) -> Submission:
        """Starts a run and returns; with as much in flight as the session may have, waits for room.

        Runs of one binding go one after the other, in the order of submission, over the same
        memory; to have several under way, use several bindings.

        Args:
            timeout: seconds until the broker gives up on starting it, and for which this waits for
                room; None means the session's `call_timeout`.

        Raises:
            DeadlineExpired: no room in time.
            BrokerLost, SessionClosed, LeaseRevoked: there is nobody to submit to.
            Unsupported: the session has no rings.
        """
        self.check()
        hot = self._session.hot_path()
        deadline_ns = self._deadline(timeout)
        while True:
            try:
                return Submission(hot, self, hot.submit(self._binding_id, deadline_ns))
            except WouldBlock:
                hot.wait_room(deadline_ns)

    def submit_nowait(self, *, timeout: float | None = None) -> Submission:
        """Like `submit`, but never waits.

        Raises:
            WouldBlock: as much in flight as the session may have.
        """
        self.check()
        hot = self._session.hot_path()
        return Submission(hot, self, hot.submit(self._binding_id, self._deadline(timeout)))

    def _deadline(self, timeout: float | None) -> int:
        seconds = self._session.call_timeout if timeout is None else timeout
        return time.monotonic_ns() + int(seconds * 1e9)

    def close(self) -> None:
        """Gives the binding back, and the buffer that it made for itself. Idempotent.

        Waits for a run under way. Arrays that somebody still holds stay readable.
        """
        if not self._session.usable:
            return
        with self._running:
            if self._closed:
                return
            self._closed = True
        self._inputs = self._outputs = MappingProxyType({})
        self._graph.forget(self)
        self._session.release_binding(self._binding_id)
        if self._own is not None:
            self._own.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Binding {self._binding_id} of graph {self._graph.name!r}{state}>"


class Spans:
    """Where every tensor of a graph lies: the places given, the rest in a buffer of its own.

    Raises:
        InvalidRequest: an unknown tensor; a buffer of another session; a bad offset.
        LimitExceeded: no room for the buffer.
        LeaseRevoked: a given buffer is released.
    """

    def __init__(
        self, graph: "Graph", inputs: Mapping[str, Place], outputs: Mapping[str, Place]
    ) -> None:
        self.own: Buffer | None = None
        self.inputs: dict[str, npt.NDArray[Any]] = {}
        self.outputs: dict[str, npt.NDArray[Any]] = {}
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
                    total += -(-spec.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if free:
            self.own = graph.session.alloc(max(total, 1))
            for is_input, spec, offset in free:
                self._add(is_input, spec, self.own, offset)

    def clear(self) -> None:
        """Gives up: no view stays, not even in a traceback, nor the own buffer."""
        self.inputs.clear()
        self.outputs.clear()
        if self.own is not None:
            with contextlib.suppress(BrokerError):
                self.own.drop()

    def _given(self, spec: TensorSpec, place: Place) -> tuple[Buffer, int]:
        buffer, offset = (place, 0) if isinstance(place, Buffer) else place
        if buffer.session is not self._graph.session:
            raise InvalidRequest(
                f"tensor {spec.name!r} lies in buffer {buffer.buffer_id} of another session"
            )
        return buffer, offset

    def _add(self, is_input: bool, spec: TensorSpec, buffer: Buffer, offset: int) -> None:
        array = buffer.array(spec.dtype, spec.shape, offset, writable=is_input)
        region = control_pb2.TensorRegion(
            tensor=spec.name,
            region=types_pb2.BufferRef(
                buffer_id=buffer.buffer_id, offset_bytes=offset, size_bytes=spec.size_bytes
            ),
        )
        (self.inputs if is_input else self.outputs)[spec.name] = array
        (self.request.inputs if is_input else self.request.outputs).append(region)
