# SPDX-License-Identifier: Apache-2.0
"""BoundGraph: a graph over checked spans inside the executor; live, parked or going.

Parked, its native part is gone while spans and checks are kept; the next submission takes the slow
lane: it comes here, the runnable is built anew, and what waited runs.
"""

import logging
from collections.abc import Callable, Sequence

from qnnbroker.native.executor import ExecutorBinding, ExecutorSession
from qnnbroker.protos.errors import BrokerError
from qnnbroker.protos.status import completion_number

from .backends.base import ClosableRunnable, Span
from .executor import LoopExecutor
from .models import GraphView

log = logging.getLogger(__name__)


class BoundGraph:
    """Owns one executor binding and its runnable; counts on the graph's context until it is gone.

    Belongs to the event loop's thread.

    Raises:
        InvalidRequest: the backend refused a span.
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
        when_gone: Callable[[], None] | None = None,
    ) -> None:
        self.graph = graph
        self._inputs, self._outputs = inputs, outputs
        self._when_gone = when_gone
        self._wanted = False
        self.parked_count = 0
        runnable = graph.bind(inputs, outputs)
        try:
            self.native: ExecutorBinding = session.bind(runnable, band=band)
        except BaseException:
            runnable.close()
            raise
        self._runnable: ClosableRunnable | None = runnable
        graph.context.binding_count += 1
        executor.watch(self.native, self)

    def park(self) -> bool:
        """Drops the native part as soon as nothing runs; False when it is parked or going."""
        return self.native.park()

    def release(self) -> None:
        """Refuses further submissions; the rest goes when what runs has ended. Idempotent."""
        self.native.release()

    def on_idle(self) -> None:
        self._drop()
        if self.native.released:
            context = self.graph.context
            context.binding_count -= 1
            context.touch()
            if self._when_gone is not None:
                self._when_gone()
            return
        self.parked_count += 1
        if self._wanted:
            self._revive()

    def on_wanted(self) -> None:
        self._wanted = True
        if self._runnable is None:
            self._revive()

    def _drop(self) -> None:
        runnable, self._runnable = self._runnable, None
        if runnable is not None:
            self.native.drop_runnable()
            runnable.close()

    def _revive(self) -> None:
        self._wanted = False
        try:
            runnable = self.graph.bind(self._inputs, self._outputs)
        except BrokerError as error:
            log.warning("graph %s could not be bound again: %s", self.graph.name, error)
            self.native.fail_waiting(completion_number(error))
            return
        if self.native.revive(runnable):
            self._runnable = runnable
        else:  # released meanwhile
            runnable.close()
