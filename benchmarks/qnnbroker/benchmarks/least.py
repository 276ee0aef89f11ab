# SPDX-License-Identifier: Apache-2.0
"""The least broker there could be: a process that executes for one other, rung by an eventfd.

It checks nothing, knows one client and one graph, and copies nothing. What a run through it takes
beyond the execute is what no broker on this library can do without.

    python -m qnnbroker.benchmarks.least BINARY RING ANSWER TIMES
"""

import mmap
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_START_SECONDS = 60.0
_ONE = (1).to_bytes(8, "little")


class Least:
    """That process, and us as its client. A context manager; one thread.

    Raises:
        RuntimeError: it did not start.
    """

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def __enter__(self) -> Self:
        self._ring, self._answer = os.eventfd(0), os.eventfd(0)
        times = os.memfd_create("times")
        os.ftruncate(times, mmap.PAGESIZE)
        self._times = mmap.mmap(times, mmap.PAGESIZE)
        fds = (self._ring, self._answer, times)
        command = [sys.executable, "-P", "-m", "qnnbroker.benchmarks.least", str(self._binary)]
        self._process = subprocess.Popen([*command, *map(str, fds)], pass_fds=fds)
        os.close(times)
        if not select.select([self._answer], [], [], _START_SECONDS)[0]:
            self.__exit__(None, None, None)
            raise RuntimeError("the process of the least broker did not start")
        os.eventfd_read(self._answer)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._times.close()
        os.close(self._ring)
        os.close(self._answer)

    def run(self) -> int:
        """One execute there; the ns that it took."""
        os.write(self._ring, _ONE)
        os.read(self._answer, 8)
        return int.from_bytes(self._times[:8], "little")


def serve(binary: Path, ring: int, answer: int, times: mmap.mmap) -> None:
    """Until it is killed."""
    from qnnbroker.native.qnn_library import default_qnn_dir

    from .inprocess import DirectGraph

    execute = DirectGraph(default_qnn_dir(), binary).execute
    clock = time.perf_counter_ns
    os.write(answer, _ONE)
    while True:
        os.read(ring, 8)
        started = clock()
        execute()
        times[:8] = (clock() - started).to_bytes(8, "little")
        os.write(answer, _ONE)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), mmap.mmap(int(sys.argv[4]), 0))
