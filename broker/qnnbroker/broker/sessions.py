# SPDX-License-Identifier: Apache-2.0
"""Who is attached and what each one holds: the only owner table.

A session lives exactly as long as its attach connection. Closing it gives everything back: bindings
first (what runs ends by itself), then buffers, then its shares of contexts.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from qnnbroker.native.executor import BAND_NORMAL, ExecutorSession
from qnnbroker.native.ring import BrokerRing
from qnnbroker.protos.attach import TOKEN_BYTES
from qnnbroker.protos.errors import (
    BrokerError,
    LimitExceeded,
    NotAllowed,
    NotFound,
    ProtocolError,
)

from .bindings import BindingTable
from .buffer_memory import BufferMemory
from .buffers import BufferTable
from .config import BrokerConfig
from .executor import LoopExecutor
from .handed import HandedFiles
from .ids import IdTable
from .models import ModelTable

log = logging.getLogger(__name__)


def printable(text: str) -> str:
    """`text` without what would forge log lines or move somebody's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True, slots=True)
class Peer:
    """The far end of an attach connection, as the kernel names it."""

    pid: int
    uid: int
    gid: int

    @property
    def command(self) -> str:
        """The process' command line, for people; empty when it is gone or hidden."""
        try:
            with open(f"/proc/{self.pid}/cmdline", "rb") as f:
                raw = f.read(512)
        except OSError:
            return ""
        return printable(raw.replace(b"\0", b" ").decode(errors="replace").strip())


@dataclass(eq=False)
class Session:
    """One attached client."""

    session_id: int
    token: bytes
    peer: Peer
    client_name: str
    executor_session: ExecutorSession
    buffers: BufferTable
    bindings: BindingTable
    command: str
    created: float = field(default_factory=time.monotonic)
    closing: bool = False
    #: Clocks that it votes for while it works; empty: the broker's default.
    perf_mode: str = ""
    #: Runs that the power governor has seen.
    runs_seen: int = 0
    #: Of inline tensors, in both directions.
    copied_bytes: int = 0
    files: HandedFiles = field(default_factory=HandedFiles)
    band: int = BAND_NORMAL

    def check_open(self) -> None:
        """Refuses work for a session that ended meanwhile; called after each await.

        Raises:
            NotFound: reason SESSION_UNKNOWN.
        """
        if self.closing:
            raise NotFound(
                f"session {self.session_id} has ended", reason="SESSION_UNKNOWN", id=self.session_id
            )


class SessionTable:
    """All sessions, by id and by token."""

    def __init__(
        self,
        config: BrokerConfig,
        executor: LoopExecutor,
        models: ModelTable,
        memory: BufferMemory | None = None,
    ) -> None:
        self._config = config
        self.memory = memory or BufferMemory(config)
        self._executor = executor
        self._models = models
        self._ids: IdTable[Session] = IdTable("session", "SESSION_UNKNOWN")
        self._by_token: dict[bytes, Session] = {}
        self.closing_count = 0
        self.opened_total = 0

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._ids)

    def open(
        self,
        peer: Peer,
        client_name: str,
        *,
        weight: int = 1,
        band: int = BAND_NORMAL,
        ring: bool = False,
        perf_mode: str = "",
    ) -> Session:
        """A new session for `peer`, with a ring when it wants one.

        Raises:
            LimitExceeded: reason SESSIONS, or MEMORY: the system has no room for a ring.
        """
        if len(self._ids) >= self._config.max_sessions:
            raise LimitExceeded(
                f"{len(self._ids)} sessions are attached, the limit is {self._config.max_sessions}",
                reason="SESSIONS",
            )

        def make(session_id: int) -> Session:
            native = self._executor.session(
                session_id, max_in_flight=self._config.max_in_flight, weight=weight
            )
            if ring:
                try:
                    native.open_ring(BrokerRing(self._config.max_in_flight))
                except OSError as error:
                    self._executor.close_session(native, lambda: None)
                    raise LimitExceeded(
                        f"the system refused the memory or fds of a ring: {error.strerror}",
                        reason="MEMORY",
                    ) from error
            return Session(
                session_id=session_id,
                token=secrets.token_bytes(TOKEN_BYTES),
                peer=peer,
                client_name=printable(client_name[:128]),
                executor_session=native,
                buffers=BufferTable(self._config, self.memory),
                bindings=BindingTable(self._config, self._executor, native),
                command=peer.command,
                band=band,
                perf_mode=perf_mode,
            )

        session = self._ids.add(make)
        self._by_token[session.token] = session
        self.opened_total += 1
        log.info(
            "session %d attached: pid %d uid %d %s",
            session.session_id,
            peer.pid,
            peer.uid,
            session.client_name,
        )
        return session

    def watch_ring(self, session: Session, fail: Callable[[BrokerError], None]) -> None:
        """Calls `fail` when the session's ring makes no sense; the session is to be ended then."""

        def broken() -> None:
            fail(
                ProtocolError(
                    f"the ring of session {session.session_id} makes no sense: an index out of "
                    "range, unknown flags, or completions that nobody takes",
                    reason="BAD_SLOT",
                    session_id=session.session_id,
                )
            )

        self._executor.watch_ring(session.executor_session, broken)

    def by_token(self, token: bytes) -> Session:
        """The session of a token.

        Raises:
            NotFound: reason SESSION_UNKNOWN.
            NotAllowed: not a token at all.
        """
        if len(token) != TOKEN_BYTES:
            raise NotAllowed(
                f"a session token of {TOKEN_BYTES} bytes wanted, found {len(token)}",
                reason="SESSION_REQUIRED",
            )
        session = self._by_token.get(token)
        if session is None or not hmac.compare_digest(session.token, token):
            raise NotFound(
                "the session of this token has ended, or never was", reason="SESSION_UNKNOWN"
            )
        return session

    def by_id(self, session_id: int) -> Session:
        """The session with this id; raises NotFound or LeaseRevoked."""
        return self._ids.get(session_id)

    def close(self, session: Session, why: str) -> None:
        """Gives back everything the session holds. Idempotent; never waits.

        What runs ends by itself; its buffers and context stay until then.
        """
        if session.closing:
            return
        session.closing = True
        self._by_token.pop(session.token, None)
        self._ids.remove(session.session_id)
        self.closing_count += 1
        buffers, bindings = len(session.buffers), len(session.bindings)

        def gone() -> None:
            self.closing_count -= 1

        self._executor.close_session(session.executor_session, gone)
        session.bindings.close()
        session.buffers.close()
        session.files.close()
        self._models.release_all_of(session.session_id)
        log.info(
            "session %d ended (%s): gave back %d buffers and %d bindings",
            session.session_id,
            why,
            buffers,
            bindings,
        )
