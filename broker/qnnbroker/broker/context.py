# SPDX-License-Identifier: Apache-2.0
"""Context: a context binary and what the backend made of it, with everybody who needs it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from qnnbroker.protos.errors import BrokerError
from qnnbroker.v1 import control_pb2 as pb

from .backends.base import BackendContext, BinarySpec
from .steady import SteadyFile

if TYPE_CHECKING:
    from .bound import BoundGraph
    from .contexts import ContextStore

log = logging.getLogger(__name__)

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

    Its states: loading, verifying, loading again, ready, closed; or failed. One whose file was
    taken from it, or that a reset could not make again, is lost; the next reset tries it once more.
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
    #: Bindings whose memory is being registered.
    making: int = 0
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
        same = False
        try:
            same = held.hash_held() == self.content_hash
        except BrokerError as error:
            log.debug("context %d: its file is not what it was: %s", self.context_id, error)
        finally:
            if not same:
                held.close()
        return held if same else None

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
