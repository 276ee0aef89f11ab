# SPDX-License-Identifier: Apache-2.0
"""BoundGraph: a graph over checked spans inside the executor; live, parked or going.

Parked, its native part is gone while spans and checks are kept; the next submission takes the slow
lane: it comes here, the runnable is built anew, and what waited runs.
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
from .registrations import Lease

log = logging.getLogger(__name__)


class BoundGraph:
    """Owns one executor binding and its runnable; counts on the graph's context until it is gone.

    Belongs to the event loop's thread.

    Args:
        zero_copy: auto, require or off; see `registrations`.

    Raises:
        InvalidRequest: the backend refused a span.
        Unsupported: memory has to be registered and cannot be.
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
        when_gone: Callable[[], None] | None = None,
    ) -> None:
        self.graph = graph
        self.session_id = session.session_id
        self._inputs, self._outputs = inputs, outputs
        self._when_gone = when_gone
        self._held = False
        self.parked_count = 0
        #: Released, and nothing of it is left.
        self.gone = False
        self._told: asyncio.Future[None] | None = None
        self._zero_copy = zero_copy
        self._lease: Lease | None = None
        self._registered, self._memory_detail = False, ""
        self._runnable: ClosableRunnable | None = None
        runnable = self._build()
        try:
            self.native: ExecutorBinding = session.bind(runnable, band=band)
        except BaseException:
            self._close(runnable)
            raise
        self._runnable = runnable
        graph.context.bound.add(self)
        executor.watch(self.native, self)

    def park(self) -> bool:
        """Drops the native part as soon as nothing runs; False when it is parked or going."""
        return self.native.park()

    def hold(self) -> bool:
        """Parks, and stays parked until `let_go`; False when it was parked or going already."""
        self._held = True
        return self.native.park()

    @property
    def parked(self) -> bool:
        """Nothing native is left, for now or for good."""
        return self._runnable is None

    def let_go(self) -> None:
        """May be revived again, and is if somebody waits for that."""
        self._held = False
        if self._runnable is None and self.native.wanted:
            self._revive()

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
        self._drop()
        if self.native.released:
            context = self.graph.context
            context.bound.discard(self)
            context.touch()
            self.gone = True
            if self._told is not None and not self._told.done():
                self._told.set_result(None)
            if self._when_gone is not None:
                self._when_gone()
            return
        self.parked_count += 1
        if self.native.wanted and not self._held:
            self._revive()

    def on_wanted(self) -> None:
        # Asked again: an earlier revival may have answered this already, and one that nobody waits
        # for would undo the parking.
        if self._runnable is None and not self._held and self.native.wanted:
            self._revive()

    @property
    def registered(self) -> bool:
        """Whether the device reads and writes every tensor through a handle; parked: did so."""
        return self._registered

    @property
    def memory_detail(self) -> str:
        """Why not, if not."""
        return self._memory_detail

    def _build(self) -> ClosableRunnable:
        """Registers the memory and builds the tensor arrays; all or nothing."""
        check_usable(self.graph.context)
        native = self.graph.native
        lease = native.lease_memory((*self._inputs, *self._outputs), self._zero_copy)
        try:
            runnable = self.graph.bind(self._inputs, self._outputs, lease)
        except BaseException:
            native.release_memory(lease)
            raise
        self._lease = lease
        self._registered, self._memory_detail = lease.complete, lease.detail
        return runnable

    def _close(self, runnable: ClosableRunnable) -> None:
        """The reverse: the runnable first, since it uses the registrations."""
        runnable.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            self.graph.native.release_memory(lease)

    def _drop(self) -> None:
        runnable, self._runnable = self._runnable, None
        if runnable is not None:
            self.native.drop_runnable()
            self._close(runnable)

    def _revive(self) -> None:
        try:
            runnable = self._build()
        except BrokerError as error:
            log.warning("graph %s could not be bound again: %s", self.graph.name, error)
            self.native.fail_waiting(completion_number(error))
            return
        except Exception:
            log.exception("graph %s could not be bound again", self.graph.name)
            self.native.fail_waiting(completion_number(BackendError("", reason="INTERNAL")))
            return
        if self.native.revive(runnable):
            self._runnable = runnable
        else:  # released meanwhile
            self._close(runnable)
