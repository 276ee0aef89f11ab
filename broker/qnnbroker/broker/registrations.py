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
import threading
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
    #: Held for moments only, never while the library is called.
    lock: threading.RLock = field(default_factory=threading.RLock)


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
    """The registrations of one native context.

    Threads: `lease_now` and `let_go` never call the library, and may come from any. What does call
    it (`support`, `lease`, `drop`, `release`) comes from one thread at a time, as from a Registrar.

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
        self._lock = statistics.lock
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

    def lease_now(self, tensors: Sequence[Tensor], zero_copy: str) -> Lease | None:
        """As `lease`, where that takes no call of the library; None where it does."""
        if zero_copy != "off" and self._support is None:
            return None
        kinds = self._support.kinds if self._support else []
        with self._lock:
            if zero_copy != "off":
                for tensor in tensors:
                    place = place_of(tensor, kinds)
                    if isinstance(place, Place) and place not in self._table:
                        return None
            return self.lease(tensors, zero_copy)

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
            with self._lock:
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
            place = place_of(tensor, kinds)
            if isinstance(place, str):
                refused.append(place)
                continue
            found = self._acquire(place)
            if isinstance(found, Registration):
                lease.registrations[i] = found
            else:
                refused.append(f"{tensor.name!r}: {found}")
        lease.detail = "; ".join(refused)

    def _acquire(self, place: Place) -> Registration | QnnError:
        """A registration, or why the library does not take this memory."""
        with self._lock:
            found = self._table.get(place)
            if found is not None:
                self._statistics.hits_total += 1
                found.users += 1
                return found
        try:
            native = self._port.register(
                place.region, place.offset, place.dtype, place.shape, place.kind
            )
        except QnnError as error:
            if not is_refusal(error.code):
                raise self._port.translate(error, "registering memory") from error
            with self._lock:
                self._statistics.refused_total += 1
            return error
        with self._lock:
            found = self._table[place] = Registration(place, native, users=1)
            self._statistics.made_total += 1
            self._statistics.live += 1
        return found

    def let_go(self, lease: Lease) -> list[Registration]:
        """Gives a lease back. Idempotent.

        No execute may use it any more: runnables over it are closed first.

        Returns:
            What nobody uses now, for `drop`.
        """
        unused = []
        with self._lock:
            for i, registration in enumerate(lease.registrations):
                lease.registrations[i] = None
                if registration is None:
                    continue
                registration.users -= 1
                place = registration.place
                if not registration.users and self._table.get(place) is registration:
                    del self._table[place]
                    unused.append(registration)
        return unused

    def drop(self, unused: Sequence[Registration]) -> None:
        """Deregisters what `let_go` has given."""
        for registration in unused:
            self._deregister(registration)

    def release(self, lease: Lease) -> None:
        """`let_go` and `drop`."""
        self.drop(self.let_go(lease))

    def _deregister(self, registration: Registration) -> None:
        lost = False
        try:
            registration.native.close()
        except QnnError as error:
            # After a restart of the NPU the library has let go of it before us.
            lost = True
            log.info("a registration was gone already: %s", error)
        with self._lock:
            self._statistics.lost_total += lost
            self._statistics.live -= 1

    def close(self) -> None:
        """Deregisters what is left: the context goes first. Idempotent.

        Raises:
            BufferError: a runnable still uses some of it.
        """
        for place, registration in list(self._table.items()):
            self._deregister(registration)
            del self._table[place]  # not when it is in use: then it is still there


def place_of(tensor: Tensor, kinds: Sequence[str]) -> Place | str:
    """Where a tensor would be registered with a context that takes these kinds, or why not."""
    region, offset, _ = tensor.span
    if not kinds:
        return "memory is not registered here"
    if not isinstance(region, Region):
        return f"{tensor.name!r} is not in a shared buffer"
    if CUSTOM not in kinds and offset:
        return f"{tensor.name!r} lies inside a buffer, the device takes whole ones"
    kind = CUSTOM if CUSTOM in kinds else ION
    return Place(region, offset, tensor.dtype, tensor.shape, kind)


#: QNN's number of the data type that is asked with.
UINT8 = 0x0108
