# SPDX-License-Identifier: Apache-2.0
"""Session: one attachment to a broker and everything it holds."""

import contextlib
import ctypes
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Self

from qnnbroker.protos import attach as frames
from qnnbroker.protos.errors import (
    BrokerError,
    BrokerLost,
    InvalidRequest,
    LeaseRevoked,
    ProtocolError,
    SessionClosed,
    Unsupported,
)
from qnnbroker.v1 import attach_pb2, control_pb2

from .arena import Arena
from .attach import (
    AttachConnection,
    Hello,
    Limits,
)
from .buffers import Buffer, allocate
from .control import Control, LoadProgress, LoadStage
from .hotpath import HotPath
from .loading import hand_over
from .models import Model
from .ringing import open_ring
from .timing import Timing

#: Default deadline of a call, in seconds.
CALL_TIMEOUT_SECONDS = 60.0
#: Default deadline of a load: a big context takes its time.
LOAD_TIMEOUT_SECONDS = 600.0


class Session:
    """An attachment to a broker. Made by `connect`; a context manager.

    It holds models, buffers and bindings. What is not given back before goes when the session ends:
    by `close`, or with the process, whichever way that ends.

    Threads: any number may use one session. `close` makes calls under way in other threads fail
    with SessionClosed.

    Fork: a session belongs to the process that made it. In a child every use raises SessionClosed
    (reason FORKED), except `close`, which does nothing; arrays over buffers stay readable. Connect
    again in the child.
    """

    def __init__(self, attach: AttachConnection, hello: Hello) -> None:
        #: Deadline in seconds of calls that are given none.
        self.call_timeout = CALL_TIMEOUT_SECONDS
        self._closed = True  # until there is something to close
        self._pid = os.getpid()
        self._attach = attach
        self._hello = hello
        self._hot: HotPath | None = None
        self._models: list[Model] = []
        self._buffers: dict[int, Buffer] = {}
        #: Memory of the bindings that were given none.
        self.arena = Arena(hello.limits.max_buffer_bytes)
        self._control = Control(
            hello.grpc_path,
            token=hello.session_token,
            attach=attach,
            max_message_bytes=hello.limits.max_message_bytes,
        )
        if hello.ring_fds:
            self._hot = HotPath(
                open_ring(hello),
                hello.limits.max_in_flight,
                lambda binding_id: self._control.last_error(binding_id, self.call_timeout),
            )
        self._closed = False
        _open_sessions.add(self)

    # --- what it is

    @property
    def session_id(self) -> int:
        return self._hello.session_id

    @property
    def limits(self) -> Limits:
        return self._hello.limits

    @property
    def broker_pid(self) -> int:
        return self._hello.broker_pid

    @property
    def broker_version(self) -> str:
        return self._hello.broker_version

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def models(self) -> tuple[Model, ...]:
        """What this session has loaded and not unloaded."""
        return tuple(self._models)

    def server_info(self) -> control_pb2.GetServerInfoResponse:
        """Versions, backend, device and limits of the broker."""
        self.check()
        return self._control.server_info(self.call_timeout)

    def statistics(self) -> control_pb2.GetStatisticsResponse:
        """A snapshot of the broker's counters."""
        self.check()
        return self._control.statistics(self.call_timeout)

    # --- what it makes

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        graphs: Sequence[str] | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
        timeout: float = LOAD_TIMEOUT_SECONDS,
    ) -> Model:
        """Loads a context binary or an EPContext wrapper; shares it when it is in memory already.

        Args:
            path: opened by this process, and handed over with what belongs to it (the binary and
                the manifest beside a wrapper).
            name: for people and for `Infer`; the file's stem by default.
            graphs: make only these executable, which saves memory on the NPU; None: all. It is
                another context than that with all of them.
            progress: called in this thread; when it raises, the load is given up. Should the model
                become ready at that very moment, it goes with the session.
            timeout: seconds.

        Raises:
            NotFound, NotAllowed: reason FILE_MISSING, FILE_UNREADABLE.
            NotFound: reason GRAPH_UNKNOWN; `graphs` names one that the binary does not have.
            InvalidRequest: reason BAD_FILE; or `graphs` names none.
            VersionMismatch: compiled for another chip or a newer library.
            LimitExceeded: no room on the NPU.
            DeadlineExpired: it took longer than `timeout`.
        """
        self.check()
        absolute = os.path.abspath(os.fspath(path))
        if isinstance(graphs, str) or (graphs is not None and not graphs):
            raise InvalidRequest(f"a list of names of graphs wanted, or None, found {graphs!r}")
        try:
            request = control_pb2.LoadModelRequest(
                path=absolute, name=name or "", enable_graphs=graphs or ()
            )
        except ValueError as exc:  # not text: the name of the file is not UTF-8
            raise InvalidRequest(f"the path {absolute!r} is not text", reason="BAD_FILE") from exc
        if self._hello.takes_files:
            request.file_id = hand_over(self._attach, absolute, timeout)
        model: Model | None = None
        try:
            with contextlib.closing(self._control.load_model(request, timeout)) as reports:
                for report in reports:
                    if report.HasField("model"):
                        model = Model(self, report.model, report.shared)
                        self._models.append(model)
                    if progress is not None and report.stage in _STAGES:
                        stage = LoadStage(report.stage)
                        progress(LoadProgress(stage, report.bytes_done, report.bytes_total))
        except BaseException:
            if model is not None:
                with contextlib.suppress(BrokerError):
                    model.unload()
            raise
        if model is None:
            raise ProtocolError(f"the load of {absolute!r} ended without a model")
        return model

    def alloc(self, size_bytes: int, *, kind: Literal["memfd", "rpcmem"] | None = None) -> Buffer:
        """A buffer of at least `size_bytes`, zeroed, that the NPU can use in place.

        Args:
            kind: what it is made of; None leaves that to the broker.

        Raises:
            InvalidRequest: a size below 1, or an unknown kind.
            LimitExceeded: reason BUFFER_BYTES, BUFFERS or MEMORY.
            Unsupported: the machine has no such memory.
        """
        self.check()
        buffer = allocate(self, self._attach, size_bytes, kind, self.call_timeout)
        self._buffers[buffer.buffer_id] = buffer
        if self._closed:  # by another thread, meanwhile
            buffer.forget()
        return buffer

    # --- for its parts: Buffer, Model, Graph, Binding

    @property
    def usable(self) -> bool:
        """Whether calls make sense: not closed, not forked."""
        return not self._closed and os.getpid() == self._pid

    def check(self) -> None:
        """Refuses a session that is closed or another process'.

        Raises:
            SessionClosed: reason CLOSED or FORKED.
        """
        if os.getpid() != self._pid:
            raise SessionClosed(
                f"session {self.session_id} belongs to process {self._pid}; this is its fork "
                f"{os.getpid()}, which must connect for itself",
                reason="FORKED",
                session_id=self.session_id,
                owner_pid=self._pid,
                pid=os.getpid(),
            )
        if self._closed:
            raise SessionClosed(f"session {self.session_id} is closed", session_id=self.session_id)

    def execute(self, binding_id: int, timeout: float | None) -> Timing:
        """Runs a binding once. The one place that knows how."""
        seconds = self.call_timeout if timeout is None else timeout
        if self._hot is None:
            return self._control.execute(binding_id, seconds)
        try:
            return self._hot.run(binding_id, seconds)
        except BrokerLost as exc:
            raise self._ended(exc) from exc

    def hot_path(self) -> HotPath:
        """The rings, for submissions.

        Raises:
            Unsupported: the session has none. SessionClosed.
        """
        self.check()
        if self._hot is None:
            raise Unsupported(
                f"session {self.session_id} has no rings: it was opened with ring=False, or the "
                "broker has none"
            )
        return self._hot

    def _ended(self, exc: BrokerLost) -> BrokerError:
        """Why the ring ended: our own close, or the broker's."""
        if self._closed:
            return SessionClosed(
                f"session {self.session_id} was closed", session_id=self.session_id
            )
        return exc

    def create_binding(
        self, request: control_pb2.CreateBindingRequest
    ) -> control_pb2.CreateBindingResponse:
        return self._control.create_binding(request, self.call_timeout)

    def describe_binding(self, binding_id: int) -> control_pb2.DescribeBindingResponse:
        return self._control.describe_binding(binding_id, self.call_timeout)

    def release_binding(self, binding_id: int) -> bool:
        """False while a run of it may still write; ask again later."""
        if self.usable:
            with contextlib.suppress(BrokerLost, SessionClosed, LeaseRevoked):
                return self._control.release_binding(binding_id, self.call_timeout)
        return True

    def unload_model(self, model: Model) -> None:
        if self.usable:
            self._models.remove(model)
            with _gone_is_fine():
                request = control_pb2.UnloadModelRequest(model_id=model.model_id)
                self._control.unload_model(request, self.call_timeout)

    def release_buffer(self, buffer_id: int) -> None:
        if self.usable:
            self._buffers.pop(buffer_id, None)
            body = attach_pb2.ReleaseRequest(buffer_id=buffer_id).SerializeToString()
            with _gone_is_fine():
                self._attach.request(frames.Kind.RELEASE, body, self.call_timeout, fd_count=0)

    # --- how it ends

    def close(self) -> None:
        """Ends the session; the broker takes back all it holds. Idempotent; nothing in a fork.

        Arrays over its buffers stay readable for as long as somebody holds them.
        """
        if not self.usable:
            return
        self._closed = True
        _open_sessions.discard(self)
        if self._hot is not None:
            self._hot.ring.close()
        self._control.close()
        self._attach.close()
        for buffer in list(self._buffers.values()):
            buffer.forget()

    def _abandon(self) -> None:
        """In the child of a fork: only the fd goes. The channel must not even be freed there."""
        self._attach.abandon()
        if self._hot is not None:
            self._hot.ring.abandon_all()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._control.channel()))
        for buffer in list(self._buffers.values()):
            buffer.forget()

    def __enter__(self) -> Self:
        self.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_closed", True) or os.getpid() != self._pid:
            return
        try:
            warnings.warn(f"never closed: {self!r}", ResourceWarning, source=self, stacklevel=2)
        finally:
            self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Session {self.session_id} of process {self._pid}{state}>"


#: Stages that this version knows; a newer broker may have more.
_STAGES = frozenset(int(stage) for stage in LoadStage)
_open_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _gone_is_fine() -> "contextlib.suppress":
    """For giving back: what went with the broker or the session needs no giving back."""
    return contextlib.suppress(BrokerLost, SessionClosed)


def _abandon_all() -> None:
    for session in list(_open_sessions):
        session._abandon()


os.register_at_fork(after_in_child=_abandon_all)
