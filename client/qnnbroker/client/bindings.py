# SPDX-License-Identifier: Apache-2.0
"""Binding: a graph together with the buffer spans of all its tensors, checked once, run often."""

import contextlib
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy.typing as npt

from qnnbroker.protos.errors import BrokerError, LeaseRevoked, WouldBlock
from qnnbroker.v1 import control_pb2

from .buffers import to_cpu, to_device
from .hotpath import nanoseconds
from .spans import Spans
from .submissions import Submission
from .timing import Timing

if TYPE_CHECKING:
    from .graphs import Graph


class Binding:
    """A graph with memory for its tensors. Made by `Graph.bind`.

    `inputs` and `outputs` are arrays over the shared buffers: write the inputs, `run()`, read the
    outputs; nothing is copied. Outputs are read-only here and change with the next run.

    Threads: runs of one binding take turns; who may touch the arrays meanwhile is for the callers
    to agree on. Several bindings run at the same time. Fork: not usable in the child.
    """

    def __init__(
        self, graph: "Graph", answer: control_pb2.CreateBindingResponse, spans: Spans
    ) -> None:
        self._graph = graph
        self._session = graph.session
        self._binding_id = answer.binding_id
        self._know_memory(answer)
        self._spans = spans
        self._synchronised = tuple(spans.synchronised)
        self._inputs = MappingProxyType(spans.inputs)
        self._outputs = MappingProxyType(spans.outputs)
        self._running = threading.Lock()
        self._closed = False

    @property
    def binding_id(self) -> int:
        return self._binding_id

    @property
    def memory(self) -> Literal["registered", "raw"]:
        """How the device gets at the tensors: by handles of registered memory, which it reads and
        writes itself, or by address, where the library may copy. Shared either way.

        Asks the broker, since a binding that was parked may come back in another way; of a closed
        one it is what was known last."""
        self._ask_memory()
        return "registered" if self._registered else "raw"

    @property
    def memory_detail(self) -> str:
        """Why it is not registered; empty when it is. Asks as `memory` does."""
        self._ask_memory()
        return self._memory_detail

    def _ask_memory(self) -> None:
        if self._closed or not self._session.usable:
            return
        with contextlib.suppress(BrokerError):  # then what was known last must do
            self._know_memory(self._session.describe_binding(self._binding_id))

    def _know_memory(
        self, answer: control_pb2.CreateBindingResponse | control_pb2.DescribeBindingResponse
    ) -> None:
        self._registered = answer.memory_path == control_pb2.MEMORY_PATH_REGISTERED
        self._memory_detail = answer.memory_detail

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

    def run(self, *, timeout: float | None = None, sync: bool = True) -> Timing:
        """Runs the graph once on what the inputs hold now; the outputs are there when it returns.

        Args:
            timeout: seconds; None means the session's `call_timeout`.
            sync: False leaves caches to the caller, see `Buffer.cpu_access`; no matter on memfds.

        Raises:
            DeadlineExpired: too late; the run may still happen, so leave the arrays alone.
            LeaseRevoked: the binding is closed.
            BrokerLost, SessionClosed, BrokerError: what happened instead.
        """
        self._session.check()
        with self._running:
            self._check()
            if not self._synchronised or not sync:
                return self._session.execute(self._binding_id, timeout)
            to_device(self._synchronised)
            try:
                return self._session.execute(self._binding_id, timeout)
            finally:
                to_cpu(self._synchronised)

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
        self.hand_over()
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
        self.hand_over()
        return Submission(hot, self, hot.submit(self._binding_id, self._deadline(timeout)))

    def hand_over(self) -> None:
        """Before a submission: what the CPU wrote becomes visible to the device."""
        to_device(self._synchronised)

    def take_back(self) -> None:
        """After a submission: what the device wrote becomes visible. Nothing to do on memfds."""
        to_cpu(self._synchronised)

    def _deadline(self, timeout: float | None) -> int:
        seconds = self._session.call_timeout if timeout is None else timeout
        return time.monotonic_ns() + nanoseconds(seconds)

    def close(self) -> None:
        """Gives the binding back, and its part of the session's arena. Idempotent.

        Waits for a run under way. Arrays that somebody still holds stay readable.
        """
        if not self._session.usable:
            return
        with self._running:
            if self._closed:
                return
            self._closed = True
        self._inputs = self._outputs = MappingProxyType({})
        self._spans.forget_arrays()
        self._graph.forget(self)
        # A run that came too late for us may still write: then its memory is not for others yet.
        over = self._session.release_binding(self._binding_id)
        self._spans.close(0 if over else self._binding_id)

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
