# SPDX-License-Identifier: Apache-2.0
"""The processes of the demo: a broker and the applications; each ends with its `with` block."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import grpc

from qnnbroker.v1 import control_pb2
from qnnbroker.v1.control_pb2_grpc import ControlServiceStub

_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_END_SECONDS = 15.0
_HERE = Path(__file__).parent


class DemoError(Exception):
    """A process of the demo did not do its part."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one run said about a file."""

    label: str
    probability: float


@dataclass(slots=True)
class WorkerResult:
    """What an application said, and when; times are from the start of its process.

    It had imported everything at `begun_seconds`, and only then connected, or made its session.
    """

    begun_seconds: float = 0.0
    ready_seconds: float = 0.0
    first_seconds: float = 0.0
    answers: dict[Path, list[Answer]] = field(default_factory=dict)

    def times(self, from_begun: bool) -> tuple[float, float]:
        """Seconds until the model was ready and until the first answer."""
        begin = self.begun_seconds if from_begun else 0.0
        return self.ready_seconds - begin, self.first_seconds - begin

    def __len__(self) -> int:
        """How many runs."""
        return sum(map(len, self.answers.values()))


class Child:
    """A process with its standard error in a file, ended by `stop`."""

    def __init__(self, command: list[str], environment: dict[str, str], **pipes: Any) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stderr=self._errors,
                # Ctrl-C is for the demo, which ends its processes in order.
                start_new_session=True,
                **pipes,
            )
        except BaseException:
            self._errors.close()
            raise

    def last_words(self) -> str:
        """The end of its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-1500:]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, kindly first; returns when it is gone."""
        try:
            self.process.send_signal(number)
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            # Its session is its own: whatever it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._errors.close()


class Broker:
    """`qnnbroker serve` in a runtime directory of its own. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start_seconds = 0.0
        #: Whether there is no NPU behind it.
        self.emulated = False

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def __enter__(self) -> Self:
        started = time.monotonic()
        self._child = Child(
            [
                sys.executable,
                "-m",
                "qnnbroker.cli.main",
                "serve",
                "--runtime-dir",
                str(self.directory),
            ],
            {},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            self._wait_ready(started + _START_SECONDS)
        except BaseException:
            self._child.stop()
            raise
        self.start_seconds = time.monotonic() - started
        return self

    def __exit__(self, *_: object) -> None:
        self._child.stop()

    def holdings(self) -> tuple[int, int]:
        """How many contexts it holds, and how many sessions there are."""
        try:
            with self._control() as control:
                models = control.ListModels(control_pb2.ListModelsRequest(), timeout=10)
                sessions = control.ListSessions(control_pb2.ListSessionsRequest(), timeout=10)
        except grpc.RpcError as error:
            raise DemoError(
                f"the broker did not say what it holds: {error}; {self._child.last_words()}"
            ) from error
        return len(models.contexts), len(sessions.sessions)

    def _wait_ready(self, deadline: float) -> None:
        while True:
            if self._child.process.poll() is not None:
                raise DemoError(f"the broker did not start: {self._child.last_words()}")
            try:
                with self._control() as control:
                    info = control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)
                self.emulated = info.backend.emulated
                return
            except grpc.RpcError as error:
                if time.monotonic() > deadline:
                    raise DemoError(
                        f"the broker was not ready within {_START_SECONDS:.0f} s: "
                        f"{self._child.last_words()}"
                    ) from error
            with contextlib.suppress(subprocess.TimeoutExpired):  # a pause, cut short by its end
                self._child.process.wait(0.05)

    @contextlib.contextmanager
    def _control(self) -> Iterator[ControlServiceStub]:
        with grpc.insecure_channel(f"unix:{self.directory / 'grpc.sock'}") as channel:
            yield ControlServiceStub(channel)


class Worker:
    """An application: demo_worker.py in a process of its own. A context manager."""

    def __init__(
        self,
        way: str,
        name: str,
        wrapper: Path,
        files: list[Path],
        runs: int,
        runtime_dir: Path | None,
    ) -> None:
        self.name = name
        self.runs = runs
        self._command = [sys.executable, str(_HERE / "demo_worker.py"), way, "--name", name]
        self._command += ["--wrapper", str(wrapper), "--runs", str(runs)]
        if runtime_dir is not None:
            self._command += ["--runtime-dir", str(runtime_dir)]
        self._command += ["--", *map(str, files)]
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._result = WorkerResult()
        self._child: Child | None = None
        self._started = 0.0

    @property
    def pid(self) -> int:
        return self._running().process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.stop()
            self._reader.join()

    def start(self) -> None:
        """Start the process."""
        self._started = time.monotonic()
        self._child = Child(
            self._command, {}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, args=(self._child.process.stdout,))
        self._reader.start()

    def wait_first_answer(self) -> None:
        """Wait until it has its model and its first answer; it then waits for `go_on`."""
        self._result.begun_seconds = self._next("begun")["at"] - self._started
        self._result.ready_seconds = self._next("ready")["at"] - self._started
        answer = self._next("answer")
        self._result.first_seconds = answer["at"] - self._started
        self._keep(answer)

    def go_on(self) -> None:
        """Let it do the rest of its runs."""
        pipe = self._running().process.stdin
        assert pipe is not None
        try:
            pipe.write("go on\n")
            pipe.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answers(self) -> Iterator[Answer]:
        """The rest of its answers, as they come; afterwards it waits to be ended."""
        for _ in range(self.runs - 1):
            yield self._keep(self._next("answer"))
        self._next("done")

    def result(self) -> WorkerResult:
        """Everything it said so far."""
        return self._result

    def _keep(self, event: dict[str, Any]) -> Answer:
        answer = Answer(event["label"], event["probability"])
        self._result.answers.setdefault(Path(event["file"]), []).append(answer)
        return answer

    def _running(self) -> Child:
        assert self._child is not None, "not started"
        return self._child

    def _read(self, pipe: IO[str]) -> None:
        """In a thread: events from the pipe to the queue."""
        for line in pipe:
            self._events.put(json.loads(line))
        self._events.put({"kind": "end"})

    def _next(self, kind: str) -> dict[str, Any]:
        try:
            event = self._events.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise DemoError(
                f"the {self.name} said nothing for {_ANSWER_SECONDS:.0f} s: "
                f"{self._running().last_words()}"
            ) from None
        if event["kind"] != kind:
            raise self._ended()
        return event

    def _ended(self) -> DemoError:
        child = self._running()
        return DemoError(f"the {self.name} ended before its time: {child.last_words()}")
