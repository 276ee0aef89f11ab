# SPDX-License-Identifier: Apache-2.0
"""What the broker does for a call: the operations behind the gRPC servicer, on plain objects."""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable

from qnnbroker.native.executor import BAND_NORMAL, ExecutorSession
from qnnbroker.native.qnn_error import name_of
from qnnbroker.protos.attach import ABI_VERSION, PROTOCOL_MAX, PROTOCOL_MIN
from qnnbroker.protos.errors import BrokerUnavailable, InvalidRequest, NotAllowed
from qnnbroker.v1 import control_pb2 as pb

from .backends.base import Backend
from .bound import BoundGraph
from .buffer_memory import RPCMEM
from .config import BrokerConfig
from .contexts import ContextStore, StageProgress
from .executor import LoopExecutor
from .inline import check_inputs, output_buffers, output_tensors
from .models import Model, ModelTable
from .power import PowerGovernor
from .reset import BackendReset
from .sessions import Session, SessionTable
from .statistics import counters, graph_statistics, quantiles

log = logging.getLogger(__name__)

BAND_NAMES = ("low", "normal", "high")


class BrokerService:
    """The broker's parts, joined. Belongs to the event loop's thread."""

    def __init__(
        self,
        config: BrokerConfig,
        backend: Backend,
        executor: LoopExecutor,
        contexts: ContextStore,
        models: ModelTable,
        sessions: SessionTable,
        version: str,
        request_stop: Callable[[str], None],
    ) -> None:
        self.config = config
        self.backend = backend
        self.executor = executor
        self.contexts = contexts
        self.models = models
        self.sessions = sessions
        self.request_stop = request_stop
        self.stopping = False
        self.reset = BackendReset(self)
        self.power = PowerGovernor(
            config,
            backend.open_power,
            self._power_wishes,
            executor.next_submission,
            emulated=backend.info.emulated,
        )
        self.started = time.monotonic()
        self.copied_bytes = 0
        self.execute_errors = 0
        self._version = version
        self.inline_session: ExecutorSession | None = None
        self._inline_runs_seen = 0

    def check_running(self) -> None:
        """Refuses new work while the broker stops.

        Raises:
            BrokerUnavailable: reason STOPPING.
        """
        if self.stopping:
            raise BrokerUnavailable("the broker is stopping", reason="STOPPING")
        if self.reset.running:
            raise BrokerUnavailable(
                f"the backend is being reset: {self.reset.stage}", reason="STARTING"
            )

    def server_info(self) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            broker_version=self._version,
            pid=os.getpid(),
            backend=self.backend.info,
            limits=self.config.limits(),
            uptime_seconds=time.monotonic() - self.started,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            abi_version=ABI_VERSION,
            runtime_dir=self.config.runtime_dir,
            buffer_kind=self.sessions.memory.default_kind,
            buffer_detail=self.sessions.memory.detail,
            power=self.power.info(),
        )

    def _power_wishes(self) -> list[str]:
        """Modes of the sessions, and of clients without one, that worked since the last look."""
        wanted = []
        for session in self.sessions:
            stats = session.executor_session.statistics()
            runs = stats["run_count"] + stats["error_count"]
            if stats["in_flight"] or runs != session.runs_seen:
                wanted.append(session.perf_mode or self.config.session_perf_mode)
            session.runs_seen = runs
        if self.inline_session is not None:
            stats = self.inline_session.statistics()
            runs = stats["run_count"] + stats["error_count"]
            if stats["in_flight"] or runs != self._inline_runs_seen:
                wanted.append(self.config.session_perf_mode)
            self._inline_runs_seen = runs
        return wanted

    async def reset_backend(self) -> pb.ResetBackendResponse:
        """See `reset`."""
        self.check_running()
        return await self.reset.run()

    # -- models ------------------------------------------------------------------------------------

    async def load(
        self, session: Session | None, request: pb.LoadModelRequest, progress: StageProgress
    ) -> tuple[Model, bool]:
        """A model for the session, or for nobody with a keep-alive."""
        self.check_running()
        if math.isnan(request.keep_alive_seconds):
            raise InvalidRequest("keep_alive_seconds: a number of seconds wanted, found NaN")
        opened = None
        if request.file_id:
            if session is None:
                raise NotAllowed(
                    "a file id belongs to an attached session; without one name a path",
                    reason="SESSION_REQUIRED",
                )
            opened = session.files.take(request.file_id)
        model, shared = await self.models.load(
            request.path,
            request.name,
            session.session_id if session else None,
            request.keep_alive_seconds,
            progress,
            opened=opened,
            enable_graphs=request.enable_graphs,
            replace=request.replace,
        )
        if session is not None and session.closing:
            self.models.unload(model)
            session.check_open()
        return model, shared

    def abandon_load(self, task: "asyncio.Task[tuple[Model, bool]]") -> None:
        """Nobody waits for this load any more: whatever it brings is given back."""

        def give_back(done: "asyncio.Task[tuple[Model, bool]]") -> None:
            if not done.cancelled() and done.exception() is None:
                model, _ = done.result()
                if model.session_id is not None:
                    self.models.unload(model)

        task.cancel()
        task.add_done_callback(give_back)

    def model(self, session: Session | None, model_id: int, name: str) -> Model:
        """By id, or by name or hash prefix.

        Raises:
            InvalidRequest: neither. NotFound, LeaseRevoked: no such model.
        """
        if model_id:
            return self.models.get(model_id, session.session_id if session else None)
        if name:
            return self.models.find(name, session.session_id if session else None)
        raise InvalidRequest("a model id or a name wanted, found neither")

    def unload(self, session: Session | None, model_id: int, name: str) -> None:
        """Gives back a model of the session's own, or one that is nobody's.

        Raises:
            NotAllowed: reason NOT_THE_OWNER; a session holds it.
        """
        model = self.model(session, model_id, name)
        owner = session.session_id if session else None
        if model.session_id not in (None, owner):
            raise NotAllowed(
                f"model {model.name!r} is held by session {model.session_id}, "
                "which alone can give it back"
            )
        self.models.unload(model)

    # -- execution ---------------------------------------------------------------------------------

    async def execute(
        self, session: Session, binding_id: int, seconds_left: float | None
    ) -> pb.Timing:
        """Runs a binding once. Nothing is copied."""
        self.check_running()
        binding = session.bindings.get(binding_id)
        try:
            timing = await self.executor.run(
                binding.bound.native, deadline_ns=monotonic_deadline(seconds_left)
            )
        except Exception:
            self.execute_errors += 1
            raise
        return pb.Timing(queue_ns=timing.queue_ns, execute_ns=timing.execute_ns, copied_bytes=0)

    def describe_binding(self, session: Session, binding_id: int) -> pb.DescribeBindingResponse:
        """What a completion in the ring has no room for."""
        binding = session.bindings.get(binding_id)
        code = binding.bound.native.last_error
        return pb.DescribeBindingResponse(
            graph=binding.graph.name,
            model_hash=binding.graph.context.content_hash,
            last_error_code=code,
            last_error_name=name_of(code) if code else "",
            parked_count=binding.bound.parked_count,
            memory_path=memory_path(binding.bound),
            memory_detail=binding.bound.memory_detail,
        )

    async def infer(
        self, session: Session | None, request: pb.InferRequest, seconds_left: float | None
    ) -> pb.InferResponse:
        """Runs a graph once with the tensors inline; the copies are counted."""
        self.check_running()
        model = self.model(session, request.model_id, request.name)
        graph = model.graph(request.graph)
        inputs = check_inputs(graph, request.inputs)
        outputs = output_buffers(graph)
        bound = BoundGraph(
            self.executor,
            session.executor_session if session else self._inline(),
            graph,
            inputs,
            [(buffer, 0, len(buffer)) for buffer in outputs],
            band=session.band if session else BAND_NORMAL,
        )
        try:
            timing = await self.executor.run(
                bound.native, deadline_ns=monotonic_deadline(seconds_left)
            )
        except Exception:
            self.execute_errors += 1
            raise
        finally:
            bound.release()
        self.models.keep_alive(model)
        copied = sum(size for _, _, size in inputs) + sum(len(o) for o in outputs)
        self.copied_bytes += copied
        graph.native.copied_bytes += copied
        if session is not None:
            session.copied_bytes += copied
        return pb.InferResponse(
            outputs=output_tensors(graph, outputs),
            timing=pb.Timing(
                queue_ns=timing.queue_ns, execute_ns=timing.execute_ns, copied_bytes=copied
            ),
        )

    def _inline(self) -> ExecutorSession:
        """The executor's share of all clients that have no session."""
        if self.inline_session is None:
            self.inline_session = self.executor.session(0, max_in_flight=0)
        return self.inline_session

    def inline_in_flight(self) -> int:
        """Runs under way of clients that have no session."""
        return self.inline_session.statistics()["in_flight"] if self.inline_session else 0

    def close_inline(self) -> None:
        """Gives the inline clients' share back."""
        if self.inline_session is not None:
            self.executor.close_session(self.inline_session, lambda: None)
            self.inline_session = None

    # -- what is there -----------------------------------------------------------------------------

    def context_infos(self, *, history: bool = False) -> list[pb.ContextInfo]:
        """Every context; with `history` also what is not resident (any more)."""
        held: dict[int, set[int]] = {}
        now = time.monotonic()
        for model in self.models:
            if model.session_id is not None:
                held.setdefault(model.context.context_id, set()).add(model.session_id)
        infos = [
            pb.ContextInfo(
                context_id=c.context_id,
                names=sorted(c.names or set(c.wanted_as)),
                content_hash=c.content_hash,
                state=c.state,
                state_reason=c.lost.reason if c.lost else "",
                state_detail=c.detail,
                state_seconds=now - c.since,
                graph_names=[g.name for g in c.spec.graphs] if c.spec else [],
                session_count=len(held.get(c.context_id, ())),
                holder_count=c.leases,
                binding_count=c.binding_count,
                size_bytes=c.size_bytes,
                run_count=c.run_count(),
                idle_seconds=c.idle_seconds(),
                load_seconds=c.load_seconds,
                backend=self.contexts.backend_name,
                enabled_graphs=c.key.enabled_graphs,
                warnings=c.warnings,
            )
            for c in self.contexts.all()
        ]
        for line in self.contexts.history.lines() if history else ():
            infos.append(
                pb.ContextInfo(
                    names=sorted(set(line.names)),
                    content_hash=line.content_hash,
                    state=line.state,
                    state_reason=line.reason,
                    state_detail=line.detail,
                    state_seconds=now - line.since,
                    size_bytes=line.size_bytes,
                    run_count=line.run_count,
                    idle_seconds=line.idle_seconds(),
                    backend=self.contexts.backend_name,
                )
            )
        return infos

    def session_infos(self) -> list[pb.SessionInfo]:
        now = time.monotonic()
        infos = []
        for s in self.sessions:
            stats = s.executor_session.statistics()
            infos.append(
                pb.SessionInfo(
                    session_id=s.session_id,
                    pid=s.peer.pid,
                    uid=s.peer.uid,
                    command=s.command,
                    client_name=s.client_name,
                    buffer_count=len(s.buffers),
                    buffer_bytes=s.buffers.total_bytes,
                    binding_count=len(s.bindings),
                    model_count=self.models.count_of(s.session_id),
                    in_flight=stats["in_flight"],
                    run_count=stats["run_count"],
                    error_count=stats["error_count"],
                    device_ns=stats["device_ns"],
                    queue=quantiles(stats, "queue"),
                    execute=quantiles(stats, "execute"),
                    total=quantiles(stats, "total"),
                    parked_count=sum(b.bound.parked_count for b in s.bindings),
                    age_seconds=now - s.created,
                    band=BAND_NAMES[s.band],
                    perf_mode=s.perf_mode or self.config.session_perf_mode,
                    rpcmem_bytes=s.buffers.bytes_of(RPCMEM),
                    copied_bytes=s.copied_bytes,
                )
            )
        return infos

    def park(self, model_name: str) -> int:
        """Parks every live binding, or those of one model's context; how many.

        What runs ends first; the next submission revives a binding. For operators and tests.
        """
        context = self.models.find(model_name).context if model_name else None
        return sum(
            binding.bound.park()
            for session in self.sessions
            for binding in session.bindings
            if context is None or binding.graph.context is context
        )

    def statistics(self) -> pb.GetStatisticsResponse:
        return pb.GetStatisticsResponse(
            counters=counters(self), graphs=graph_statistics(self.contexts)
        )


def memory_path(bound: BoundGraph) -> "pb.MemoryPath.ValueType":
    """How the device gets at its tensors."""
    return pb.MEMORY_PATH_REGISTERED if bound.registered else pb.MEMORY_PATH_RAW


def monotonic_deadline(seconds_left: float | None) -> int:
    """A deadline for the executor, ns on CLOCK_MONOTONIC; 0 for none."""
    return 0 if seconds_left is None else time.monotonic_ns() + int(seconds_left * 1e9)
