# SPDX-License-Identifier: Apache-2.0
"""Starts trial children and says what came of them. What they do is in trial_child.py."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qnnbroker.protos.errors import SubmissionCancelled

from .compatibility import Facts
from .steady import SteadyFile

Kind = Literal["ok", "refused", "witness", "crashed", "hung", "cannot"]

#: How long a look at whether the trial is still wanted may be away.
_LOOK_SECONDS = 0.1
_MAX_EVENT_BYTES = 1 << 20
#: What ends a process for reasons that are not in the binary: an operator, a service manager that
#: stops everything, the kernel when memory runs out.
FROM_OUTSIDE = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended.

    Attributes:
        kind: "ok"; "refused" by the library; "witness" spoilt; "crashed" or "hung" (took too long);
            "cannot": the trial itself did not come off, which says nothing about the binary.
        stage: where it was: starting, parsing, creating, executing or checking.
        message: a phrase, for people.
        code: of QNN, when it refused; else 0.
    """

    kind: Kind
    stage: str
    message: str = ""
    code: int = 0


def try_binary(
    qnn_dir: Path,
    candidate: SteadyFile,
    witness: SteadyFile | None,
    *,
    check: Callable[[Facts], None],
    limit_seconds: float,
    cancelled: threading.Event,
) -> Outcome:
    """One trial; blocks until its process is gone. Both files must be held by the caller.

    Args:
        check: called once the binary is parsed, before anything is created; what it raises ends the
            trial and comes out here.
        cancelled: set it to give up.

    Raises:
        SubmissionCancelled: `cancelled` was set.
    """
    read_fd, write_fd = os.pipe()
    job = {
        "parent": os.getpid(),
        "qnn_dir": str(qnn_dir),
        "events_fd": write_fd,
        "candidate": _place(candidate),
        "witness": None if witness is None else _place(witness),
    }
    files = [candidate, *([witness] if witness is not None else [])]
    with open(read_fd, "rb", buffering=0):
        try:
            child = subprocess.Popen(
                # -P: a file of the current directory must not stand in for a package.
                [sys.executable, "-P", "-m", "qnnbroker.broker.trial_child", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[write_fd, *(f.file.fd for f in files)],
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return Outcome("cannot", "starting", f"no process: {error.strerror}")
        finally:
            os.close(write_fd)
        with child:
            try:
                return _follow(child, read_fd, check, limit_seconds, cancelled)
            finally:
                child.kill()


def _place(steady: SteadyFile) -> list[int]:
    return [steady.file.fd, max(0, steady.file.identity.offset), steady.size_bytes]


def _follow(
    child: "subprocess.Popen[bytes]",
    fd: int,
    check: Callable[[Facts], None],
    limit_seconds: float,
    cancelled: threading.Event,
) -> Outcome:
    stage = "starting"
    deadline = time.monotonic() + limit_seconds
    for event in _events(fd, deadline, cancelled):
        if "stage" in event:
            stage = event["stage"]
        elif "parsed" in event:
            check(_facts(event["parsed"]))
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is gone; its end is told below
                os.write(child.stdin.fileno(), b"go\n")
        elif "end" in event:
            return Outcome(event["end"], stage, event.get("message", ""), event.get("code", 0))
    if time.monotonic() >= deadline:
        if _is_stopped(child.pid):
            return Outcome("cannot", stage, f"somebody stopped the process that tried it ({stage})")
        return Outcome("hung", stage, f"it was not done after {limit_seconds:g} s of {stage}")
    code = child.wait()
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    kind: Kind = "cannot" if stage == "starting" or -code in FROM_OUTSIDE else "crashed"
    return Outcome(kind, stage, f"the process that tried it {how} while {stage}")


def _is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger: it hangs for no fault of its own."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "tT"
    except OSError:
        return False


def _facts(described: dict[str, Any]) -> Facts:
    return Facts(
        backend_id=described["backend_id"],
        build_id=described["build_id"],
        core_api_version=tuple(described["core_api_version"]),
        backend_api_version=tuple(described["backend_api_version"]),
        dsp_arch=described["dsp_arch"],
        soc_model=described["soc_model"],
        shared_weight_bytes=described["shared_weight_bytes"],
    )


def _events(fd: int, deadline: float, cancelled: threading.Event) -> Iterator[dict[str, Any]]:
    """Until the pipe ends, or the time is over."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if cancelled.is_set():
                raise SubmissionCancelled("nobody waits for this load any more")
            if not selector.select(min(left, _LOOK_SECONDS)):
                continue
            data = os.read(fd, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > _MAX_EVENT_BYTES:
                return
            for line in lines:
                with contextlib.suppress(ValueError):
                    yield json.loads(line)
