# SPDX-License-Identifier: Apache-2.0
"""The attach socket: who are you (SO_PEERCRED), versions, fds out, lease = connection.

asyncio has no SOCK_SEQPACKET server, so the listener is accepted from by hand and each connection
is one task around a readable event. The session ends when that task does: on end-of-file, on a
frame that breaks the protocol, or when the peer's pidfd says that it is gone (a forked child may
still hold the socket open).
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from qnnbroker.native.executor import BAND_NORMAL
from qnnbroker.native.fds import (
    FrameTruncated,
    peer_credentials,
    pidfd_open,
    recv_frame,
    send_frame,
)
from qnnbroker.protos.attach import (
    ABI_VERSION,
    CAPABILITY_LOAD_FD,
    CAPABILITY_RING,
    FLAG_ANSWER,
    FLAG_ERROR,
    MAX_FRAME_BYTES,
    MAX_FRAME_FDS,
    PROTOCOL_MAX,
    Frame,
    Kind,
    pack,
    unpack,
)
from qnnbroker.protos.errors import (
    BrokerError,
    LimitExceeded,
    NotAllowed,
    ProtocolError,
)
from qnnbroker.protos.status import to_detail
from qnnbroker.v1 import attach_pb2

from .attach_frames import FDS_OF_REQUESTS, answer_to, check_request, check_versions, parse
from .config import BrokerConfig
from .power import check_mode
from .sessions import Peer, Session, SessionTable

log = logging.getLogger(__name__)

#: Connections waiting in the kernel to be accepted.
BACKLOG = 128
#: How long a client may leave its answers unread before it is given up.
SEND_TIMEOUT_SECONDS = 10.0
#: The largest share of device time that a session may ask for.
MAX_WEIGHT = 100


def bind_listener(path: Path) -> socket.socket:
    """A listening attach socket at `path`, replacing a dead broker's; the caller holds the lock."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        listener.bind(str(temporary))
        os.chmod(temporary, 0o600)
        listener.listen(BACKLOG)
        os.rename(temporary, path)
    except BaseException:
        listener.close()
        temporary.unlink(missing_ok=True)
        raise
    return listener


def inherit_listener(fd: int) -> socket.socket:
    """The listening attach socket that somebody (a supervisor, systemd) opened for us.

    Raises:
        ProtocolError: the fd is no listening SOCK_SEQPACKET Unix socket.
    """
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise ProtocolError(f"fd {fd} is not a socket: {error.strerror}") from error
    listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if listener.family != socket.AF_UNIX or listener.type != socket.SOCK_SEQPACKET or not listening:
        listener.detach()
        raise ProtocolError(f"fd {fd} is not a listening SOCK_SEQPACKET Unix socket")
    os.set_inheritable(fd, False)
    return listener


class AttachServer:
    """Accepts clients and serves their attach frames. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: BrokerConfig,
        sessions: SessionTable,
        listener: socket.socket,
        grpc_path: Path,
        version: str,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._listener = listener
        self._grpc_path = grpc_path
        self._version = version
        self._connections: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        listener.setblocking(False)

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except ConnectionError:
                continue  # gone before we looked
            except OSError as error:
                # Out of fds or memory: those who are attached go on; try again when some is back.
                log.error("cannot accept a client: %s", error)
                await asyncio.sleep(0.2)
                continue
            # Room beyond the sessions, so that a refused client still hears why.
            if len(self._connections) >= self._config.max_sessions + BACKLOG:
                connection.close()
                continue
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, socket_: socket.socket) -> None:
        try:
            connection = Connection(socket_)
        except OSError as error:
            log.warning("cannot serve a client: %s", error)
            socket_.close()
            return
        session: Session | None = None
        why = "end of file"
        try:
            session = await self._greet(connection)
            while (frame := await connection.receive()) is not None:
                await self._answer(connection, session, frame)
                # One who asks faster than we answer would keep everybody else waiting.
                await asyncio.sleep(0)
            if connection.peer_died:
                why = "the process is gone"
        except ProtocolError as error:
            why = f"protocol error: {error}"
            await connection.refuse(error)
        except BrokerError as error:  # of the greeting
            why = str(error)
            await connection.refuse(error)
        except (OSError, TimeoutError) as error:
            why = f"connection lost: {str(error) or type(error).__name__}"
        except Exception:
            why = "internal error"
            log.exception("serving pid %d failed", connection.peer.pid)
        finally:
            connection.close()
            if session is not None:
                self._sessions.close(session, why)
            elif why != "end of file":
                log.info("pid %d was not attached: %s", connection.peer.pid, why)

    async def _greet(self, connection: "Connection") -> Session:
        peer = connection.peer
        if peer.uid not in (0, os.getuid()):
            raise NotAllowed(
                f"uid {peer.uid} may not attach to the broker of uid {os.getuid()}",
                reason="PEER_UID",
            )
        async with asyncio.timeout(self._config.hello_timeout_seconds):
            frame = await connection.receive()
        if frame is None:
            raise ConnectionResetError("no HELLO")
        if frame.kind != Kind.HELLO:
            raise ProtocolError(f"the first frame must be HELLO (1), found kind {frame.kind}")
        hello = parse(attach_pb2.HelloRequest, frame)
        check_versions(hello)
        wants_ring = bool(hello.capabilities & CAPABILITY_RING)
        if hello.band > 3 or hello.weight > MAX_WEIGHT:
            raise ProtocolError(
                f"a band of 0 to 3 and a weight of 0 to {MAX_WEIGHT} wanted, "
                f"found {hello.band} and {hello.weight}"
            )
        session = self._sessions.open(
            peer,
            hello.client_name,
            weight=hello.weight or 1,
            band=hello.band - 1 if hello.band else BAND_NORMAL,
            ring=wants_ring,
            perf_mode=check_mode(hello.perf_mode),
        )
        ring = session.executor_session.ring
        answer = attach_pb2.HelloResponse(
            protocol=min(hello.protocol_max, PROTOCOL_MAX),
            abi_version=ABI_VERSION,
            capabilities=CAPABILITY_LOAD_FD | (CAPABILITY_RING if ring else 0),
            session_id=session.session_id,
            session_token=session.token,
            grpc_path=str(self._grpc_path),
            limits=self._config.limits(),
            broker_version=self._version,
            broker_pid=os.getpid(),
        )
        try:
            await connection.send(
                frame, answer.SerializeToString(), fds=ring.client_fds() if ring else None
            )
            if ring is not None:
                ring.drop_client_end()
                self._sessions.watch_ring(session, connection.fail)
        except BaseException:
            self._sessions.close(session, "the greeting could not be answered")
            raise
        return session

    async def _answer(self, connection: "Connection", session: Session, frame: Frame) -> None:
        try:
            body, fds = await answer_to(session, frame, connection.take_fds())
        except ProtocolError:
            raise
        except BrokerError as error:
            log.debug("session %d: %s", session.session_id, error)
            await connection.send(frame, to_detail(error).SerializeToString(), error=True)
        else:
            await connection.send(frame, body, fds=fds)

    def stop_accepting(self) -> None:
        """No new clients; the attached ones stay. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
            self._accepting = None
            # Now, not when the task hears of it: the fd is closed below, and a listener that
            # others hold too would go on waking us.
            asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    async def close(self) -> None:
        """Ends every connection, and with it every session."""
        self.stop_accepting()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


class Connection:
    """One accepted attach socket with the peer's credentials and pidfd."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self.peer = Peer(*peer_credentials(connection.fileno()))
        self.peer_died = False
        self._failure: BrokerError | None = None
        self._pidfd = -1
        self._received: list[int] = []
        self._waiting: asyncio.Future[None] | None = None
        try:
            self._pidfd = pidfd_open(self.peer.pid)
        except ProcessLookupError:
            self.peer_died = True
        except OSError as error:  # an old kernel, a sandbox: end-of-file alone must do
            log.warning("no pidfd for pid %d: %s", self.peer.pid, error)
        else:
            self._loop.add_reader(self._pidfd, self._on_death)

    def fail(self, error: BrokerError) -> None:
        """Makes `receive` raise `error` as soon as it is awaited, or now."""
        self._failure = error
        if self._waiting is not None:
            _wake(self._waiting)

    def _on_death(self) -> None:
        self.peer_died = True
        self._drop_pidfd()
        if self._waiting is not None:
            _wake(self._waiting)

    def _drop_pidfd(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _is_out_of_fds(self) -> bool:
        try:
            os.close(os.dup(self._socket.fileno()))
        except OSError:
            return True
        return False

    async def receive(self) -> Frame | None:
        """The next frame; None at end-of-file or when the peer has died.

        Raises:
            ProtocolError: a frame that is too long, truncated, malformed, or carries fds.
            OSError: the connection broke.
        """
        while not self.peer_died:
            if self._failure is not None:
                raise self._failure
            try:
                data, fds = recv_frame(self._socket.fileno(), MAX_FRAME_BYTES, MAX_FRAME_FDS)
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            except FrameTruncated as error:
                if error.data and self._is_out_of_fds():
                    # Our fault, not the client's.
                    refused = LimitExceeded(f"the broker has no file descriptor left: {error}")
                    frame = check_request(unpack(error.data))
                    await self.send(frame, to_detail(refused).SerializeToString(), error=True)
                    continue
                raise ProtocolError(str(error), reason="BAD_FRAME") from error
            except ConnectionResetError:
                return None
            self._received += fds
            if not data:
                return None
            frame = check_request(unpack(data))
            if len(fds) > FDS_OF_REQUESTS.get(frame.kind, 0):
                raise ProtocolError(
                    f"a frame of kind {frame.kind} takes {FDS_OF_REQUESTS.get(frame.kind, 0)} file "
                    f"descriptors, found {len(fds)}",
                    reason="FD_COUNT",
                )
            return frame
        return None

    def take_fds(self) -> list[int]:
        """What came with the last frame; the caller's to close."""
        taken, self._received = self._received, []
        return taken

    async def send(
        self, request: Frame, body: bytes, *, fds: list[int] | None = None, error: bool = False
    ) -> None:
        """Answers `request`. A peer that does not read its answers is given up.

        Raises:
            TimeoutError, OSError: it could not be sent.
        """
        flags = FLAG_ANSWER | (FLAG_ERROR if error else 0)
        data = pack(request.kind, request.request, body, flags)
        async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
            while not self.peer_died:
                try:
                    return send_frame(self._socket.fileno(), data, fds or [])
                except BlockingIOError:
                    await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def refuse(self, error: BrokerError) -> None:
        """Sends an error that answers no request in particular; never fails."""
        try:
            await self.send(Frame(0, 0, 0, b""), to_detail(error).SerializeToString(), error=True)
        except (OSError, TimeoutError, BrokerError):
            pass

    async def _ready(
        self, add: Callable[..., None], remove: Callable[[socket.socket], bool]
    ) -> None:
        self._waiting = self._loop.create_future()
        waiting = self._waiting
        add(self._socket, _wake, waiting)
        try:
            await waiting
        finally:
            remove(self._socket)
            self._waiting = None

    def close(self) -> None:
        """Idempotent."""
        for fd in self.take_fds():
            os.close(fd)
        self._drop_pidfd()
        self._failure = None  # its traceback holds our frames, and all that those hold
        self._socket.close()
