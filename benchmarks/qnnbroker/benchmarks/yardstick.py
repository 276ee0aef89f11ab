# SPDX-License-Identifier: Apache-2.0
"""Yardstick: the C program that measures what two processes need to reach one another."""

import array
import importlib.util
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from .rows import MissingPart

_PROGRAM = "qb_yardstick"


def program() -> Path:
    """Where it was installed: beside the native code, which an editable install keeps apart.

    Raises:
        MissingPart: it was not built.
    """
    spec = importlib.util.find_spec("qnnbroker.native.runnable")
    if spec is not None and spec.origin is not None:
        found = Path(spec.origin).parents[1] / "benchmarks" / _PROGRAM
        if found.is_file():
            return found
    raise MissingPart(f"the program {_PROGRAM} was not built: install qnnbroker again")


class Yardstick:
    """Two processes that answer one another. A context manager; one thread."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [str(program())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Of the process that asks; the one that answers is its child."""
        return self._process.pid

    def eventfd(self, count: int, busy_ns: int = 0) -> list[int]:
        """ns of each of `count` round trips over two eventfds.

        With `busy_ns` the other side computes for so long before it answers; that time does not
        count, but we sleep meanwhile, as a client does during an execute.
        """
        return self._ask(f"eventfd {count} {busy_ns}", count)

    def socket(self, size_bytes: int, count: int) -> list[int]:
        """ns of each of `count` round trips of so many bytes over a Unix stream socket."""
        return self._ask(f"socket {size_bytes} {count}", count)

    def _ask(self, order: str, count: int) -> list[int]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(order.encode() + b"\n")
        stdin.flush()
        answer = stdout.read(count * 8)
        if len(answer) != count * 8:
            raise RuntimeError(f"{_PROGRAM} ended with status {self._process.wait()}")
        times = array.array("Q")
        times.frombytes(answer)
        return times.tolist()
