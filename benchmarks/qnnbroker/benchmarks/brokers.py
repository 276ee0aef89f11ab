# SPDX-License-Identifier: Apache-2.0
"""Brokers of the benchmarks' own: private runtime directories, ended with their block."""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qnnbroker.native.fake import SWITCHES_ENV, FakeGraph, FakeTensor, write_binary

#: A backend may take its time to start; a machine may be busy.
_START_SECONDS = 120.0
_END_SECONDS = 60.0


@dataclass(frozen=True)
class Broker:
    """A broker that runs: its sockets and its process."""

    directory: Path
    pid: int


@contextlib.contextmanager
def broker(
    backend: Literal["fake", "qnn"], *, switches: str = "", **options: object
) -> Iterator[Broker]:
    """A broker as `qnnbroker serve` starts it, over the fake or the real library.

    The fake keeps no record of its calls here, which would cost more than a null graph; `switches`
    are further ones of it. `options` are those of `serve`, with underscores.

    Raises:
        RuntimeError: it did not start; the text is its last line.
    """
    # Short: the path of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="qb-bench-", dir="/tmp") as name:
        directory = Path(name)
        command = [sys.executable, "-P", "-m", "qnnbroker.cli.main", "serve"]
        command += ["--runtime-dir", str(directory), "--backend", backend, "--log-level", "warning"]
        for key, value in options.items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        ready, theirs = os.pipe()
        with open(ready, "rb") as told, tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    [*command, "--ready-fd", str(theirs)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=[theirs],
                    env=os.environ | {SWITCHES_ENV: f"record=off,{switches}"},
                )
            finally:
                os.close(theirs)
            try:
                # Readable when it is ready, and when it has ended.
                if not select.select([told], [], [], _START_SECONDS)[0] or not told.read(1):
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip().splitlines()
                    raise RuntimeError("the broker did not start: " + (said or ["no word"])[-1])
                yield Broker(directory, process.pid)
            finally:
                process.terminate()
                try:
                    process.wait(_END_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


@contextlib.contextmanager
def fake_model(
    name: str,
    input_bytes: int = 4096,
    output_bytes: int = 4096,
    *,
    execute_us: int = 0,
    sums: bool = False,
) -> Iterator[Path]:
    """A context binary for the fake: uint8 `x` in, and `y` out; gone with the block.

    Args:
        execute_us: what an execute takes, asleep: an NPU takes no core either.
        sums: `y` is a uint64, the sum of the bytes of `x`; else the graph touches nothing.
    """
    x = FakeTensor("x", "uint8", (input_bytes,))
    y = FakeTensor("y", "uint64", (1,)) if sums else FakeTensor("y", "uint8", (output_bytes,))
    op = ("sum_bytes", "x", "y") if sums else "null"
    with tempfile.TemporaryDirectory(prefix="qb-bench-") as folder:
        graph = FakeGraph(name, (x,), (y,), (op,), execute_us=execute_us)
        yield write_binary(Path(folder) / f"{name}.bin", [graph])
