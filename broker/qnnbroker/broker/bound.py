# SPDX-License-Identifier: Apache-2.0
"""BoundGraph: a graph over checked spans inside the executor; live, parked or going.

Parked, its native part is gone while spans and checks are kept; the next submission takes the slow
lane: it comes here, the runnable is built anew, and what waited runs. What calls the library for
that, registering memory and taking it back, is work on the registrar's thread; whatever happens
meanwhile is looked at when the work has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from qnnbroker.native.executor import ExecutorBinding, ExecutorSession
from qnnbroker.protos.errors import BackendError, BrokerError
from qnnbroker.protos.status import completion_number

from .backends.base import ClosableRunnable, Span
from .executor import LoopExecutor
from .gating import check_usable
from .models import GraphView
from .registrar import Steps
from .registrations import Lease, Registration

log = logging.getLogger(__name__)


class BoundGraph:
    """Owns one executor binding and its runnable; counts on the graph's context until it is gone.

    Belongs to the event loop's thread.

    Args:
        zero_copy: auto, require or off; see `registrations`.
        lease: of the memory, once this is made; None makes one, which must not call the library.

    Raises:
        InvalidRequest: the backend refused a span.
        ValueError: the session is closed.
        LeaseRevoked: the context is lost.
    """

    def __init__(
        self,
        executor: LoopExecutor,
        session: ExecutorSession,
        graph: GraphView,
        inputs: Sequence[Span],
        outputs: Sequence[Span],
        *,
        band: int,
        zero_copy: str = "off",
        lease: Lease | None = None,
        when_gone: Callable[[], None] | None = None,
    ) -> None:
        self.graph = graph
        self.session_id = session.session_id
        self._inputs, self._outputs = inputs, outputs
        self._when_gone = when_gone
        self._registrar = graph.context.store.registrar
        self._held = False
        self.parked_count = 0
        #: Released, and nothing of it is left.
        self.gone = False
        self._ended = False  # released, and the executor is done with it
        self._told: asyncio.Future[None] | None = None
        self._zero_copy = zero_copy
        self._lease: Lease | None = None
        self._runnable: ClosableRunnable | None = None
        self._work: asyncio.Future[None] | None = None
        check_usable(graph.context)
        lease = lease or graph.native.lease_memory_now((*inputs, *outputs), zero_copy)
        assert lease is not None
        runnable = graph.bind(inputs, outputs, lease)
        try:
            self.native: ExecutorBinding = session.bind(runnable, band=band)
        except BaseException:
            runnable.close()
            raise
        self._keep(runnable, lease)
        graph.context.bound.add(self)
        executor.watch(self.native, self)

    def _keep(self, runnable: ClosableRunnable, lease: Lease) -> None:
        self._runnable, self._lease = runnable, lease
        #: Whether the device gets at every tensor through a handle; parked: did so.
        self.registered = lease.complete
        #: Why not, if not.
        self.memory_detail = lease.detail

    def park(self) -> bool:
        """Drops the native part as soon as nothing runs; False when it is parked or going."""
        return self.native.park()

    def hold(self) -> bool:
        """Parks, and stays parked until `let_go`; False when it was parked or going already."""
        self._held = True
        return self.native.park()

    @property
    def parked(self) -> bool:
        """Nothing native is left, for now or for good, and nothing is on its way."""
        return self._runnable is None and self._work is None

    @property
    def work(self) -> "asyncio.Future[None] | None":
        """What is under way with its memory."""
        return self._work

    def let_go(self) -> None:
        """May be revived again, and is if somebody waits for that."""
        self._held = False
        self._advance()

    def release(self) -> None:
        """Refuses further submissions; the rest goes when what runs has ended. Idempotent."""
        self.native.release()

    async def wait_gone(self, seconds: float) -> bool:
        """Whether a released binding is gone, after waiting for that so long at most."""
        if not self.gone:
            self._told = self._told or asyncio.get_running_loop().create_future()
            await asyncio.wait([self._told], timeout=seconds)
        return self.gone

    def on_idle(self) -> None:
        if self.native.released:
            self._ended = True
        else:
            self.parked_count += 1
        runnable, self._runnable = self._runnable, None
        lease, self._lease = self._lease, None
        if runnable is not None and lease is not None:
            self.native.drop_runnable()
            self._let_go(runnable, lease)
        self._advance()

    def on_wanted(self) -> None:
        self._advance()

    def _let_go(self, runnable: ClosableRunnable | None, lease: Lease) -> None:
        """The runnable first, since it uses the registrations."""
        if runnable is not None:
            runnable.close()
        if unused := self.graph.native.let_go_memory(lease):
            self._begin(self._drop(unused))

    def _begin(self, steps: Steps[None]) -> None:
        work = self._work = self._registrar.start(steps)
        work.add_done_callback(self._worked)

    def _worked(self, work: "asyncio.Future[None]") -> None:
        if (error := work.exception()) is not None:
            log.error("memory of graph %s: %s", self.graph.name, error, exc_info=error)
        if self._work is work:  # and did not begin another at its end
            self._work = None
            self._advance()

    def _advance(self) -> None:
        """Does what is to be done now, unless something is under way."""
        if self._work is not None or self.gone:
            return
        if self._ended:
            self.graph.context.bound.discard(self)
            self.graph.context.touch()
            self.gone = True
            if self._told is not None and not self._told.done():
                self._told.set_result(None)
            if self._when_gone is not None:
                self._when_gone()
        elif self._wanted:
            self._revive()

    @property
    def _wanted(self) -> bool:
        """It is to be revived. One that nobody waits for would only undo the parking."""
        held = self._held or self.native.released
        return self._runnable is None and not held and self.native.wanted

    def _revive(self) -> None:
        spans = (*self._inputs, *self._outputs)
        try:
            check_usable(self.graph.context)
            lease = self.graph.native.lease_memory_now(spans, self._zero_copy)
        except Exception as error:
            self._fail(error)
            return
        if lease is None:
            self._begin(self._register(spans))
        else:
            self._go_on(lease)

    def _register(self, spans: Sequence[Span]) -> Steps[None]:
        native = self.graph.native
        try:
            lease: Lease = yield lambda: native.lease_memory(spans, self._zero_copy)
        except Exception as error:
            self._fail(error)
            return
        if self._wanted:
            self._go_on(lease)
        else:  # held, released or given up meanwhile
            yield from self._drop(native.let_go_memory(lease))

    def _drop(self, unused: Sequence[Registration]) -> Steps[None]:
        native = self.graph.native
        yield lambda: native.drop_memory(unused)

    def _go_on(self, lease: Lease) -> None:
        """With registered memory: the runnable is built, and what waited runs."""
        try:
            runnable = self.graph.bind(self._inputs, self._outputs, lease)
        except Exception as error:
            self._fail(error)
            self._let_go(None, lease)
            return
        if self.native.revive(runnable):
            self._keep(runnable, lease)
        else:  # released meanwhile
            self._let_go(runnable, lease)

    def _fail(self, error: Exception) -> None:
        """Whoever waits is told."""
        if isinstance(error, BrokerError):
            log.warning("graph %s could not be bound again: %s", self.graph.name, error)
        else:
            log.error("graph %s could not be bound again", self.graph.name, exc_info=error)
            error = BackendError("", reason="INTERNAL")
        self.native.fail_waiting(completion_number(error))
