# SPDX-License-Identifier: Apache-2.0
"""The contract that every backend keeps; one test suite runs on all of them.

Calls that may take long (create_context, close, lease_memory, drop_memory) block without the GIL
and are made on a thread of their own; `bind` is quick and made on the event loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from qnnbroker.native.region import Region
from qnnbroker.native.runnable import Runnable
from qnnbroker.protos.tensors import TensorSpec
from qnnbroker.v1 import control_pb2

if TYPE_CHECKING:
    from typing_extensions import Buffer as Buffer

    from ..power import PowerPort
    from ..registrations import Lease, MemoryStatistics, Registration
else:  # collections.abc has it from Python 3.12 on
    Buffer = object

#: (object with the buffer protocol, offset in bytes, size in bytes)
Span = tuple[Buffer, int, int]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Name, inputs and outputs of a graph, in the backend's order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class BinarySpec:
    """What a context binary says of itself."""

    graphs: tuple[GraphSpec, ...]
    build_id: str
    backend_id: int
    dsp_arch: int
    soc_model: int
    #: Bytes of constants that creating the context will cost, shared ones included.
    weight_bytes: int
    shared_weight_bytes: int
    #: Bytes the backend parsed; what the file should hold besides its header.
    blob_bytes: int
    core_api_version: tuple[int, ...] = ()
    backend_api_version: tuple[int, ...] = ()


class BackendGraph(Protocol):
    """One executable of a context."""

    @property
    def spec(self) -> GraphSpec: ...

    def lease_memory(self, spans: Sequence[Span], zero_copy: str) -> "Lease":
        """Registers the memory of the inputs and outputs, in that order, as `zero_copy` says.

        Raises:
            Unsupported: reason BACKEND_LACKS; required, and not to be had.
            BrokerError: the library failed.
        """

    def lease_memory_now(self, spans: Sequence[Span], zero_copy: str) -> "Lease | None":
        """The same where the library need not be called for it; else None.

        Raises:
            Unsupported: as `lease_memory`.
        """

    def let_go_memory(self, lease: "Lease") -> "list[Registration]":
        """Gives it back, once no runnable uses it; what is to be deregistered now. Idempotent."""

    def drop_memory(self, unused: "Sequence[Registration]") -> None:
        """Deregisters it: blocks."""

    def bind(
        self, inputs: Sequence[Span], outputs: Sequence[Span], lease: "Lease | None" = None
    ) -> "ClosableRunnable":
        """A runnable over these spans, in the order of the spec, by handle where `lease` has one.

        Raises:
            ValueError: a span does not fit its tensor, or overlaps where it must not.
        """

    def statistics(self) -> Mapping[str, int]:
        """run_count, error_count, execute_ns_total/min/max, queue_ns_total."""

    #: Of inline tensors, in both directions.
    copied_bytes: int


class ClosableRunnable(Runnable):
    """What `bind` gives: a native Runnable that can be closed."""

    def close(self) -> None:
        """Lets go of the spans. Idempotent; BufferError while it executes."""


class BackendContext(Protocol):
    """A context binary loaded into the backend."""

    @property
    def keeps_binary(self) -> bool:
        """Whether it reads the bytes that it was made from for as long as it lives."""

    def move_binary(self, fd: int) -> None:
        """Makes one that does read them from another file with the same bytes."""

    @property
    def graphs(self) -> Mapping[str, BackendGraph]: ...

    def close(self) -> None:
        """Frees it. Idempotent. Waits for an execute under way."""


class Backend(Protocol):
    """A library that runs graphs, started."""

    @property
    def info(self) -> control_pb2.BackendInfo: ...

    @property
    def memory(self) -> "MemoryStatistics":
        """What was registered of buffers, over all contexts."""

    def read_spec(self, data: Buffer) -> BinarySpec:
        """Parses a context binary.

        Raises:
            InvalidRequest: reason BAD_FILE.
            Unsupported: a dtype or encoding that has no place here.
        """

    def create_context(
        self, data: Buffer, spec: BinarySpec, enable_graphs: Sequence[str] = ()
    ) -> BackendContext:
        """Loads a context binary; keeps nothing of `data` when it returns.

        Args:
            enable_graphs: those that shall be executable; none named means all.

        Raises:
            InvalidRequest: it has no graph of that name.
            BackendError, LimitExceeded, VersionMismatch, Unsupported: by the library's code.
        """

    def create_file_mapped(
        self, region: Region, spec: BinarySpec, enable_graphs: Sequence[str] = ()
    ) -> BackendContext:
        """Loads a context binary that stays mapped as long as the context, which owns the region.

        Raises:
            Unsupported: reason BACKEND_LACKS; the region is still the caller's, as after any error.
            BackendError, InvalidRequest, LimitExceeded, VersionMismatch: as `create_context`.
        """

    def reset(self) -> None:
        """Starts anew; every context must be closed before.

        Raises:
            BrokerError: it does not start again.
        """

    def open_power(self) -> "PowerPort":
        """A client of the device's performance infrastructure; raises BrokerError: none."""

    def tidy(self) -> None:
        """Leaves out of memory what only loading needed. Any thread, beside all other calls."""

    def log_fileno(self) -> int:
        """An fd that is readable while log lines wait; -1 for none."""

    def drain_log(self) -> Sequence[tuple[int, str]]:
        """(logging level, text) of the lines since."""

    def close(self) -> None:
        """Ends the backend; every context must be closed before. Idempotent."""
