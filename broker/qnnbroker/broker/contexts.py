# SPDX-License-Identifier: Apache-2.0
"""The context store: one context per content, however many sessions load it.

A context lives while somebody holds a lease on it or a binding uses it. Loads of the same bytes
that are under way are one load; a caller that gives up leaves the others their result, and the last
one to give up ends a trial that is under way.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from qnnbroker.protos.errors import BrokerError, LeaseRevoked, SubmissionCancelled
from qnnbroker.v1 import control_pb2 as pb

from .admission import check_class, check_kind, check_names, check_spec
from .backends.base import Backend, BackendContext, BinarySpec
from .context import Context as Context
from .context import ContextKey as ContextKey
from .context import StageProgress as StageProgress
from .creating import Creator
from .gating import Gate, check_usable
from .history import History
from .ids import IdTable
from .registrar import Registrar
from .steady import SteadyFile
from .verifying import Verifier
from .watching import BinaryWatch

T = TypeVar("T")

log = logging.getLogger(__name__)

#: How often it is looked at whether what executes a lost context has ended.
_PARKED_SECONDS = 0.01


class ContextStore:
    """Every context of the backend. Belongs to the event loop's thread.

    Args:
        backend: what loads them.
        threads: what blocks runs there.
        verifier: tries binaries first; None loads them untried.
        creator: makes contexts out of files.
    """

    def __init__(
        self, backend: Backend, threads: Executor, verifier: Verifier | None, creator: Creator
    ) -> None:
        self._backend = backend
        self._threads = threads
        self.verifier = verifier
        self.creator = creator
        self.gate = Gate()
        self.registrar = Registrar()
        self._watch = BinaryWatch(self._lose)
        self.history = History()
        self._ids: IdTable[Context] = IdTable("context", "CONTEXT_UNKNOWN")
        self._by_key: dict[ContextKey, Context] = {}
        self.loads_total = 0
        self.load_errors_total = 0
        self.joined_loads_total = 0

    def __len__(self) -> int:
        return len(self._ids)

    def all(self) -> list[Context]:
        """Every context, loading ones included."""
        return list(self._ids)

    @property
    def backend_name(self) -> str:
        """The backend that all contexts are of, with its build: part of what they are."""
        return f"{self._backend.info.name} {self._backend.info.build_id}"

    @property
    def closing_count(self) -> int:
        """Contexts being freed now."""
        return self.gate.closing_count

    def is_resident(self, content_hash: str) -> bool:
        """Whether a context of these bytes is ready."""
        return any(c.content_hash == content_hash and c.state == "ready" for c in self._ids)

    async def acquire(
        self, file: SteadyFile, key: ContextKey, name: str, progress: StageProgress
    ) -> tuple[Context, bool]:
        """A lease on the context of these bytes, loading it when it is not resident.

        Returns:
            The context, ready, and whether it was there or under way already.

        Raises:
            BrokerError: the load failed; nothing is left of it but a line in the history.
        """
        while True:
            await self.gate.passed()
            context = self._by_key.get(key)
            if context is not None and context.lost is not None:
                context = None
            shared = context is not None
            if context is None:
                context = self._begin(file, key)
            elif context.task is not None:
                self.joined_loads_total += 1
            try:
                await self._join(context, name, progress)
            except BrokerError:
                # What became of the file of whoever came first is nothing to those who joined.
                if not shared or not context.file.gone:
                    raise
            else:
                return context, shared

    async def _join(self, context: Context, name: str, progress: StageProgress) -> None:
        """Waits until it is loaded, and takes a lease."""
        context.waiters += 1
        context.watchers.append(progress)
        context.wanted_as.append(name)
        try:
            if context.task is not None:
                await asyncio.shield(context.task)
            await self.gate.passed()
            check_usable(context)
            context.acquire(name)
        finally:
            context.wanted_as.remove(name)
            context.watchers.remove(progress)
            context.waiters -= 1
            if not context.waiters and context.state == "verifying":
                self._give_up(context)
            context.touch()

    def _give_up(self, context: Context) -> None:
        """Nobody waits for a trial any more: it ends, and who comes now starts anew."""
        context.unwanted.set()
        if self._by_key.get(context.key) is context:
            del self._by_key[context.key]

    def _begin(self, file: SteadyFile, key: ContextKey) -> Context:
        # The load shares the file: whoever asked may be gone before it ends.
        context = self._ids.add(lambda id: Context(id, key, file.size_bytes, self, file.share()))
        self._by_key[key] = context
        context.task = asyncio.create_task(self._load(context))
        # Its error is for those who wait; when there is nobody, it is in the history all the same.
        context.task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return context

    async def _load(self, context: Context) -> None:
        started = time.monotonic()
        try:
            await self._bring_in(context)
        except BaseException as error:
            cancelled = isinstance(error, SubmissionCancelled) and context.unwanted.is_set()
            self.load_errors_total += not cancelled
            context.enter("failed", str(error))
            context.spec = None
            if not cancelled:
                names = context.wanted_as or ["?"]
                self.history.failed(context.key, names, context.size_bytes, error)
                log.warning(
                    "context %d (%s) failed: %s", context.context_id, context.file.path, error
                )
            self._forget(context)
            context.file.close()
            raise
        finally:
            context.task = None
        assert context.spec is not None
        self.loads_total += 1
        self.history.forget(context.key)
        context.enter("ready")
        context.load_seconds = time.monotonic() - started
        log.info(
            "context %d ready: %s, %d bytes, %d graphs, %.3f s",
            context.context_id,
            context.content_hash[:12],
            context.size_bytes,
            len(context.spec.graphs),
            context.load_seconds,
        )
        self.free_if_unused(context)  # all who asked may have given up meanwhile

    async def _bring_in(self, context: Context) -> None:
        """Verifies, parses, creates: the whole load of a context, or an exception."""
        loop, file = asyncio.get_running_loop(), context.file
        total = file.size_bytes

        def tell(stage: "pb.LoadStage.ValueType") -> None:
            loop.call_soon_threadsafe(context.report, stage, 0, total)

        def verifying() -> None:
            context.enter("verifying")
            context.report(pb.LOAD_STAGE_VERIFYING, 0, total)

        # Not on the threads of loads, which may all be busy for long.
        await loop.run_in_executor(None, check_kind, file.file, self._backend.info)
        if self.verifier is not None:
            context.binary_class = await self.verifier.admit(
                context.content_hash, file, self._others(context), context.unwanted, verifying
            )
        if context.unwanted.is_set():
            raise SubmissionCancelled("nobody waits for this load any more")
        context.enter("loading")

        def parse() -> BinarySpec:
            tell(pb.LOAD_STAGE_MAPPING)
            file.ensure(context.content_hash)
            with file.map() as region:
                return self._backend.read_spec(region)

        def create(spec: BinarySpec) -> BackendContext:
            tell(pb.LOAD_STAGE_CREATING)
            file.ensure(context.content_hash)
            return self.creator.create(file, spec, context.key.enabled_graphs)

        spec = await self.on_thread(parse)
        context.warnings = tuple(check_spec(spec, self._backend.info))
        for warning in context.warnings:
            log.warning("context %d: %s", context.context_id, warning)
        check_names(spec, context.key.enabled_graphs)
        if self._backend.info.emulated:
            check_class(spec, [c.spec for c in self._ids if c.spec])
        context.spec = spec  # from here on it counts for the class of those that follow
        async with self.gate.creating(f"context {context.context_id} is being created"):
            context.native = await self.on_thread(lambda: create(spec))
            self.settle(context)

    async def on_thread(self, work: Callable[[], T]) -> T:
        """`work` off the event loop: for calls into the library that may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def settle(self, context: Context) -> None:
        """It was created: its file is let go, unless the backend goes on reading it."""
        assert context.native is not None
        self._by_key.setdefault(context.key, context)  # where a reset had lost it
        context.file.settle(keep=context.native.keeps_binary)
        if context.native.keeps_binary:
            self._watch.add(context)

    def _lose(self, context: Context, error: BaseException) -> None:
        """Its file goes and cannot be copied: nobody may execute it, nor join it, any more."""
        native, context.native = context.native, None
        assert native is not None
        context.lost = LeaseRevoked(
            f"its file {str(context.file.path)!r} changes, and could not be copied: {error}"
        )
        context.enter("lost", str(context.lost))
        log.error("context %d is lost: %s", context.context_id, context.lost)
        context.waiters += 1  # until it is freed
        self.gate.add_closing(asyncio.create_task(self._free_lost(context, native)))

    async def _free_lost(self, context: Context, native: BackendContext) -> None:
        """Frees the native part as soon as nothing executes, then fails who waits to."""
        bound = list(context.bound)
        for one in bound:
            one.hold()
        while context.making or not all(one.parked for one in bound):
            await asyncio.sleep(_PARKED_SECONDS)
        try:
            await self.on_thread(native.close)
        except BrokerError as error:
            log.error("context %d could not be freed: %s", context.context_id, error)
        context.file.settle(keep=False)  # whoever waits to write it goes on
        for one in bound:
            one.let_go()
        context.waiters -= 1
        context.touch()

    def _others(self, context: Context) -> Callable[[], list[Context]]:
        """Those that are loaded, or will be; a lost one may come back, if its file is there."""
        return lambda: [
            c
            for c in self._ids
            if c is not context
            and (c.state in ("loading", "ready") or (c.state == "lost" and not c.file.gone))
        ]

    def _forget(self, context: Context) -> None:
        if self._by_key.get(context.key) is context:
            del self._by_key[context.key]
        self._ids.remove(context.context_id)

    def free_if_unused(self, context: Context) -> None:
        """Frees a ready or lost context that nobody holds, waits for or binds."""
        needed = context.leases or context.waiters or context.binding_count
        if context.state not in ("ready", "lost") or needed:
            return
        context.enter("closed")
        self.history.known(
            context.key,
            context.known_as,
            context.size_bytes,
            run_count=context.run_count(),
            idle_seconds=context.idle_seconds(),
        )
        self._forget(context)
        self.gate.add_closing(asyncio.create_task(self._free(context)))

    async def _free(self, context: Context) -> None:
        native, context.native = context.native, None
        try:
            if native is not None:
                await self.on_thread(native.close)
        except BrokerError as error:
            log.error("context %d could not be freed: %s", context.context_id, error)
        else:
            log.info("context %d freed: %s", context.context_id, context.content_hash[:12])
        finally:
            context.file.close()

    async def close(self) -> None:
        """Ends trials, waits for the loads and frees under way, then frees what is left."""
        for context in self._ids:
            context.unwanted.set()
        loading = [c.task for c in self._ids if c.task is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        for context in list(self._ids):
            context.leases = 0
            context.bound.clear()
            context.touch()
        await self.gate.wait_closed()
        self.registrar.close()
        await asyncio.get_running_loop().run_in_executor(None, self._watch.close)
