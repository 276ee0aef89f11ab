# SPDX-License-Identifier: Apache-2.0
"""Child: a process of its own that calls functions for us, one at a time.

The other side is `worker`. Orders and answers are lines of JSON.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

_ANSWER_SECONDS = 900.0
_END_SECONDS = 30.0


class Child:
    """One process. A context manager; it ends with the block, at the latest with us.

    `function` is named as "module:name", the module relative to this package. It is imported in the
    child when it is first called.
    """

    def __init__(self, **environment: str) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "qnnbroker.benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, function: str, **arguments: Any) -> Any:
        """What the function returns there.

        Raises:
            RuntimeError: it raised, or the process ended; the text says what.
        """
        self.send(function, **arguments)
        return self.receive()

    def send(self, function: str, **arguments: Any) -> None:
        """The first half of `ask`, so that several children work at the same time."""
        order = json.dumps({"function": function, "arguments": arguments})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `receive` says why
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """The second half of `ask`."""
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], _ANSWER_SECONDS)[0]
        line = self._process.stdout.readline() if ready else b""
        if not line:
            state = "ended" if ready else f"said nothing for {_ANSWER_SECONDS:g} s"
            raise RuntimeError(f"a process of the benchmark {state}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"in a process of the benchmark: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-1000:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        self.close()


@contextlib.contextmanager
def children(count: int) -> Iterator[list[Child]]:
    """So many of them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Child()) for _ in range(count)]


def ask_all(asked: Sequence[Child], function: str, **arguments: Any) -> list[Any]:
    """The function in all of them at the same time; the answers in their order."""
    for child in asked:
        child.send(function, **arguments)
    return [child.receive() for child in asked]
