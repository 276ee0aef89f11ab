# SPDX-License-Identifier: Apache-2.0
"""Resetting the backend: every binding parked, backend, device and contexts made anew.

Bindings, buffers, sessions and ids stay what they are. Submissions that come meanwhile wait, and
run once the contexts are back. What executes, loads and is freed at the time ends first, or the
reset does not take place: then everything is as before. Once the library was told to let go there
is no way back, and the reset goes on to its end, whoever asked for it. A context that cannot be
made again is lost; it keeps its place, and the next reset tries it once more.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    BrokerUnavailable,
    DeadlineExpired,
)
from qnnbroker.v1 import control_pb2 as pb

from .backends.base import BackendContext
from .bound import BoundGraph
from .contexts import Context

if TYPE_CHECKING:
    from .service import BrokerService

log = logging.getLogger(__name__)

#: How many of what still runs an error names.
NAMED = 8


class BackendReset:
    """Resets the backend of a broker, one reset at a time. Belongs to the event loop's thread."""

    def __init__(self, service: "BrokerService") -> None:
        self._service = service
        self._task: asyncio.Task[pb.ResetBackendResponse] | None = None
        self._waiting = False
        self._stage = ""
        self._since = 0.0

    @property
    def running(self) -> bool:
        """One is under way: what needs the backend waits or is refused."""
        return self._task is not None

    @property
    def stage(self) -> str:
        """What it is at, in words."""
        return f"{self._stage} for {time.monotonic() - self._since:.1f} s"

    async def run(self) -> pb.ResetBackendResponse:
        """Does it. When the caller gives up, it goes on.

        Raises:
            BrokerUnavailable: reason STARTING, one is under way already; STOPPING.
            DeadlineExpired: reason RUNNING; what runs did not end in time, and nothing was done; or
                the library does not return, and the reset goes on. Says which.
            BrokerError: the library does not start again; every context is lost.
        """
        if self._task is not None:
            raise BrokerUnavailable(
                f"the backend is being reset already: {self.stage}", reason="STARTING"
            )
        self._enter("about to begin")
        self._waiting = True
        task = self._task = asyncio.create_task(self._work())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Waiting has the limit to itself; so has what the library does afterwards, at least.
        limit = self._service.config.reset_timeout_seconds
        await asyncio.wait([task], timeout=2 * limit)
        if not task.done():
            raise DeadlineExpired(
                f"the reset of the backend goes on, but is at this: {self.stage}. New work is "
                "refused until that ends; if it never does, stop the broker",
                reason="RUNNING",
            )
        if task.cancelled():
            raise BrokerUnavailable("the broker is stopping", reason="STOPPING")
        return task.result()

    async def end(self) -> None:
        """Gives up a reset that still waits; waits for the end of one that does not."""
        if self._task is not None:
            if self._waiting:
                self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    def _enter(self, stage: str) -> None:
        self._stage, self._since = stage, time.monotonic()

    async def _work(self) -> pb.ResetBackendResponse:
        service, store = self._service, self._service.contexts
        held: list[BoundGraph] = []
        kept: list[Context] = []
        store.gate.shut()
        try:
            parked = await self._wait_quiet(held)
            # Since the last await: nothing runs, is created or is freed. Nor will it be.
            kept = [c for c in store.all() if c.native is not None or c.lost is not None]
            for context in kept:
                context.waiters += 1
            await self._make_anew(kept)
            lost = [c for c in kept if c.lost is not None]
            log.warning(
                "the backend was reset: %d contexts, %d of them lost, %d bindings",
                *(len(kept), len(lost), parked),
            )
            return pb.ResetBackendResponse(
                parked_count=parked,
                context_count=len(kept) - len(lost),
                lost=[f"context {c.context_id} ({', '.join(c.names)}): {c.lost}" for c in lost],
            )
        except Exception as error:
            log.warning("the backend was not reset: %s", error)
            raise
        finally:
            self._task = None
            store.gate.open()
            for bound in held:
                bound.let_go()
            for context in kept:
                context.waiters -= 1
                context.touch()
            service.power.start()

    async def _wait_quiet(self, held: list[BoundGraph]) -> int:
        """Holds all bindings, and waits until nothing runs, is created or freed.

        Args:
            held: gets the bindings.

        Returns:
            How many were parked for it.

        Raises:
            DeadlineExpired: it takes too long; names what runs.
        """
        service, gate = self._service, self._service.contexts.gate
        limit = service.config.reset_timeout_seconds
        parked = 0
        self._enter("waiting for what runs")
        try:
            async with asyncio.timeout(limit):
                while True:
                    # Once more each time: some were being made.
                    new = [b for c in service.contexts.all() for b in c.bound - set(held)]
                    parked += sum(b.hold() for b in new)
                    held += new
                    if gate.under_way():
                        await gate.wait_quiet()
                    elif work := [b.work for b in held if b.work is not None]:
                        await asyncio.wait(work)
                    elif any(not b.parked for b in held):
                        await service.executor.wait_event()
                    else:
                        return parked
        except TimeoutError:
            runs = [
                f"graph {b.graph.name!r} of context {b.graph.context.context_id} "
                f"{'executes' if b.work is None else 'has its memory changed'} "
                f"for session {b.session_id}"
                for b in held
                if not b.parked
            ]
            what = [*runs, *gate.under_way()]
            more = f" and {len(what) - NAMED} more" if len(what) > NAMED else ""
            raise DeadlineExpired(
                f"the backend was not reset, because after {limit:g} s this had not ended: "
                f"{'; '.join(what[:NAMED])}{more}. Everything goes on as before",
                reason="RUNNING",
            ) from None
        finally:
            self._waiting = False

    async def _make_anew(self, contexts: list[Context]) -> None:
        """The part without a way back. The contexts are ready afterwards, or lost."""
        service, store = self._service, self._service.contexts
        self._enter("taking back the vote for clocks")
        await service.power.pause()
        for context in contexts:
            self._enter(f"freeing context {context.context_id}")
            await self._free(context)
        self._enter("making backend and device anew")
        try:
            await store.on_thread(service.backend.reset)
        except Exception as error:
            failure = broker_error(error)
            for context in contexts:
                lose(context, failure)
            raise failure from error
        for context in contexts:
            self._enter(f"creating context {context.context_id} again")
            try:
                await self._create(context)
            except Exception as error:
                lose(context, broker_error(error))

    async def _free(self, context: Context) -> None:
        """Frees the native context. After a restart of the NPU it is gone already."""
        native, context.native = context.native, None
        if native is None:
            return
        try:
            await self._service.contexts.on_thread(native.close)
        except BrokerError as error:
            log.info("context %d was gone already: %s", context.context_id, error)
        except Exception:
            log.exception("context %d could not be freed", context.context_id)

    async def _create(self, context: Context) -> None:
        """Creates the native context again from the file that it holds, if anybody needs it."""
        store, spec, file = self._service.contexts, context.spec, context.file
        assert spec is not None
        if not (context.leases or context.binding_count or context.waiters > 1):
            return  # unloaded meanwhile: freed as soon as we let go of it

        def create() -> BackendContext:
            file.ensure(context.content_hash)
            return store.creator.create(file, spec, context.key.enabled_graphs)

        native = await store.on_thread(create)
        context.native = native
        if context.lost is not None:
            context.lost = None
            context.enter("ready")
        store.settle(context)
        views = [graph for model in self._service.models for graph in model.graphs]
        views += [bound.graph for bound in context.bound]  # of models that are unloaded, maybe
        for view in views:
            if view.context is context:
                view.native = native.graphs[view.native.spec.name]


def lose(context: Context, error: BrokerError) -> None:
    """It has no native part any more; its holders keep it, for the next reset to try again."""
    context.lost = error
    context.enter("lost", str(error))
    log.error("context %d is lost: %s", context.context_id, error)


def broker_error(error: Exception) -> BrokerError:
    """`error` as one of ours."""
    if isinstance(error, BrokerError):
        return error
    log.error("the reset met something unexpected", exc_info=error)
    return BackendError(str(error) or type(error).__name__, reason="INTERNAL")
