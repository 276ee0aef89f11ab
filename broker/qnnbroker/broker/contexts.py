# SPDX-License-Identifier: Apache-2.0
"""The context store: one context per content hash, however many sessions load it.

A context lives while somebody holds a lease on it or a binding uses it. Loads of the same bytes
that are under way are one load; a caller that gives up leaves the others their result.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from qnnbroker.protos.errors import BrokerError, Unsupported, VersionMismatch
from qnnbroker.v1 import control_pb2 as pb

from .backends.base import Backend, BackendContext, BinarySpec
from .files import ModelFile
from .ids import IdTable

log = logging.getLogger(__name__)

#: (stage, bytes done, bytes in all)
StageProgress = Callable[["pb.LoadStage.ValueType", int, int], None]


@dataclass(eq=False)
class Context:
    """A context binary and, once ready, what the backend made of it."""

    context_id: int
    content_hash: str
    size_bytes: int
    store: "ContextStore"
    state: str = "loading"
    detail: str = ""
    spec: BinarySpec | None = None
    native: BackendContext | None = None
    task: asyncio.Task[None] | None = None
    watchers: list[StageProgress] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    waiters: int = 0
    leases: int = 0
    binding_count: int = 0
    load_seconds: float = 0.0

    def acquire(self, name: str) -> None:
        """Takes a lease; the name is what the holder calls it."""
        self.leases += 1
        self.names[name] = self.names.get(name, 0) + 1

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
    """Every context of the backend. Belongs to the event loop's thread."""

    def __init__(self, backend: Backend, threads: Executor) -> None:
        self._backend = backend
        self._threads = threads
        self._ids: IdTable[Context] = IdTable("context", "CONTEXT_UNKNOWN")
        self._by_hash: dict[str, Context] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.loads_total = 0
        self.load_errors_total = 0
        self.joined_loads_total = 0

    def __len__(self) -> int:
        return len(self._ids)

    def all(self) -> list[Context]:
        """Every context, loading ones included."""
        return list(self._ids)

    @property
    def closing_count(self) -> int:
        """Contexts being freed now."""
        return len(self._closing)

    async def acquire(
        self, file: ModelFile, content_hash: str, name: str, progress: StageProgress
    ) -> tuple[Context, bool]:
        """A lease on the context of these bytes, loading it when it is not resident.

        Returns:
            The context, ready, and whether it was there or under way already.

        Raises:
            BrokerError: the load failed; nothing is left of it.
        """
        context = self._by_hash.get(content_hash)
        shared = context is not None
        if context is None:
            context = self._begin(file, content_hash)
        elif context.state == "loading":
            self.joined_loads_total += 1
        context.waiters += 1
        context.watchers.append(progress)
        try:
            if context.task is not None:
                await asyncio.shield(context.task)
            context.acquire(name)
        finally:
            context.watchers.remove(progress)
            context.waiters -= 1
            context.touch()
        return context, shared

    def _begin(self, file: ModelFile, content_hash: str) -> Context:
        # The load has a file of its own: whoever asked may be gone before it ends.
        own = file.duplicate()
        context = self._ids.add(lambda id: Context(id, content_hash, file.size_bytes, self))
        self._by_hash[content_hash] = context
        context.task = asyncio.create_task(self._load(context, own))
        return context

    async def _load(self, context: Context, file: ModelFile) -> None:
        loop = asyncio.get_running_loop()
        started = time.monotonic()

        def tell(stage: "pb.LoadStage.ValueType") -> None:
            loop.call_soon_threadsafe(context.report, stage, 0, file.size_bytes)

        def parse() -> BinarySpec:
            tell(pb.LOAD_STAGE_MAPPING)
            with file.map() as region:
                spec = self._backend.read_spec(region)
            check_loadable(spec, self._backend.info)
            return spec

        def create(spec: BinarySpec) -> BackendContext:
            tell(pb.LOAD_STAGE_CREATING)
            with file.map() as region:
                native = self._backend.create_context(region, spec)
            try:
                file.check_unchanged()
            except BrokerError:
                native.close()
                raise
            return native

        try:
            spec = await loop.run_in_executor(self._threads, parse)
            if self._backend.info.emulated:
                check_class(spec, [c.spec for c in self._ids if c.spec])
            context.spec = spec  # from here on it counts for the class of those that follow
            context.native = await loop.run_in_executor(self._threads, create, spec)
        except BaseException as error:
            self.load_errors_total += 1
            context.state, context.detail, context.spec = "failed", str(error), None
            self._forget(context)
            log.warning("context %d (%s) failed: %s", context.context_id, file.path, error)
            raise
        finally:
            file.close()
            context.task = None
        self.loads_total += 1
        context.state = "ready"
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

    def _forget(self, context: Context) -> None:
        if self._by_hash.get(context.content_hash) is context:
            del self._by_hash[context.content_hash]
        self._ids.remove(context.context_id)

    def free_if_unused(self, context: Context) -> None:
        """Frees a ready context that nobody holds, waits for or binds."""
        if context.state != "ready" or context.leases or context.waiters or context.binding_count:
            return
        context.state = "closed"
        self._forget(context)
        task = asyncio.create_task(self._free(context))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _free(self, context: Context) -> None:
        native, context.native = context.native, None
        assert native is not None
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, native.close)
        except BrokerError as error:
            log.error("context %d could not be freed: %s", context.context_id, error)
        else:
            log.info("context %d freed: %s", context.context_id, context.content_hash[:12])

    async def close(self) -> None:
        """Waits for the loads and frees under way, then frees what is left."""
        loading = [c.task for c in self._ids if c.task is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        for context in list(self._ids):
            context.leases = context.binding_count = 0
            context.touch()
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)


def check_loadable(spec: BinarySpec, backend: pb.BackendInfo) -> None:
    """Refuses what would harm the process, before the library sees it.

    Raises:
        Unsupported: reason SHARED_WEIGHTS.
        VersionMismatch: reason WRONG_CHIP, on real hardware.
    """
    if spec.shared_weight_bytes and backend.emulated:
        raise Unsupported(
            f"the binary shares {spec.shared_weight_bytes} bytes of weights between its graphs; "
            "the emulation cannot load such a file (it would crash)",
            reason="SHARED_WEIGHTS",
        )
    if not backend.emulated and spec.dsp_arch and spec.dsp_arch != backend.dsp_arch:
        raise VersionMismatch(
            f"the binary is for DSP arch {spec.dsp_arch}, the device has {backend.dsp_arch}",
            reason="WRONG_CHIP",
            wanted=backend.dsp_arch,
            found=spec.dsp_arch,
        )


def check_class(spec: BinarySpec, resident: list[BinarySpec]) -> None:
    """Refuses a binary of another class than the resident ones: they would destroy each other.

    Binaries compiled with a soc_model and those without cannot live in one process (both then fail
    or crash). The file tells only part of it: SoC 0 means that neither SoC nor arch was given.

    Raises:
        VersionMismatch: reason BINARY_CLASS.
    """
    for other in resident:
        if bool(other.soc_model) != bool(spec.soc_model):
            raise VersionMismatch(
                f"the binary was compiled {'with' if spec.soc_model else 'without'} a SoC model, "
                f"the resident ones {'with' if other.soc_model else 'without'}; the two kinds "
                "cannot live in one process: compile all with --soc-model",
                reason="BINARY_CLASS",
                wanted=other.soc_model,
                found=spec.soc_model,
            )
