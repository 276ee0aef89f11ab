# SPDX-License-Identifier: Apache-2.0
"""Who is attached and what each one holds: the only owner table.

A session lives exactly as long as its attach connection. Closing it gives everything back: bindings
first (what runs ends by itself), then buffers, then its shares of contexts.
"""

import hmac
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from qnnbroker.native.executor import ExecutorSession
from qnnbroker.protos.attach import TOKEN_BYTES
from qnnbroker.protos.errors import LimitExceeded, NotAllowed, NotFound

from .bindings import BindingTable
from .buffers import BufferTable
from .config import BrokerConfig
from .executor import LoopExecutor
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

    def __init__(self, config: BrokerConfig, executor: LoopExecutor, models: ModelTable) -> None:
        self._config = config
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

    def open(self, peer: Peer, client_name: str) -> Session:
        """A new session for `peer`.

        Raises:
            LimitExceeded: reason SESSIONS.
        """
        if len(self._ids) >= self._config.max_sessions:
            raise LimitExceeded(
                f"{len(self._ids)} sessions are attached, the limit is {self._config.max_sessions}",
                reason="SESSIONS",
            )

        def make(session_id: int) -> Session:
            native = self._executor.session(session_id, max_in_flight=self._config.max_in_flight)
            return Session(
                session_id=session_id,
                token=secrets.token_bytes(TOKEN_BYTES),
                peer=peer,
                client_name=printable(client_name[:128]),
                executor_session=native,
                buffers=BufferTable(self._config),
                bindings=BindingTable(self._config, self._executor, native),
                command=peer.command,
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
        self._models.release_all_of(session.session_id)
        log.info(
            "session %d ended (%s): gave back %d buffers and %d bindings",
            session.session_id,
            why,
            buffers,
            bindings,
        )
