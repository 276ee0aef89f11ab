# SPDX-License-Identifier: Apache-2.0
"""Bindings: a graph together with the buffer regions of all its tensors, checked once, here.

The QNN library checks neither sizes nor overlap (it would write past the end), so whatever gets
past `check_regions` is executed as it is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qnnbroker.native.executor import BAND_NORMAL, ExecutorSession
from qnnbroker.protos.errors import InvalidRequest, LimitExceeded
from qnnbroker.protos.tensors import TensorSpec

from .backends.base import Span
from .bound import BoundGraph
from .buffers import BufferTable, SharedBuffer
from .config import BrokerConfig
from .executor import LoopExecutor
from .ids import IdTable
from .models import GraphView


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
        self._ending: dict[int, BoundGraph] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def create(
        self,
        graph: GraphView,
        inputs: Iterable[tuple[str, RegionRef]],
        outputs: Iterable[tuple[str, RegionRef]],
        buffers: BufferTable,
        band: int = BAND_NORMAL,
        zero_copy: str = "",
    ) -> Binding:
        """Checks everything, then builds the native tensor arrays once.

        Raises:
            InvalidRequest, NotFound, LeaseRevoked: see check_regions and check_overlap.
            LimitExceeded: reason BINDINGS.
            Unsupported: reason BACKEND_LACKS; memory has to be registered and cannot be.
        """
        if len(self._ids) >= self._config.max_bindings:
            raise LimitExceeded(
                f"the session holds {len(self._ids)} bindings, its limit", reason="BINDINGS"
            )
        ins = check_regions("input", graph.inputs, inputs, buffers)
        outs = check_regions("output", graph.outputs, outputs, buffers)
        check_overlap(ins, outs)
        held = {r.buffer for r in (*ins, *outs)}

        def gone() -> None:
            for buffer in held:
                buffer.let_go()

        bound = BoundGraph(
            self._executor,
            self._session,
            graph,
            [r.span for r in ins],
            [r.span for r in outs],
            band=band,
            zero_copy=zero_copy or self._config.zero_copy,
            when_gone=gone,
        )
        for buffer in held:
            buffer.users += 1

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
        self._ending = {id: b for id, b in self._ending.items() if not b.gone}
        self._ending[binding_id] = bound
        bound.release()
        return bound

    def __iter__(self) -> Iterator[Binding]:
        return iter(self._ids)

    def close(self) -> None:
        """Releases all. Idempotent."""
        for binding in list(self._ids):
            self.release(binding.binding_id)
