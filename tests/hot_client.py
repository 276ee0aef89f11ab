# SPDX-License-Identifier: Apache-2.0
"""A client for process tests: runs mixed graphs every way there is, and checks every output.

    python hot_client.py RUNTIME_DIR MODEL SEED BAND WEIGHT

The model has the graphs of `hot_graphs`. Says "running" after the first good run, goes on until its
stdin ends, and says "done RUNS" last: executes that it knows of.
"""

import asyncio
import random
import select
import sys
import threading
from typing import Any

import numpy as np

from qnnbroker.client import Binding, Session, aio, connect
from qnnbroker.native.fake import FakeGraph, FakeTensor
from qnnbroker.protos.errors import DeadlineExpired, SubmissionCancelled


def hot_graphs() -> tuple[FakeGraph, ...]:
    """Four graphs of different costs, whose outputs say what went in."""
    a, b, y = (FakeTensor(n, "float32", (4, 8)) for n in "aby")
    x, s = FakeTensor("x", "int32", (1000,)), FakeTensor("s", "int64", (1,))
    m, n, p = (FakeTensor(name, "float32", (16, 16)) for name in "mnp")
    return (
        FakeGraph("add", (a, b), (y,), ops=("add",)),
        FakeGraph("sums", (x,), (s,), ops=("sum",), execute_us=100),
        FakeGraph("product", (m, n), (p,), ops=("matmul",)),
        FakeGraph("nap", (a, b), (y,), ops=("add",), execute_us=2000),
    )


class Worker:
    """One thread's bindings of one session."""

    def __init__(self, session: Session, path: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        model = session.load(path)
        self.bindings = {name: model.graphs[name].bind() for name in model.graphs}
        self.runs = 0

    def fill(self, name: str) -> Any:
        """New inputs for a graph; the output they must give."""
        inputs = self.bindings[name].inputs
        for array in inputs.values():
            array[...] = self.numbers.integers(-100, 100, array.shape)
        if name == "sums":
            return inputs["x"].sum(dtype=np.int64)
        if name == "product":
            return inputs["m"] @ inputs["n"]
        return inputs["a"] + inputs["b"]

    def check(self, name: str, wanted: Any) -> None:
        (found,) = self.bindings[name].outputs.values()
        if not np.array_equal(np.squeeze(found), wanted):
            raise AssertionError(f"wrong output of {name}: {found} instead of {wanted}")
        self.runs += 1

    def step(self) -> None:
        """One run, some submissions, or some awaited ones."""
        way = self.random.randrange(10)
        names = self.random.sample(sorted(self.bindings), 3)
        if way < 5:
            wanted = self.fill(names[0])
            self.bindings[names[0]].run(timeout=60)
            self.check(names[0], wanted)
        elif way < 8:
            self.submissions(names)
        else:
            wanted = [self.fill(name) for name in names]
            asyncio.run(self.awaited([self.bindings[name] for name in names]))
            for name, value in zip(names, wanted, strict=True):
                self.check(name, value)

    async def awaited(self, bindings: list[Binding]) -> None:
        await asyncio.gather(*(aio.run(b, timeout=60) for b in bindings))

    def submissions(self, names: list[str]) -> None:
        wanted = [self.fill(name) for name in names]
        late = self.random.randrange(8) == 0
        under_way = [self.bindings[n].submit(timeout=1e-5 if late else 60) for n in names]
        if self.random.randrange(4) == 0:
            under_way[-1].cancel()
        for name, value, submission in zip(names, wanted, under_way, strict=True):
            try:
                submission.result(60)
            except (DeadlineExpired, SubmissionCancelled) as error:
                if isinstance(error, DeadlineExpired) and not (late and error.reason == "QUEUED"):
                    raise
            else:
                self.check(name, value)


def main() -> int:
    runtime_dir, path, seed, band, weight = sys.argv[1:6]
    stop = threading.Event()
    with connect(
        runtime_dir,
        name=f"hot {seed}",
        band=band,  # type: ignore[arg-type]
        weight=int(weight),
    ) as session:
        workers = [Worker(session, path, int(seed) * 10), Worker(session, path, int(seed) * 10 + 1)]
        failures: list[BaseException] = []

        def runs_only(worker: Worker) -> None:
            try:
                while not stop.is_set():
                    name = worker.random.choice(sorted(worker.bindings))
                    wanted = worker.fill(name)
                    worker.bindings[name].run(timeout=60)
                    worker.check(name, wanted)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=runs_only, args=[workers[1]])
        thread.start()
        try:
            workers[0].step()
            print("running", flush=True)
            while not failures and not select.select([sys.stdin], [], [], 0)[0]:
                workers[0].step()
        finally:
            stop.set()
            thread.join()
        if failures:
            raise failures[0]
        print("done", sum(w.runs for w in workers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
