# SPDX-License-Identifier: Apache-2.0
"""Registrations: memory of tensors that a context knows by a handle, made once for all who agree.

A registration is shared by every binding of the same region, place, data type and shape, and goes
with the last of them. Its table belongs to one native context: what replaces that context after a
reset starts with a table of its own, so no handle outlives what it was made for.

A context is asked once, by a real registration, whether it takes memory at all. Where it does not,
or refuses some of it, `zero_copy` decides: `auto` lets the library work on the same shared memory
by address and counts that, `require` refuses the binding, `off` does not try.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qnnbroker.native.qnn_error import NOT_SUPPORTED, QnnError
from qnnbroker.native.region import Region
from qnnbroker.protos.errors import BrokerError, Unsupported

from .backends.base import Span

log = logging.getLogger(__name__)

ZERO_COPY = ("auto", "require", "off")

#: What a tensor's memory can be registered as, the better one first.
CUSTOM, ION = "custom", "ion"


class NativeRegistration(Protocol):
    """A handle of the library."""

    def close(self) -> None:
        """Deregisters; raises QnnError, and counts as closed all the same."""


class MemoryPort(Protocol):
    """What a context of a backend can do with memory."""

    def register(
        self, region: Region, offset: int, dtype: int, shape: tuple[int, ...], kind: str
    ) -> NativeRegistration:
        """Registers one tensor's memory; raises QnnError when the library refuses."""

    def translate(self, error: QnnError, doing: str) -> BrokerError:
        """The exception of ours for a code that is no refusal of memory."""


@dataclass(slots=True)
class MemoryStatistics:
    """Counts over all contexts of a backend; those that end in _total only grow."""

    live: int = 0
    made_total: int = 0
    hits_total: int = 0
    refused_total: int = 0
    lost_total: int = 0
    raw_bindings_total: int = 0
    probes_total: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """What two bindings must agree on to share a registration. Regions are compared as objects."""

    region: Region
    offset: int
    dtype: int
    shape: tuple[int, ...]
    kind: str


@dataclass(eq=False)
class Registration:
    """One handle and how many bindings use it."""

    place: Place
    native: NativeRegistration
    users: int = 0


@dataclass(slots=True)
class Support:
    """What a context said when it was asked: the code of each kind, 0 for yes."""

    codes: dict[str, int] = field(default_factory=dict)
    #: Why it was not asked.
    problem: str = ""

    @property
    def kinds(self) -> list[str]:
        return [kind for kind in (CUSTOM, ION) if self.codes.get(kind) == 0]

    @property
    def evidence(self) -> str:
        """In words, for status and for refusals."""
        if not self.codes:
            return self.problem or "not asked yet"
        parts = [f"{kind}: {said(code)}" for kind, code in self.codes.items()]
        if set(self.codes.values()) == {NOT_SUPPORTED}:
            return f"memRegister -> {NOT_SUPPORTED} (not supported)"
        return f"memRegister -> {'; '.join(parts)}"


def said(code: int) -> str:
    return "0 (works)" if code == 0 else f"{code} (refused)"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the library knows it, and where it lies."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    span: Span


@dataclass(slots=True)
class Lease:
    """What one binding has of a context's registrations: one for each tensor, or None."""

    registrations: list[Registration | None]
    detail: str

    @property
    def complete(self) -> bool:
        """Every tensor is registered."""
        return None not in self.registrations


def is_refusal(code: int) -> bool:
    """Codes that say "not this memory": not supported, no room, or of the memory component."""
    return code in (NOT_SUPPORTED, 1002, 1010) or 8000 <= code < 9000


class ContextMemory:
    """The registrations of one native context. Belongs to the event loop's thread.

    Args:
        port: the context.
        statistics: of the backend.
        probe_region: gives memory of the kind that buffers have, for asking.
    """

    def __init__(
        self,
        port: MemoryPort,
        statistics: MemoryStatistics,
        probe_region: Callable[[], Region],
    ) -> None:
        self._port = port
        self._statistics = statistics
        self._probe_region = probe_region
        self._table: dict[Place, Registration] = {}
        self._support: Support | None = None

    def __len__(self) -> int:
        return len(self._table)

    @property
    def evidence(self) -> str:
        """What is known of this context's support, in words."""
        return self._support.evidence if self._support else "not asked yet"

    def support(self) -> Support:
        """Asks once, by registering a few bytes and giving them back.

        Without memory to ask with, the answer is "not known", and the next call asks again.
        """
        if self._support is None:
            try:
                region = self._probe_region()
            except (OSError, MemoryError) as error:
                log.warning("no memory to ask for memory registration with: %s", error)
                return Support(problem=f"not known: no memory to ask with: {error}")
            support = Support()
            self._statistics.probes_total += 1
            with region:
                for kind in (CUSTOM, ION):
                    support.codes[kind] = self._ask(region, kind)
            self._support = support
            log.info("memory registration: %s", support.evidence)
        return self._support

    def _ask(self, region: Region, kind: str) -> int:
        try:
            self._port.register(region, 0, UINT8, (1,), kind).close()
        except QnnError as error:
            return error.code
        return 0

    def lease(self, tensors: Sequence[Tensor], zero_copy: str) -> Lease:
        """Registers what is to be registered for one binding; give it back with `release`.

        Raises:
            Unsupported: reason BACKEND_LACKS; `require`, and something cannot be registered.
            BrokerError: the library failed in another way.
        """
        lease = Lease([None] * len(tensors), "")
        if zero_copy == "off":
            lease.detail = "zero_copy is off"
            return lease
        try:
            self._fill(lease, tensors)
        except BaseException:
            self.release(lease)
            raise
        if not lease.complete:
            if zero_copy == "require":
                self.release(lease)
                raise Unsupported(
                    f"zero_copy is required, but memory cannot be registered: {lease.detail}"
                )
            self._statistics.raw_bindings_total += 1
            log.debug("a binding works by address: %s", lease.detail)
        return lease

    def _fill(self, lease: Lease, tensors: Sequence[Tensor]) -> None:
        support = self.support()
        kinds = support.kinds
        if not kinds:
            lease.detail = support.evidence
            return
        refused = []
        for i, tensor in enumerate(tensors):
            region, offset, _ = tensor.span
            if not isinstance(region, Region):
                refused.append(f"{tensor.name!r} is not in a shared buffer")
            elif CUSTOM not in kinds and offset:
                refused.append(f"{tensor.name!r} lies inside a buffer, the device takes whole ones")
            else:
                kind = CUSTOM if CUSTOM in kinds else ION
                place = Place(region, offset, tensor.dtype, tensor.shape, kind)
                found = self._acquire(place)
                if isinstance(found, Registration):
                    lease.registrations[i] = found
                else:
                    refused.append(f"{tensor.name!r}: {found}")
        lease.detail = "; ".join(refused)

    def _acquire(self, place: Place) -> Registration | QnnError:
        """A registration, or why the library does not take this memory."""
        found = self._table.get(place)
        if found is not None:
            self._statistics.hits_total += 1
        else:
            try:
                native = self._port.register(
                    place.region, place.offset, place.dtype, place.shape, place.kind
                )
            except QnnError as error:
                if not is_refusal(error.code):
                    raise self._port.translate(error, "registering memory") from error
                self._statistics.refused_total += 1
                return error
            found = self._table[place] = Registration(place, native)
            self._statistics.made_total += 1
            self._statistics.live += 1
        found.users += 1
        return found

    def release(self, lease: Lease) -> None:
        """Gives a lease back; what nobody else uses is deregistered. Idempotent.

        No execute may use it any more: runnables over it are closed first.
        """
        for i, registration in enumerate(lease.registrations):
            lease.registrations[i] = None
            if registration is None:
                continue
            registration.users -= 1
            if not registration.users:
                self._drop(registration)

    def _drop(self, registration: Registration) -> None:
        if self._table.get(registration.place) is not registration:
            return
        try:
            registration.native.close()
        except QnnError as error:
            # After a restart of the NPU the library has let go of it before us.
            self._statistics.lost_total += 1
            log.info("a registration was gone already: %s", error)
        del self._table[registration.place]  # not when it is in use: then it is still there
        self._statistics.live -= 1

    def close(self) -> None:
        """Deregisters what is left: the context goes first. Idempotent.

        Raises:
            BufferError: a runnable still uses some of it.
        """
        for registration in list(self._table.values()):
            self._drop(registration)


#: QNN's number of the data type that is asked with.
UINT8 = 0x0108
