# SPDX-License-Identifier: Apache-2.0
"""Bindings: a graph together with the buffer regions of all its tensors, checked once, here.

The QNN library checks neither sizes nor overlap (it would write past the end), so whatever gets
past `check_regions` is executed as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qnnbroker.native.executor import BAND_NORMAL, ExecutorSession
from qnnbroker.protos.errors import InvalidRequest, LimitExceeded, NotFound
from qnnbroker.protos.tensors import TensorSpec

from .backends.base import Span
from .bound import BoundGraph
from .buffers import BufferTable, SharedBuffer
from .config import BrokerConfig
from .executor import LoopExecutor
from .gating import check_usable
from .ids import IdTable
from .models import GraphView
from .registrar import Steps
from .registrations import Lease


@dataclass(frozen=True, slots=True)
class RegionRef:
    """Where a client says that a tensor lies."""

    buffer_id: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CheckedRegion:
    """A region that fits its tensor."""

    spec: TensorSpec
    buffer: SharedBuffer
    offset_bytes: int

    @property
    def span(self) -> Span:
        return (self.buffer.region, self.offset_bytes, self.spec.size_bytes)

    def overlaps(self, other: "CheckedRegion") -> bool:
        return (
            self.buffer is other.buffer
            and self.offset_bytes < other.offset_bytes + other.spec.size_bytes
            and other.offset_bytes < self.offset_bytes + self.spec.size_bytes
        )


def check_regions(
    kind: str,
    specs: Sequence[TensorSpec],
    regions: Iterable[tuple[str, RegionRef]],
    buffers: BufferTable,
) -> list[CheckedRegion]:
    """The regions in the order of `specs`, each proved to hold exactly its tensor.

    Raises:
        InvalidRequest: TENSOR_MISMATCH, BAD_OFFSET or BAD_ALIGNMENT; names the tensor.
        NotFound, LeaseRevoked: the buffer.
    """
    given: dict[str, RegionRef] = {}
    for name, ref in regions:
        if name in given:
            raise InvalidRequest(f"{kind} {name!r} is given twice", reason="TENSOR_MISMATCH")
        given[name] = ref
    check_names(kind, specs, given)
    return [check_region(kind, spec, given[spec.name], buffers) for spec in specs]


def check_names(kind: str, specs: Sequence[TensorSpec], given: Mapping[str, object]) -> None:
    """Refuses missing and unknown tensors by name."""
    wanted = {spec.name for spec in specs}
    if missing := [s.name for s in specs if s.name not in given]:
        raise InvalidRequest(
            f"{kind} {missing[0]!r} is missing; wanted {sorted(wanted)}, found {sorted(given)}",
            reason="TENSOR_MISMATCH",
        )
    if extra := sorted(set(given) - wanted):
        raise InvalidRequest(
            f"the graph has no {kind} {extra[0]!r}; it has {sorted(wanted)}",
            reason="TENSOR_MISMATCH",
        )


def check_region(
    kind: str, spec: TensorSpec, ref: RegionRef, buffers: BufferTable
) -> CheckedRegion:
    """One region against its tensor and its buffer."""
    buffer = buffers.get(ref.buffer_id)
    if ref.size_bytes != spec.size_bytes:
        raise InvalidRequest(
            f"{kind} {spec.name!r} needs exactly {spec.size_bytes} bytes "
            f"({spec.element}{list(spec.shape)}), the region has {ref.size_bytes}",
            reason="TENSOR_MISMATCH",
            tensor=spec.name,
            wanted=spec.size_bytes,
            found=ref.size_bytes,
        )
    # Subtract on the known side: no sum of two numbers of the peer's.
    if ref.size_bytes > buffer.size_bytes or ref.offset_bytes > buffer.size_bytes - ref.size_bytes:
        raise InvalidRequest(
            f"{kind} {spec.name!r} at offset {ref.offset_bytes} needs {spec.size_bytes} bytes, "
            f"buffer {buffer.buffer_id} has {buffer.size_bytes}",
            reason="BAD_OFFSET",
            buffer_id=buffer.buffer_id,
            wanted=ref.offset_bytes + spec.size_bytes,
            found=buffer.size_bytes,
        )
    if ref.offset_bytes % spec.element.itemsize:
        raise InvalidRequest(
            f"{kind} {spec.name!r} of {spec.element} wants an offset that is a multiple of "
            f"{spec.element.itemsize}, found {ref.offset_bytes}",
            reason="BAD_ALIGNMENT",
        )
    return CheckedRegion(spec, buffer, ref.offset_bytes)


def check_overlap(inputs: Sequence[CheckedRegion], outputs: Sequence[CheckedRegion]) -> None:
    """Refuses an output that shares bytes with anything else; inputs may share among themselves.

    Raises:
        InvalidRequest: reason OVERLAP; names both tensors.
    """
    for i, output in enumerate(outputs):
        for other in (*inputs, *outputs[:i]):
            if output.overlaps(other):
                raise InvalidRequest(
                    f"output {output.spec.name!r} and tensor {other.spec.name!r} share bytes of "
                    f"buffer {output.buffer.buffer_id}",
                    reason="OVERLAP",
                )


@dataclass(eq=False)
class Binding:
    """A graph of a resident context over regions of its session's buffers."""

    binding_id: int
    bound: BoundGraph

    @property
    def graph(self) -> GraphView:
        return self.bound.graph


class BindingTable:
    """The bindings of one session."""

    def __init__(
        self, config: BrokerConfig, executor: LoopExecutor, session: ExecutorSession
    ) -> None:
        self._config = config
        self._executor = executor
        self._session = session
        self._ids: IdTable[Binding] = IdTable("binding", "BINDING_UNKNOWN")
        self._making = 0
        self._closed = False
        self._ending: dict[int, BoundGraph] = {}
        self._look_at = 16

    def __len__(self) -> int:
        return len(self._ids)

    async def create(
        self,
        graph: GraphView,
        inputs: Iterable[tuple[str, RegionRef]],
        outputs: Iterable[tuple[str, RegionRef]],
        buffers: BufferTable,
        band: int = BAND_NORMAL,
        zero_copy: str = "",
    ) -> Binding:
        """Checks everything, registers the memory, then builds the native tensor arrays once.

        Does not suspend when the library need not be called. A caller that gives up leaves the
        binding, to be released with the session.

        Raises:
            InvalidRequest, NotFound, LeaseRevoked: see check_regions and check_overlap.
            NotFound: reason SESSION_UNKNOWN; the session has ended meanwhile.
            LimitExceeded: reason BINDINGS.
            Unsupported: reason BACKEND_LACKS; memory has to be registered and cannot be.
        """
        if len(self._ids) + self._making >= self._config.max_bindings:
            raise LimitExceeded(
                f"the session holds {len(self._ids) + self._making} bindings, its limit",
                reason="BINDINGS",
            )
        check_usable(graph.context)
        ins = check_regions("input", graph.inputs, inputs, buffers)
        outs = check_regions("output", graph.outputs, outputs, buffers)
        check_overlap(ins, outs)
        held = {r.buffer for r in (*ins, *outs)}
        zero_copy = zero_copy or self._config.zero_copy
        spans = [r.span for r in (*ins, *outs)]

        def gone() -> None:
            for buffer in held:
                buffer.let_go()

        def bind(lease: Lease) -> BoundGraph:
            bound = BoundGraph(
                self._executor,
                self._session,
                graph,
                spans[: len(ins)],
                spans[len(ins) :],
                band=band,
                zero_copy=zero_copy,
                lease=lease,
                when_gone=gone,
            )
            for buffer in held:
                buffer.users += 1
            return bound

        lease = graph.native.lease_memory_now(spans, zero_copy)
        if lease is not None:
            try:
                bound = bind(lease)
            except BaseException:
                graph.native.let_go_memory(lease)  # others use all of it: nothing is to be dropped
                raise
            return self._publish(bound)
        # From now on nothing that it needs goes, until it has ended.
        self._making += 1
        graph.context.waiters += 1
        for buffer in held:
            buffer.users += 1

        def ended() -> None:
            gone()
            self._making -= 1
            graph.context.waiters -= 1
            graph.context.touch()

        store = graph.context.store
        try:
            await store.gate.passed()  # a reset waits for registrations, and they for it
        except BaseException:
            ended()
            raise
        steps = self._register(graph, spans, zero_copy, bind, ended)
        return await store.registrar.start(steps, wait=True)

    def _register(
        self,
        graph: GraphView,
        spans: Sequence[Span],
        zero_copy: str,
        bind: Callable[[Lease], BoundGraph],
        ended: Callable[[], None],
    ) -> Steps[Binding]:
        """Binds once the memory is registered."""
        context = graph.context
        what = f"memory of graph {graph.name!r} of context {context.context_id} is being registered"
        context.making += 1
        try:
            with context.store.gate.inside(what):
                check_usable(context)
                native = graph.native  # a reset that we met may have made it anew
                lease: Lease = yield lambda: native.lease_memory(spans, zero_copy)
                try:
                    if self._closed:
                        raise NotFound(
                            "the session ended while its binding was made", reason="SESSION_UNKNOWN"
                        )
                    bound = bind(lease)
                except BaseException:
                    unused = native.let_go_memory(lease)
                    yield lambda: native.drop_memory(unused)
                    raise
                return self._publish(bound)
        finally:
            context.making -= 1
            ended()

    def _publish(self, bound: BoundGraph) -> Binding:
        """Gives it its number."""

        def make(id: int) -> Binding:
            bound.native.publish(id)
            return Binding(id, bound)

        try:
            return self._ids.add(make)
        except BaseException:
            bound.release()
            raise

    def get(self, binding_id: int) -> Binding:
        """The binding; NotFound or LeaseRevoked otherwise."""
        return self._ids.get(binding_id)

    def release(self, binding_id: int) -> BoundGraph:
        """Refuses further executes; the native part goes when what runs has ended.

        Returns:
            What is on its way out. Asking again gives it again, for as long as it is not gone.

        Raises:
            NotFound, LeaseRevoked: no such binding, or it is gone.
        """
        if (ending := self._ending.get(binding_id)) is not None and not ending.gone:
            return ending
        bound = self._ids.remove(binding_id).bound
        if len(self._ending) >= self._look_at:  # not every time: a session may release thousands
            self._ending = {id: b for id, b in self._ending.items() if not b.gone}
            self._look_at = 2 * len(self._ending) + 16
        self._ending[binding_id] = bound
        bound.release()
        return bound

    def __iter__(self) -> Iterator[Binding]:
        return iter(self._ids)

    def close(self) -> None:
        """Releases all, also those that are being made. Idempotent."""
        self._closed = True
        for binding in list(self._ids):
            self.release(binding.binding_id)
