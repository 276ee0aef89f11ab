# SPDX-License-Identifier: Apache-2.0
"""A client of the broker, in a process of its own: functions that a Child is asked to call.

What they make is kept here between calls; a process has one session, one model and its bindings.
Imports are inside functions, since they are measured as well.
"""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qnnbroker.client import Binding, Model, Session

#: For one run: on a busy machine a large model waits long behind others.
_RUN_SECONDS = 600.0
_held: dict[str, Any] = {}


def imports() -> float:
    """ms for importing the client, numpy among it."""
    started = time.perf_counter()
    import qnnbroker.client  # noqa: F401

    return (time.perf_counter() - started) * 1000


def connect(directory: str, **options: Any) -> float:
    """ms until there is a session; `options` are those of `qnnbroker.client.connect`."""
    from qnnbroker.client import connect

    started = time.perf_counter()
    _held["session"] = connect(directory, **options)
    return (time.perf_counter() - started) * 1000


def load(path: str) -> float:
    """ms until the model is loaded."""
    started = time.perf_counter()
    _held["model"] = session().load(path)
    return (time.perf_counter() - started) * 1000


def bind(count: int = 1) -> float:
    """ms until there are `count` bindings of the model's only graph, one of them included in it."""
    started = time.perf_counter()
    _held["bindings"] = [model().graph.bind() for _ in range(count)]
    return (time.perf_counter() - started) * 1000


def run(count: int) -> dict[str, list[int]]:
    """`count` runs, one after the other: ns that each took here, and that it executed."""
    binding: Binding = _held["bindings"][0]
    total, execute = [], []
    for _ in range(count):
        started = time.perf_counter_ns()
        timing = binding.run(timeout=_RUN_SECONDS)
        total.append(time.perf_counter_ns() - started)
        execute.append(timing.execute_ns)
    return {"total_ns": total, "execute_ns": execute}


def attach(directory: str, path: str) -> dict[str, float]:
    """Everything from connecting to the first result, in ms."""
    parts = {"connect": connect(directory), "load": load(path), "bind": bind()}
    first = run(1)
    parts["run"] = first["total_ns"][0] / 1e6
    parts["execute"] = first["execute_ns"][0] / 1e6
    return parts


def stream(start_ns: int, seconds: float, in_flight: int = 1) -> dict[str, list[int]]:
    """Runs for `seconds` from `start_ns` (monotonic) on, with `in_flight` submissions under way.

    Returns when each run ended (ns after `start_ns`), ns that it took, and that it executed. Runs
    that end later do not count.
    """
    time.sleep(max(0.0, (start_ns - time.monotonic_ns()) / 1e9))
    end_ns = start_ns + int(seconds * 1e9)
    results: dict[str, list[int]] = {"ended_ns": [], "total_ns": [], "execute_ns": []}
    (_stream_one if in_flight == 1 else _stream_many)(end_ns, in_flight, results)
    results["ended_ns"] = [at - start_ns for at in results["ended_ns"]]
    return results


def _stream_one(end_ns: int, _: int, results: dict[str, list[int]]) -> None:
    binding: Binding = _held["bindings"][0]
    clock = time.monotonic_ns
    ended, total, execute = results.values()
    now = clock()
    while now < end_ns:
        started = now
        timing = binding.run()
        now = clock()
        if now <= end_ns:
            ended.append(now)
            total.append(now - started)
            execute.append(timing.execute_ns)


def _stream_many(end_ns: int, in_flight: int, results: dict[str, list[int]]) -> None:
    bindings: list[Binding] = _held["bindings"]
    clock = time.monotonic_ns
    ended, total, execute = results.values()
    under_way = [(clock(), bindings[index % len(bindings)].submit()) for index in range(in_flight)]
    turn = in_flight
    while under_way:
        started, submission = under_way.pop(0)
        timing = submission.result()
        now = clock()
        if now <= end_ns:
            ended.append(now)
            total.append(now - started)
            execute.append(timing.execute_ns)
            under_way.append((now, bindings[turn % len(bindings)].submit()))
            turn += 1


def session() -> "Session":
    """This process' session."""
    found: Session = _held["session"]
    return found


def model() -> "Model":
    """This process' model."""
    found: Model = _held["model"]
    return found


def nothing_but_numpy() -> None:
    """What every application of this kind has in memory before it does anything."""
    import numpy  # noqa: F401
