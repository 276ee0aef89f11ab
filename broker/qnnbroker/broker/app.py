# SPDX-License-Identifier: Apache-2.0
"""Broker: builds the parts in order, starts them, stops them in reverse."""

import asyncio
import logging
import os
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from qnnbroker.native import heap
from qnnbroker.protos.paths import (
    ATTACH_SOCKET,
    GRPC_SOCKET,
    LOCK_FILE,
    grpc_target,
    make_runtime_dir,
)

from .attach import AttachServer, bind_listener, inherit_listener
from .backends.base import Backend
from .backends.opening import open_backend
from .buffer_memory import BufferMemory
from .config import BrokerConfig
from .contexts import ContextStore
from .control import ControlServicer
from .creating import Creator
from .executor import LoopExecutor
from .files import HashCache
from .lock import BrokerLock
from .models import ModelTable
from .requests import add_servicer
from .service import BrokerService
from .sessions import SessionTable
from .threads import FreshThreads
from .verdicts import VerdictStore, default_directory
from .verifying import Verifier
from .version import broker_version

log = logging.getLogger(__name__)
qnn_log = logging.getLogger("qnnbroker.qnn")

#: Freed blocks from this size on go back to the system at once. Each call of a load has a thread of
#: its own, for which the library takes a block of 5.3 MiB; each of the allocator's heaps on which
#: such threads had come by would keep two of them, and there are eight heaps for a core.
KEPT_BLOCK_BYTES = 1 << 20


class Broker:
    """The broker of one runtime directory. `start`, then `wait_stopped`, then `stop`.

    Belongs to one event loop, and to a process that never forks.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self._stop_asked = asyncio.Event()
        self._lock: BrokerLock | None = None
        self._listener: socket.socket | None = None
        self._backend: Backend | None = None
        self._log_fd = -1
        self._server: grpc.aio.Server | None = None
        self._attach: AttachServer | None = None
        self._service: BrokerService | None = None
        self._threads: FreshThreads | None = None
        self._hash_threads: ThreadPoolExecutor | None = None
        self._trial_threads: ThreadPoolExecutor | None = None

    @property
    def service(self) -> BrokerService:
        """The parts, once started."""
        assert self._service is not None
        return self._service

    async def start(self) -> None:
        """Takes the lock, starts the backend, opens the sockets.

        Raises:
            AlreadyExists: another broker runs here.
            NotAllowed, InvalidRequest: the runtime directory.
            BrokerError: the backend.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    def _tidy(self) -> None:
        """After the last load for a while. On a thread of its own."""
        heap.trim()
        if self._backend is not None:
            self._backend.tidy()

    async def _start(self) -> None:
        config, directory = self.config, self.config.directory
        make_runtime_dir(directory)
        self._lock = BrokerLock(directory / LOCK_FILE)
        raise_fd_limit()
        if not heap.keep_below(KEPT_BLOCK_BYTES):
            log.info("the allocator, which is not glibc's, keeps as much freed memory as it likes")
        # First of all, so that a client that comes while the backend starts waits in the backlog.
        if config.attach_fd >= 0:
            self._listener = inherit_listener(config.attach_fd)
        else:
            self._listener = bind_listener(directory / ATTACH_SOCKET)
        loop = asyncio.get_running_loop()
        memory = BufferMemory(config)
        self._threads = FreshThreads(config.load_threads, "qnnbroker-load", tidy=self._tidy)
        self._backend = await loop.run_in_executor(
            self._threads, open_backend, config, memory.probe_region
        )
        self._log_fd = self._backend.log_fileno()
        if self._log_fd >= 0:
            loop.add_reader(self._log_fd, self._drain_log)
        executor = LoopExecutor(
            config.band_workers,
            config.band_priorities,
            spin_ns=config.spin_us * 1000,
            spin_limit_ns=config.spin_limit_us * 1000,
        )
        contexts = ContextStore(
            self._backend,
            self._threads,
            self._make_verifier(self._backend),
            Creator(self._backend, config.file_mapped_weights),
        )
        # Not the threads that load: a create that hangs would keep resident models from everybody.
        self._hash_threads = ThreadPoolExecutor(config.load_threads, "qnnbroker-hash")
        models = ModelTable(contexts, HashCache(self._hash_threads), config.keep_alive_seconds)
        sessions = SessionTable(config, executor, models, memory)
        version = broker_version()
        self._service = BrokerService(
            config, self._backend, executor, contexts, models, sessions, version, self.request_stop
        )
        self._service.power.start()
        grpc_path = await self._start_grpc(directory, self._service)
        self._attach = AttachServer(config, sessions, self._listener, grpc_path, version)
        self._attach.start()
        info = self._backend.info
        log.info(
            "qnnbroker %s ready on %s: %s %s, build %s, SoC %d, arch %d%s",
            version,
            directory,
            info.name,
            info.provider,
            info.build_id,
            info.soc_model,
            info.dsp_arch,
            " (emulated)" if info.emulated else "",
        )

    def _make_verifier(self, backend: Backend) -> Verifier | None:
        """Tries binaries before they are loaded; None where the config leaves that out."""
        config = self.config
        if not config.verifies:
            return None
        # Not the threads that load: a trial that hangs would keep everybody else from loading.
        self._trial_threads = ThreadPoolExecutor(config.load_threads, "qnnbroker-trial")
        directory = Path(config.verdict_dir or default_directory(config.directory))
        return Verifier(
            backend.info, VerdictStore(directory), config.trial_seconds, self._trial_threads
        )

    async def _start_grpc(self, directory: Path, service: BrokerService) -> Path:
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self.config.max_message_bytes),
                ("grpc.max_send_message_length", self.config.max_message_bytes),
                ("grpc.so_reuseport", 0),
            ]
        )
        add_servicer(ControlServicer(service), server)
        # grpcio cannot adopt a listening fd, and removes a path that it binds: so it binds a name
        # of its own, which then becomes the public one in one step.
        own = directory / f"grpc-{os.getpid()}.sock"
        own.unlink(missing_ok=True)
        server.add_insecure_port(grpc_target(own))
        self._server = server
        await server.start()
        os.chmod(own, 0o600)
        path = directory / GRPC_SOCKET
        os.rename(own, path)
        return path

    def _drain_log(self) -> None:
        assert self._backend is not None
        for level, text in self._backend.drain_log():
            qnn_log.log(level, "%s", text)

    def request_stop(self, why: str) -> None:
        """Makes `wait_stopped` return. Called from the loop's thread."""
        if not self._stop_asked.is_set():
            log.info("stopping: %s", why)
            self._stop_asked.set()

    async def wait_stopped(self) -> None:
        """Until somebody asks for the stop."""
        await self._stop_asked.wait()

    async def stop(self) -> None:
        """Stops accepting, finishes what runs, frees in order, removes the sockets. Idempotent."""
        service = self._service
        if service is not None:
            service.stopping = True
        if self._attach is not None:
            self._attach.stop_accepting()
        if service is not None:
            await service.reset.end()
            # Running executes end and are answered; queued ones fail as STOPPING.
            await service.executor.stop()
        # Before gRPC, which fails a call that comes now with a status that says nothing: a client
        # whose connection has ended knows why.
        if self._attach is not None:
            await self._attach.close()
            self._attach = None
        if self._server is not None:
            await self._server.stop(grace=1.0)
            self._server = None
        if service is not None:
            service.close_inline()
            service.models.close()
            await self._wait_idle(service)
            await service.contexts.close()
            service.executor.close()
            await service.power.close()
            self._service = None
        # A hash that nobody waits for may still run.
        for threads in (self._hash_threads, self._threads, self._trial_threads):
            if threads is not None:
                await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)
        self._hash_threads = self._threads = self._trial_threads = None
        if self._backend is not None:
            if self._log_fd >= 0:
                asyncio.get_running_loop().remove_reader(self._log_fd)
            self._backend.close()
            self._drain_log()
            self._backend = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.remove_sockets()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_sockets(self) -> None:
        """Takes our names out of the runtime directory; while we hold its lock only.

        Somebody may have put another directory in its place, where another broker serves.
        """
        if self._lock is None or not self._lock.is_of(self.config.directory / LOCK_FILE):
            return
        if self.config.attach_fd < 0:
            (self.config.directory / ATTACH_SOCKET).unlink(missing_ok=True)
        (self.config.directory / GRPC_SOCKET).unlink(missing_ok=True)

    async def _wait_idle(self, service: BrokerService) -> None:
        """Until the executor has told of every session and binding that is gone."""
        registrar = service.contexts.registrar
        while service.executor.held or registrar.busy:
            if registrar.busy:
                await registrar.wait_idle()
            else:
                await service.executor.wait_event()


def raise_fd_limit() -> None:
    """Every session takes several fds: as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
