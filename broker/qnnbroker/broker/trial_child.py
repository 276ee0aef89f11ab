# SPDX-License-Identifier: Apache-2.0
"""The process that tries one context binary: `python -m qnnbroker.broker.trial_child JOB`.

It ends itself, or is ended by the binary, and nobody minds. It first makes the witness (a binary
that is loaded in the worker that asks), then parses the candidate, says what it found and waits
for "go", creates it beside the witness, executes each graph once on zeros, and the witness again.

Events are JSON lines on the pipe that the job names: {"stage": ...}, {"parsed": {...}}, and last
{"end": "ok" | "refused" | "witness" | "cannot", ...}. None after a stage: it died there.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from qnnbroker.native.qnn_backend import QnnBackend, QnnDevice
from qnnbroker.native.qnn_context import QnnContext
from qnnbroker.native.qnn_error import QnnError
from qnnbroker.native.qnn_graph import QnnGraph
from qnnbroker.native.qnn_info import BinaryInfo, parse_binary
from qnnbroker.native.qnn_library import QnnLibrary, drain_log
from qnnbroker.native.region import Region

_PR_SET_PDEATHSIG = 1
#: How much more readily the kernel's OOM killer and scheduler take from us than from others.
_OOM_SCORE, _NICENESS = 1000, 10


class Trial:
    """One job, and the pipe that it reports on."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._events_fd: int = job["events_fd"]

    def emit(self, **event: object) -> None:
        """One line; whoever asked is there, or we would be gone."""
        os.write(self._events_fd, json.dumps(event).encode() + b"\n")

    def run(self) -> None:
        """The whole trial; ends with the event "end"."""
        self.emit(stage="starting")
        try:
            library = QnnLibrary(self._job["qnn_dir"])
            backend = QnnBackend(library, log_level=1)
            device = QnnDevice(backend)
            witness, zero_result = self._witness(device)
        except (OSError, QnnError, ValueError) as error:
            return self.emit(end="cannot", message=f"{error}")
        try:
            with self._mapped(self._job["candidate"]) as region:
                self.emit(stage="parsing")
                info = parse_binary(library, region)
                self.emit(parsed=facts(info))
                if sys.stdin.readline() != "go\n":
                    return None
                self.emit(stage="creating")
                context = QnnContext(device, region, info=info)
            self.emit(stage="executing")
            for graph in info.graphs:
                execute_on_zeros(context.graph(graph.name))
            if witness is not None:
                self.emit(stage="checking")
                problem = ""
                try:
                    if execute_on_zeros(witness) != zero_result:
                        problem = "it then gives another result"
                except QnnError as error:
                    problem = f"it then fails: {error}"
                if problem:
                    return self.emit(end="witness", message=problem)
            context.close()
        except QnnError as error:
            return self.emit(
                end="refused", code=error.code, operation=error.operation, message=str(error)
            )
        except (ValueError, MemoryError, OverflowError, OSError) as error:
            return self.emit(end="refused", code=0, operation="", message=str(error) or "no memory")
        return self.emit(end="ok")

    def _mapped(self, place: list[int]) -> Region:
        fd, offset, length = place
        return Region.map_file(fd, offset, length)

    def _witness(self, device: QnnDevice) -> tuple[QnnGraph | None, list[bytes]]:
        if self._job["witness"] is None:
            return None, []
        with self._mapped(self._job["witness"]) as region:
            context = QnnContext(device, region)
        graph = context.graph(context.info.graphs[0].name)
        return graph, execute_on_zeros(graph)


def facts(info: BinaryInfo) -> dict[str, Any]:
    """What is compared with the device before the binary is created."""
    return {
        "backend_id": info.backend_id,
        "build_id": info.build_id,
        "core_api_version": info.core_api_version,
        "backend_api_version": info.backend_api_version,
        "dsp_arch": info.dsp_arch,
        "soc_model": info.soc_model,
        "shared_weight_bytes": max((g.shared_weight_bytes for g in info.graphs), default=0),
    }


def execute_on_zeros(graph: QnnGraph) -> list[bytes]:
    """Runs it once; the bytes of its outputs. Memory is the heap's, exact in size."""
    inputs = [bytes(t.size_bytes) for t in graph.inputs]
    outputs = [bytearray(t.size_bytes) for t in graph.outputs]
    with graph.bind(
        [(data, 0, len(data)) for data in inputs], [(data, 0, len(data)) for data in outputs]
    ) as runnable:
        runnable.execute()
    return [bytes(data) for data in outputs]


def settle(parent: int) -> None:
    """Dies with whoever asked, leaves no core file, and gives way to everybody else."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)


def main() -> None:
    """Does the one job of this process."""
    job = json.loads(sys.argv[1])
    settle(job["parent"])
    trial = Trial(job)
    try:
        trial.run()
    except BrokenPipeError:
        pass
    drain_log()
    os._exit(0)  # the library's threads race with an ordinary exit


if __name__ == "__main__":
    main()
