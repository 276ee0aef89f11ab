# SPDX-License-Identifier: Apache-2.0
"""The command line as a process, and what holds for every way it may end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.broker_process import BrokerProcess
from tests.waiting import PATIENCE_SECONDS, wait_until

from qnnbroker.v1 import control_pb2 as pb

#: As the installed script does it: no directory of the caller's on the module path.
PROGRAM = [sys.executable, "-P", "-m", "qnnbroker.cli.main"]
#: Starts `qnnbroker serve` with further arguments, and options of CommandLine.start.
Serve = Callable[..., "subprocess.Popen[bytes]"]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def ok(self) -> str:
        """Its output; it must have succeeded and said nothing on standard error."""
        assert self.code == 0, self
        assert self.err == ""
        return self.out

    def document(self) -> Any:
        """The one JSON document on its output; it must have succeeded."""
        return json.loads(self.ok())

    def failed(self, code: int) -> str:
        """The message of its one line on standard error; it must have ended with `code`."""
        assert self.code == code, self
        lines = self.err.splitlines()
        assert len(lines) == 1, self
        assert "Traceback" not in self.out
        name, _, message = lines[0].partition(": ")
        assert name == "qnnbroker"
        assert message
        assert "a bug in qnnbroker" not in message
        return message

    def error(self, code: int) -> dict[str, Any]:
        """The JSON error of a command that was given --json."""
        message = self.failed(code)
        document = json.loads(self.out)
        assert list(document) == ["error"]
        assert document["error"]["message"] == message
        found: dict[str, Any] = document["error"]
        return found


@dataclass(frozen=True)
class CommandLine:
    """Runs `qnnbroker` with an environment of its own: no configuration but that of the test."""

    runtime_dir: Path
    home: Path

    def environment(self, **changes: str | None) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("QNNBROKER_")}
        ours = {
            "QNNBROKER_RUNTIME_DIR": str(self.runtime_dir),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            # Beside, not in: ONNX Runtime makes a directory there, and tests look at what is made.
            "XDG_CACHE_HOME": str(self.home.with_name(f"{self.home.name}-cache")),
            "TERM": "dumb",
            # Warnings of our own code are defects; the interpreter prints them on stderr.
            "PYTHONWARNINGS": "default",
        }
        return {k: v for k, v in (inherited | ours | changes).items() if v is not None}

    def __call__(
        self,
        *arguments: str | bytes | Path,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60.0,
    ) -> Ended:
        """Runs a command to its end."""
        done = subprocess.run(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=cwd or self.home,
            env=self.environment(**(env or {})),
            timeout=timeout,
            check=False,
        )
        return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        pass_fds: tuple[int, ...] = (),
        stdout: int = subprocess.PIPE,
    ) -> "subprocess.Popen[bytes]":
        """Starts a command; `interrupt` or `finish` ends it."""
        return subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=cwd or self.home,
            env=self.environment(**(env or {})),
            pass_fds=pass_fds,
        )


def wait_running(broker: BrokerProcess) -> None:
    """Until a session of the broker has a run under way."""

    def running() -> bool:
        sessions = broker.stub.ListSessions(pb.ListSessionsRequest(), timeout=PATIENCE_SECONDS)
        return any(session.in_flight for session in sessions.sessions)

    wait_until(running, "a run is under way")


def finish(process: "subprocess.Popen[bytes]") -> Ended:
    """Waits for its end."""
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return Ended(process.returncode, (out or b"").decode(), err.decode())


def interrupt(process: "subprocess.Popen[bytes]") -> Ended:
    """Ctrl-C; waits for its end."""
    process.send_signal(signal.SIGINT)
    return finish(process)
