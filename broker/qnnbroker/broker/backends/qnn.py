# SPDX-License-Identifier: Apache-2.0
"""The QNN backend: the C API through `qnnbroker.native`, for the real library and for the fake.

The one place where a QNN code becomes one of our exceptions.
"""

import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qnnbroker.native import library_code
from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_error import QnnError
from qnnbroker.native.qnn_graph import QnnGraph
from qnnbroker.native.qnn_info import parse_binary
from qnnbroker.native.qnn_library import QnnLibrary, drain_log, log_fileno
from qnnbroker.native.qnn_memory import QnnRegistration
from qnnbroker.native.qnn_power import QnnPower
from qnnbroker.native.region import Region
from qnnbroker.protos.errors import (
    BackendError,
    BrokerError,
    BrokerUnavailable,
    InvalidRequest,
    Unsupported,
)
from qnnbroker.v1 import control_pb2

from ..registrations import ContextMemory, Lease, MemoryStatistics, Registration, Tensor
from .base import BinarySpec, Buffer, ClosableRunnable, GraphSpec, Span
from .probing import Asking, probe_backend, probe_context, replaced
from .qnn_errors import error_of_code as error_of_code
from .qnn_errors import translate
from .qnn_specs import binary_spec, dotted

log = logging.getLogger(__name__)

#: The library's number for "creates contexts through callbacks".
CAPABILITY_CALLBACK = 220

#: QNN log level -> logging level; verbose and debug are both below Python's debug.
LOG_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG, 5: 5}


def set_dsp_search_path(directory: Path) -> None:
    """Lets the DSP find its half of the library beside ours; before the first FastRPC session.

    Entries are separated by ';', and FastRPC appends its own defaults.
    """
    places = [directory, *sorted(directory.glob("hexagon-v*/unsigned"))]
    for variable in ("ADSP_LIBRARY_PATH", "DSP_LIBRARY_PATH"):
        before = os.environ.get(variable)
        os.environ[variable] = ";".join([*map(str, places), *([before] if before else [])])


class QnnGraphAdapter:
    """A native graph with its spec in our types."""

    def __init__(self, native: QnnGraph, spec: GraphSpec, memory: ContextMemory) -> None:
        self.native = native
        self._memory = memory
        self.spec = spec
        self.copied_bytes = 0

    def _tensors(self, spans: Sequence[Span]) -> list[Tensor]:
        infos = (*self.native.inputs, *self.native.outputs)
        return [
            Tensor(info.name, info.dtype, info.shape, span)
            for info, span in zip(infos, spans, strict=True)
        ]

    def lease_memory(self, spans: Sequence[Span], zero_copy: str) -> Lease:
        return self._memory.lease(self._tensors(spans), zero_copy)

    def lease_memory_now(self, spans: Sequence[Span], zero_copy: str) -> Lease | None:
        return self._memory.lease_now(self._tensors(spans), zero_copy)

    def let_go_memory(self, lease: Lease) -> list[Registration]:
        return self._memory.let_go(lease)

    def drop_memory(self, unused: Sequence[Registration]) -> None:
        self._memory.drop(unused)

    def bind(
        self, inputs: Sequence[Span], outputs: Sequence[Span], lease: Lease | None = None
    ) -> ClosableRunnable:
        known = None if lease is None else native_registrations(lease)
        return self.native.bind(inputs, outputs, known)  # type: ignore[return-value]

    def statistics(self) -> Mapping[str, int]:
        return self.native.statistics()


class QnnContextAdapter:
    """A native context and its graphs; and the region that it reads, if it keeps reading one."""

    _region: Region | None = None

    def __init__(
        self,
        native: QnnContext,
        spec: BinarySpec,
        enable_graphs: Sequence[str],
        memory: MemoryStatistics,
        probe_region: Callable[[], Region],
    ) -> None:
        self._native = native
        self.memory = ContextMemory(ContextPort(native), memory, probe_region)
        names = enable_graphs or [g.name for g in spec.graphs]
        specs = {g.name: g for g in spec.graphs}
        try:
            self.graphs = {
                n: QnnGraphAdapter(native.graph(n), specs[n], self.memory) for n in names
            }
        except BaseException:
            native.close()
            raise

    @property
    def keeps_binary(self) -> bool:
        return self._native.keeps_binary

    def own(self, region: Region) -> "QnnContextAdapter":
        """Closes the region when it is closed itself."""
        self._region = region
        return self

    def move_binary(self, fd: int) -> None:
        if self._region is not None:
            self._region.move_to(fd)

    def memory_evidence(self) -> tuple[bool, str]:
        """Whether this context takes registered memory, and how that was found."""
        support = self.memory.support()
        return bool(support.kinds), support.evidence

    def close(self) -> None:
        self.graphs.clear()
        self.memory.close()
        try:
            self._native.close()
        except QnnError as error:
            raise translate(error, "freeing a context") from error
        finally:
            if self._region is not None:
                self._region.release()


class QnnBackendAdapter:
    """A QNN library, started: backend and device.

    Args:
        directory: holds libQnnHtp.so and libQnnSystem.so.
        name: "qnn" or "fake", for people.
        log_level: QNN's, 1 to 5.
        probe_region: makes memory like that of buffers, to ask contexts with.

    Raises:
        BrokerError: the library is not there, does not fit, or does not start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "qnn",
        log_level: int = 2,
        probe_region: Callable[[], Region] | None = None,
    ) -> None:
        self.memory = MemoryStatistics()
        self._probe_region = probe_region or small_region
        set_dsp_search_path(directory)
        try:
            self._library = QnnLibrary(directory)
            self._backend = QnnBackend(self._library, log_level=log_level)
            try:
                self._device = QnnDevice(self._backend)
            except BaseException:
                self._backend.close()
                raise
        except QnnError as error:
            raise translate(error, f"starting the QNN library in {str(directory)!r}") from error
        except OSError as error:
            raise BrokerUnavailable(
                f"cannot load the QNN library: {error}", reason="NPU_LOST"
            ) from error
        self._name, self._log_level = name, log_level
        self.info = self._make_info(name)

    def reset(self) -> None:
        """Frees backend and device and makes new ones; every context must be closed before.

        What a restart of the NPU has made invalid is gone already, and let go of quietly.

        Raises:
            BrokerError: the library does not start again, or a context is still there.
        """
        for native in (self._device, self._backend):
            try:
                native.close()
            except QnnError as error:
                log.info("freeing %r: %s", native, error)
            except BufferError as error:
                raise BackendError(f"not everything was freed: {error}") from error
        try:
            self._backend = QnnBackend(self._library, log_level=self._log_level)
            self._device = QnnDevice(self._backend)
        except QnnError as error:
            raise translate(error, "starting the QNN library again") from error
        self.info = self._make_info(self._name)

    def open_power(self) -> QnnPower:
        """A client of the performance infrastructure.

        Raises:
            BrokerError: there is none.
        """
        try:
            return QnnPower(self._library)
        except QnnError as error:
            raise translate(error, "opening the performance infrastructure") from error

    def _make_info(self, name: str) -> control_pb2.BackendInfo:
        library, device = self._library, self._device
        # The x86_64 build of the HTP library is Qualcomm's emulation; it always calls itself
        # SoC 30, arch 68. The fake does the same until it is told to be hardware.
        emulated = platform.machine() == "x86_64" and (device.soc_model, device.dsp_arch) == (
            30,
            68,
        )
        return control_pb2.BackendInfo(
            name=name,
            provider=library.provider_name,
            backend_id=library.backend_id,
            build_id=self._backend.build_id,
            core_api_version=dotted(library.core_api_version),
            backend_api_version=dotted(library.backend_api_version),
            system_api_version=dotted(library.system_api_version),
            library_dir=str(library.directory),
            dsp_arch=device.dsp_arch,
            soc_model=device.soc_model,
            vtcm_mb=device.vtcm_mb,
            emulated=emulated,
            capabilities=probe_backend(self._backend, device),
        )

    def _ask(self, context: QnnContextAdapter) -> None:
        """Finds out by a new context what takes one to ask. No answer is no reason to lose it."""
        graph = next(iter(context.graphs.values())).native
        try:
            found = probe_context(graph, context.memory_evidence)
        except Exception as error:
            log.warning("a context could not be asked what it can do: %s", error)
            return
        known = self.info.capabilities
        info = control_pb2.BackendInfo()
        info.CopyFrom(self.info)
        del info.capabilities[:]
        info.capabilities.extend(replaced(known, found))
        self.info = info

    def read_spec(self, data: Buffer) -> BinarySpec:
        try:
            info = parse_binary(self._library, data)
        except QnnError as error:
            raise translate(error, "reading the context binary") from error
        except ValueError as error:
            raise InvalidRequest(
                f"not a sound context binary: {error}", reason="BAD_FILE"
            ) from error
        return binary_spec(info)

    def create_context(
        self, data: Buffer, spec: BinarySpec, enable_graphs: Sequence[str] = ()
    ) -> QnnContextAdapter:
        return self._create(data, spec, enable_graphs)

    def create_file_mapped(
        self, region: Region, spec: BinarySpec, enable_graphs: Sequence[str] = ()
    ) -> QnnContextAdapter:
        # The layout of what is exchanged is inferred: only where the library says that it can.
        if code := self._library.has_capability(CAPABILITY_CALLBACK):
            raise Unsupported(
                f"this library does not create contexts through callbacks (capability "
                f"{CAPABILITY_CALLBACK} answers {code})"
            )
        return self._create(region, spec, enable_graphs, file_mapped=True).own(region)

    def _create(
        self,
        data: Buffer,
        spec: BinarySpec,
        enable_graphs: Sequence[str],
        *,
        file_mapped: bool = False,
    ) -> QnnContextAdapter:
        if self._device.closed:
            raise BrokerUnavailable(
                "the QNN library did not start again when the backend was reset: reset it once "
                "more, or start the broker anew",
                reason="NPU_LOST",
            )
        try:
            native = QnnContext(
                self._device, data, enable_graphs=enable_graphs or None, file_mapped=file_mapped
            )
            made = QnnContextAdapter(native, spec, enable_graphs, self.memory, self._probe_region)
        except QnnError as error:
            how = " from its mapping" if file_mapped else ""
            raise translate(error, f"creating the context{how}") from error
        except ValueError as error:
            raise InvalidRequest(
                f"cannot create the context: {error}", reason="BAD_FILE"
            ) from error
        self._ask(made)
        return made

    def tidy(self) -> None:
        size = library_code.unmap(self._library.directory)
        log.debug("%d bytes of the library's code may leave memory", size)

    def log_fileno(self) -> int:
        return log_fileno()

    def drain_log(self) -> Sequence[tuple[int, str]]:
        return [
            (Asking.level(LOG_LEVELS.get(level, logging.DEBUG)), text)
            for level, text in drain_log()
        ]

    def close(self) -> None:
        self._device.close()
        self._backend.close()


class ContextPort:
    """How a native context registers memory."""

    def __init__(self, native: QnnContext) -> None:
        self._native = native

    def register(
        self, region: Region, offset: int, dtype: int, shape: tuple[int, ...], kind: str
    ) -> QnnRegistration:
        return QnnRegistration(
            self._native, region.fileno(), region.size_bytes, offset, dtype, shape, kind=kind
        )

    def translate(self, error: QnnError, doing: str) -> BrokerError:
        return translate(error, doing)


def native_registrations(lease: Lease) -> list[QnnRegistration | None]:
    """The handles of a lease that this module's contexts gave."""
    return [r.native if r else None for r in lease.registrations]  # type: ignore[misc]


def small_region() -> Region:
    """A page of ordinary shared memory."""
    return Region.create(4096)
