# SPDX-License-Identifier: Apache-2.0
"""Model: a context that this session holds loaded, and its graphs."""

from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self

from qnnbroker.protos.errors import InvalidRequest, LeaseRevoked
from qnnbroker.v1 import control_pb2

from .graphs import Graph

if TYPE_CHECKING:
    from .session import Session


class Model:
    """A loaded model. Made by `Session.load`; stays loaded until `unload` or the session's end.

    Threads: any. Fork: not usable in the child.
    """

    def __init__(self, session: "Session", message: control_pb2.Model, shared: bool) -> None:
        self._session = session
        self._message = message
        self._shared = shared
        self._graphs = MappingProxyType({g.name: Graph(self, g) for g in message.graphs})
        self._unloaded = False

    @property
    def model_id(self) -> int:
        return self._message.model_id

    @property
    def name(self) -> str:
        return self._message.name

    @property
    def content_hash(self) -> str:
        """sha256 of the context binary, hex: equal for equal models, whoever loads them."""
        return self._message.content_hash

    @property
    def size_bytes(self) -> int:
        """Size of the context binary."""
        return self._message.size_bytes

    @property
    def source_path(self) -> str:
        return self._message.source_path

    @property
    def shared(self) -> bool:
        """True when the context was in memory already, or somebody else's load was joined."""
        return self._shared

    @property
    def session(self) -> "Session":
        return self._session

    @property
    def graphs(self) -> Mapping[str, Graph]:
        return self._graphs

    @property
    def graph(self) -> Graph:
        """The only graph.

        Raises:
            InvalidRequest: there are several, or none.
        """
        if len(self._graphs) != 1:
            names = ", ".join(repr(n) for n in self._graphs) or "none"
            raise InvalidRequest(
                f"model {self.name!r} has {len(self._graphs)} graphs, not one; choose among "
                f"`graphs`: {names}",
                model=self.name,
            )
        return next(iter(self._graphs.values()))

    @property
    def unloaded(self) -> bool:
        return self._unloaded

    def check(self) -> None:
        """Refuses an unloaded model.

        Raises:
            LeaseRevoked
        """
        if self._unloaded:
            raise LeaseRevoked(f"model {self.name!r} is unloaded", model_id=self.model_id)

    def unload(self) -> None:
        """Closes its bindings (waiting for runs under way) and gives the model back. Idempotent."""
        if self._unloaded or not self._session.usable:
            return
        self._unloaded = True
        for graph in self._graphs.values():
            graph.close_bindings()
        self._session.unload_model(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unload()

    def __repr__(self) -> str:
        state = ", unloaded" if self._unloaded else ""
        return f"<Model {self.name!r} {self.content_hash[:12]}, {len(self._graphs)} graphs{state}>"
