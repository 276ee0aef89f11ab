# SPDX-License-Identifier: Apache-2.0
"""Models: a context as one loader sees it, with the tensor names that its file offers.

A model is a lease on a context. It belongs to a session, or to nobody: then it stays for its
keep-alive after the last use.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qnnbroker.protos.errors import AlreadyExists, InvalidRequest, NotFound
from qnnbroker.protos.tensors import TensorSpec
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import types_pb2

from .admission import check_wrapper
from .backends.base import BackendGraph, ClosableRunnable, Span
from .compatibility import METADATA_KEY
from .contexts import Context, ContextKey, ContextStore, StageProgress
from .epcontext import Wrapper, names_for
from .files import HashCache
from .ids import IdTable
from .layouts import OpenedModel, open_path
from .registrations import Lease
from .steady import content_hash, to_its_end
from .threads import made_on_thread

log = logging.getLogger(__name__)


@dataclass(eq=False)
class GraphView:
    """A graph under the names that its model offers, in the backend's order."""

    graph_id: int
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    context: Context
    native: BackendGraph

    def bind(
        self, inputs: Sequence[Span], outputs: Sequence[Span], lease: Lease | None = None
    ) -> ClosableRunnable:
        """A native runnable over checked spans, by handle where `lease` has one.

        Raises:
            InvalidRequest: the binding refused a span; our own checks come first, so this is rare.
        """
        try:
            return self.native.bind(inputs, outputs, lease)
        except ValueError as error:
            raise InvalidRequest(str(error), reason="TENSOR_MISMATCH") from error

    def to_proto(self) -> types_pb2.GraphSpec:
        return types_pb2.GraphSpec(
            graph_id=self.graph_id,
            name=self.name,
            inputs=[s.to_proto() for s in self.inputs],
            outputs=[s.to_proto() for s in self.outputs],
        )


@dataclass(eq=False)
class Model:
    """A lease on a context, with the names of one file."""

    model_id: int
    name: str
    context: Context
    source: Path
    session_id: int | None
    keep_alive_seconds: float
    graphs: list[GraphView] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    #: What the wrapper says that its binary was compiled for, in its own words.
    compatibility: str = ""
    expiry: asyncio.TimerHandle | None = None
    unloaded: bool = False

    def to_proto(self) -> pb.Model:
        spec = self.context.spec
        assert spec is not None
        return pb.Model(
            model_id=self.model_id,
            name=self.name,
            context_id=self.context.context_id,
            content_hash=self.context.content_hash,
            size_bytes=self.context.size_bytes,
            graphs=[g.to_proto() for g in self.graphs],
            source_path=str(self.source),
            sdk_build_id=spec.build_id,
            dsp_arch=spec.dsp_arch,
            soc_model=spec.soc_model,
            warnings=(*self.context.warnings, *self.warnings),
            compatibility=self.compatibility,
            backend=self.context.store.backend_name,
            enabled_graphs=self.context.key.enabled_graphs,
        )

    def graph(self, name: str) -> GraphView:
        """The graph of that name; with an empty name, the only one.

        Raises:
            NotFound: reason GRAPH_UNKNOWN.
            InvalidRequest: no name, and several graphs.
        """
        if not name and len(self.graphs) == 1:
            return self.graphs[0]
        names = [g.name for g in self.graphs]
        if not name:
            raise InvalidRequest(f"model {self.name!r} has several graphs, name one of {names}")
        for graph in self.graphs:
            if graph.name == name:
                return graph
        raise NotFound(
            f"model {self.name!r} has no graph {name!r}; it has {names}", reason="GRAPH_UNKNOWN"
        )


class ModelTable:
    """Every model of every session. Belongs to the event loop's thread."""

    def __init__(
        self, contexts: ContextStore, hashes: HashCache, keep_alive_seconds: float
    ) -> None:
        self._contexts = contexts
        self._hashes = hashes
        self._keep_alive = keep_alive_seconds
        self._models: IdTable[Model] = IdTable("model", "MODEL_UNKNOWN")
        self._graphs: IdTable[GraphView] = IdTable("graph", "GRAPH_UNKNOWN")

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def count_of(self, session_id: int) -> int:
        """Models that the session holds."""
        return sum(m.session_id == session_id for m in self._models)

    async def load(
        self,
        path: str,
        name: str,
        session_id: int | None,
        keep_alive_seconds: float,
        progress: StageProgress,
        *,
        opened: OpenedModel | None = None,
        enable_graphs: Sequence[str] = (),
        replace: bool = False,
    ) -> tuple[Model, bool]:
        """Loads a context binary or an EPContext wrapper, or joins what is there.

        Args:
            path: opened here, with the broker's own rights, unless `opened` is given.
            opened: what the client opened; closed afterwards.
            enable_graphs: the QNN graphs to make executable; none named means all.
            replace: without a session, take the name from a model of other content.

        Returns:
            The model, and whether its context was shared.

        Raises:
            BrokerError: by what was wrong; nothing is left of it.
        """
        source = Path(path) if opened is None else opened.path
        if not source.is_absolute():
            if opened is not None:
                opened.close()
            raise InvalidRequest(f"an absolute path wanted, found {str(source)!r}")
        if opened is None:
            opened = await open_off_loop(source)
        try:
            digest = await content_hash(
                opened.binary,
                self._hashes,
                lambda done, total: progress(pb.LOAD_STAGE_HASHING, done, total),
                self._contexts.is_resident,
            )
            if opened.manifest is not None:
                checking = asyncio.get_running_loop().run_in_executor(
                    self._hashes.threads, opened.check_manifest, digest
                )
                await to_its_end(checking)
            name = name or source.name.split(".")[0].removesuffix("_ctx")
            key = ContextKey(digest, tuple(sorted(set(enable_graphs))))
            if session_id is None and not replace:
                self._check_name(name, key, source)
            context, shared = await self._contexts.acquire(opened.binary, key, name, progress)
        finally:
            opened.close()
        try:
            assert context.spec is not None
            if session_id is None and not replace:  # somebody may have been quicker
                self._check_name(name, key, source)
            warnings = check_wrapper(opened.wrapper, context.spec)
            views = offered_graphs(context, opened.wrapper)
        except BaseException:
            context.release(name)
            raise
        keep_alive = keep_alive_seconds or self._keep_alive
        model = self._models.add(
            lambda id: Model(id, name, context, source, session_id, keep_alive)
        )
        for warning in warnings:
            log.warning("model %s: %s", name, warning)
        model.warnings = tuple(warnings)
        if opened.wrapper is not None:
            model.compatibility = opened.wrapper.metadata.get(METADATA_KEY, "")
        for native, inputs, outputs in views:
            model.graphs.append(
                self._graphs.add(
                    lambda id, n=native, i=inputs, o=outputs: GraphView(  # type: ignore[misc]
                        id, n.spec.name, i, o, context, n
                    )
                )
            )
        if session_id is None:
            self._replace_anonymous(model)
            self.keep_alive(model)
        return model, shared

    def _check_name(self, name: str, key: ContextKey, source: Path) -> None:
        """Refuses a name that another model has which no session holds.

        Raises:
            AlreadyExists: reason NAME_TAKEN.
        """
        for other in self._models:
            if (other.session_id, other.name) == (None, name) and other.context.key != key:
                raise AlreadyExists(
                    f"the name {name!r} is taken by {described(other.source, other.context.key)}; "
                    f"{described(source, key)} is another model: give it another name, or replace "
                    "that one",
                    reason="NAME_TAKEN",
                    model_id=other.model_id,
                )

    def _replace_anonymous(self, model: Model) -> None:
        for other in list(self._models):
            if other.session_id is None and other is not model and other.name == model.name:
                self.unload(other)

    def keep_alive(self, model: Model) -> None:
        """Starts a sessionless model's time anew; called after each use."""
        if model.session_id is not None or model.unloaded:
            return
        if model.expiry is not None:
            model.expiry.cancel()
            model.expiry = None
        if model.keep_alive_seconds > 0:
            model.expiry = asyncio.get_running_loop().call_later(
                model.keep_alive_seconds, self._expire, model
            )

    def _expire(self, model: Model) -> None:
        if model.context.binding_count:  # in use now
            self.keep_alive(model)
            return
        log.info("model %s was not used for %g s", model.name, model.keep_alive_seconds)
        self.unload(model)

    def get(self, model_id: int, session_id: int | None) -> Model:
        """The model, when it is this session's or nobody's.

        Raises:
            NotFound, LeaseRevoked: also for somebody else's model.
        """
        model = self._models.get(model_id)
        if model.session_id not in (None, session_id):
            raise NotFound(f"no model has the id {model_id}", reason="MODEL_UNKNOWN", id=model_id)
        return model

    def find(self, name: str, session_id: int | None = None) -> Model:
        """A resident model by its name, or by the start of its content hash (8 digits or more).

        The session's own come first, then those that nobody's session ends, then anybody's.

        Raises:
            NotFound: reason MODEL_UNKNOWN.
            InvalidRequest: the name means several different contexts.
        """
        found = [
            m
            for m in self._models
            if m.name == name or (len(name) >= 8 and m.context.content_hash.startswith(name))
        ]
        if not found:
            known = ", ".join(map(repr, sorted({m.name for m in self._models})))
            there = f"there are {known}" if known else "none is resident"
            raise NotFound(f"no resident model is called {name!r}; {there}", reason="MODEL_UNKNOWN")
        for owner in (session_id, None):
            if own := [m for m in found if m.session_id == owner]:
                found = own
                break
        if (count := len({m.context.content_hash for m in found})) > 1:
            raise InvalidRequest(
                f"{name!r} means {count} different models; use the start of a content hash"
            )
        return found[0]

    def graph(self, graph_id: int, session_id: int) -> GraphView:
        """The graph, when its model is this session's or nobody's; NotFound or LeaseRevoked."""
        graph = self._graphs.get(graph_id)
        for model in self._models:
            if graph in model.graphs and model.session_id in (None, session_id):
                return graph
        raise NotFound(f"no graph has the id {graph_id}", reason="GRAPH_UNKNOWN", id=graph_id)

    def unload(self, model: Model) -> None:
        """Gives the lease back. Idempotent. Bindings over its graphs keep the context."""
        if model.unloaded:
            return
        model.unloaded = True
        self._models.remove(model.model_id)
        for graph in model.graphs:
            self._graphs.remove(graph.graph_id)
        if model.expiry is not None:
            model.expiry.cancel()
        model.context.release(model.name)

    def release_all_of(self, session_id: int) -> None:
        """Unloads what a session holds."""
        for model in list(self._models):
            if model.session_id == session_id:
                self.unload(model)

    def close(self) -> None:
        """Unloads everything."""
        for model in list(self._models):
            self.unload(model)


def described(source: Path, key: ContextKey) -> str:
    """A model by its file, and the content and the graphs that make it what it is."""
    graphs = f", graphs {', '.join(key.enabled_graphs)}" if key.enabled_graphs else ""
    return f"{str(source)!r} ({key.content_hash[:12]}{graphs})"


async def open_off_loop(source: Path) -> OpenedModel:
    """`open_path` on a thread; what it opened is closed when the caller gives up meanwhile."""
    return await made_on_thread(None, lambda: open_path(source))


def offered_graphs(
    context: Context, wrapper: Wrapper | None
) -> list[tuple[BackendGraph, tuple[TensorSpec, ...], tuple[TensorSpec, ...]]]:
    """The graphs that a file offers, each with its inputs and outputs under the file's names.

    Raises:
        InvalidRequest: reason BAD_FILE; wrapper and binary do not belong together.
    """
    assert context.native is not None
    graphs = context.native.graphs
    if wrapper is None:
        return [(g, g.spec.inputs, g.spec.outputs) for g in graphs.values()]
    assert context.spec is not None
    known = {g.name for g in context.spec.graphs}
    offered = []
    for node in wrapper.nodes:
        graph = graphs.get(node.partition_name)
        if graph is None and node.partition_name in known:
            continue  # not among those that the caller wanted executable
        if graph is None:
            raise InvalidRequest(
                f"the wrapper names graph {node.partition_name!r}, its binary has "
                f"{sorted(graphs)}: the two do not belong together",
                reason="BAD_FILE",
            )
        names = names_for(node)
        offered.append(
            (graph, renamed(graph.spec.inputs, names), renamed(graph.spec.outputs, names))
        )
    return offered


def renamed(specs: Sequence[TensorSpec], names: dict[str, str]) -> tuple[TensorSpec, ...]:
    """The same specs under the names of the wrapper's edges."""
    for spec in specs:
        if spec.name not in names:
            raise InvalidRequest(
                f"the wrapper has no edge for tensor {spec.name!r}; it has {sorted(names)}",
                reason="BAD_FILE",
            )
    return tuple(TensorSpec(names[s.name], s.element, s.shape, s.quantization) for s in specs)
