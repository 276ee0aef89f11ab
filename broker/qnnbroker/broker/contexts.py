# SPDX-License-Identifier: Apache-2.0
"""The context store: one context per content, however many sessions load it.

A context lives while somebody holds a lease on it or a binding uses it. Loads of the same bytes
that are under way are one load; a caller that gives up leaves the others their result, and the last
one to give up ends a trial that is under way.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from qnnbroker.protos.errors import BrokerError, SubmissionCancelled
from qnnbroker.v1 import control_pb2 as pb

from .admission import check_class, check_names, check_spec
from .backends.base import Backend, BackendContext, BinarySpec
from .creating import Creator
from .gating import Gate, check_usable
from .history import History
from .ids import IdTable
from .steady import SteadyFile
from .verifying import Verifier

if TYPE_CHECKING:
    from .bound import BoundGraph

T = TypeVar("T")

log = logging.getLogger(__name__)

#: How often a file is looked at that a context goes on reading; who would write it waits so long.
WATCH_SECONDS = 1.0

#: (stage, bytes done, bytes in all)
StageProgress = Callable[["pb.LoadStage.ValueType", int, int], None]


class ContextKey(NamedTuple):
    """What makes a context another one. Nothing that a session may choose for itself is here."""

    content_hash: str
    #: Executable ones, sorted; empty means all.
    enabled_graphs: tuple[str, ...] = ()


@dataclass(eq=False)
class Context:
    """A context binary and, once ready, what the backend made of it.

    Its states: loading, verifying, loading again, ready, closed; or failed. One that a reset could
    not make again is lost, and the next reset tries it once more.
    """

    context_id: int
    key: ContextKey
    size_bytes: int
    store: "ContextStore"
    file: SteadyFile
    state: str = "loading"
    detail: str = ""
    since: float = field(default_factory=time.monotonic)
    binary_class: str = ""
    warnings: tuple[str, ...] = ()
    spec: BinarySpec | None = None
    native: BackendContext | None = None
    #: Why it is lost, while it is.
    lost: BrokerError | None = None
    task: asyncio.Task[None] | None = None
    watchers: list[StageProgress] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    known_as: list[str] = field(default_factory=list)
    wanted_as: list[str] = field(default_factory=list)
    waiters: int = 0
    leases: int = 0
    #: Bindings over its graphs, live and parked.
    bound: "set[BoundGraph]" = field(default_factory=set)
    load_seconds: float = 0.0
    unwanted: threading.Event = field(default_factory=threading.Event)

    @property
    def content_hash(self) -> str:
        return self.key.content_hash

    def enter(self, state: str, detail: str = "") -> None:
        """From now on it is in that state."""
        self.state, self.detail, self.since = state, detail, time.monotonic()

    def binary(self) -> SteadyFile | None:
        """Its file, held, if that still has the bytes that were loaded. May read it: blocks."""
        try:
            held = SteadyFile(self.file.original().duplicate())
        except OSError:
            return None
        try:
            if held.hash_held() == self.content_hash:
                return held
        except BrokerError as error:
            log.debug("context %d: its file is not what it was: %s", self.context_id, error)
        held.close()
        return None

    @property
    def binding_count(self) -> int:
        return len(self.bound)

    def acquire(self, name: str) -> None:
        """Takes a lease; the name is what the holder calls it."""
        self.leases += 1
        self.names[name] = self.names.get(name, 0) + 1
        self.known_as = [name]

    def release(self, name: str) -> None:
        """Gives a lease back; the last one frees the context."""
        self.leases -= 1
        self.names[name] -= 1
        if not self.names[name]:
            del self.names[name]
        self.touch()

    def touch(self) -> None:
        """Something let go: frees the context when nothing needs it any more."""
        self.store.free_if_unused(self)

    def idle_seconds(self) -> float:
        """Since the last execute of any of its graphs ended; -1 when there was none."""
        graphs = self.native.graphs.values() if self.native else ()
        last = max((g.statistics()["last_end_ns"] for g in graphs), default=0)
        return (time.monotonic_ns() - last) / 1e9 if last else -1.0

    def run_count(self) -> int:
        """Executes of all its graphs so far."""
        graphs = self.native.graphs.values() if self.native else ()
        return sum(g.statistics()["run_count"] for g in graphs)

    def report(self, stage: "pb.LoadStage.ValueType", done: int, total: int) -> None:
        for watcher in list(self.watchers):
            watcher(stage, done, total)


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
        await self.gate.passed()
        context = self._by_key.get(key)
        if context is not None and context.lost is not None:
            context = None
        shared = context is not None
        if context is None:
            context = self._begin(file, key)
        elif context.task is not None:
            self.joined_loads_total += 1
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
        return context, shared

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
            log.warning("context %d: %s; the emulation does not mind", context.context_id, warning)
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
            self._watch(context)

    def _watch(self, context: Context) -> None:
        """Looks after a file that its context goes on reading: somebody may want to write it."""
        asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look_after, context)

    def _look_after(self, context: Context) -> None:
        native = context.native
        if native is None or context.state not in ("loading", "ready"):
            return
        if context.file.safe:
            return self._watch(context)

        def move() -> None:
            context.file.ensure(context.content_hash, then=native.move_binary)

        moving = asyncio.get_running_loop().run_in_executor(self._threads, move)
        moving.add_done_callback(lambda done: self._moved(context, done.exception()))

    def _moved(self, context: Context, error: BaseException | None) -> None:
        if error is None:
            log.info("context %d reads a copy now: its file changes", context.context_id)
            return self._watch(context)
        log.error("context %d reads a file that changes: %s", context.context_id, error)

    def _others(self, context: Context) -> Callable[[], list[Context]]:
        return lambda: [
            c for c in self._ids if c is not context and c.state in ("loading", "ready", "lost")
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
        self.history.known(context.key, context.known_as, context.size_bytes)
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
