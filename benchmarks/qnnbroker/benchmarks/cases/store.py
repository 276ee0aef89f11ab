# SPDX-License-Identifier: Apache-2.0
"""The context store: what loads cost in time and memory, and what damaged files do to a broker.

A cold load hashes the file and creates the context; it is not tried first, which is a matter of the
first time ever. The file is in the page cache on either side.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from qnnbroker.client import BrokerError, Session, connect

from .. import models
from ..brokers import Broker, broker
from ..mutants import BINARY_NAME, Original, mutants
from ..processes import Child
from ..rows import Mode, Row, Target, against, spread
from ..usage import MIB, cpu_time, memory

ORDER = 60
TARGETS = [
    Target("load_resident_ms", "load of a resident model from a new session, p50", "<=", 5, "ms"),
    Target(
        "load_cold_vs_ort",
        "first load incl. hash, without trial, 122 MB context / in-process session creation",
        "<=",
        1.0,
        use_ratio=True,
    ),
    Target(
        "load_peak_over_steady",
        "memory of the broker, peak during that load / right after it",
        "<=",
        1.1,
        use_ratio=True,
    ),
    Target(
        "second_path_extra_mb", "memory added by the same bytes from another path", "<=", 1, "MiB"
    ),
    Target("mutants_survived", "damaged models survived, of all", ">=", 1.0, use_ratio=True),
    Target(
        "soak_load_growth_mb", "PSS growth over 900 cycles of load, run, unload", "<=", 5, "MiB"
    ),
]
#: Damaged binaries that take longer in their trial are given up.
_TRIAL_SECONDS = 5


def run(mode: Mode) -> list[Row]:
    """Times in ms, memory in MiB."""
    large = models.large(mode)
    rows = _cold(large, mode.pick(1, 2, 7))
    rows += _resident(large, mode.pick(2, 10, 50))
    rows += _beside(large, mode.pick(0.5, 2.0, 20.0))
    rows += _cpu(large, mode.pick(1, 1, 10))
    rows += _mutants(mode.pick(20, 30, 500))
    return rows + _soak(*mode.pick((2, 4), (10, 60), (100, 1000)))


def _cold(model: models.RealModel, rounds: int) -> list[Row]:
    """First loads of fresh brokers, and sessions of fresh processes."""
    ours, theirs, peaks, steady = [], [], [], []
    for _ in range(rounds):
        with Child() as child:
            child.ask("inprocess:imports")
            theirs.append(child.ask("inprocess:create", wrapper=str(model.wrapper)))
        with broker("qnn", verify="never") as where, Child() as child:
            child.ask("clients:connect", directory=str(where.directory))
            with _peak(where.pid) as peak:
                ours.append(child.ask("clients:load", path=str(model.wrapper)))
                steady.append(_own_mib(where.pid))
            peaks.append(peak())
    case = f"{model.label}, first load"
    created = Row(f"{model.label}, ONNX Runtime: session creation", "p50", median(theirs), "ms")
    loaded = Row(case, "p50", median(ours), "ms").against(created).decides("load_cold_vs_ort")
    after = Row(f"{case}: broker right after it", "anonymous + shared", median(steady), "MiB")
    during = Row(f"{case}: broker during it", "peak", median(peaks), "MiB").against(after)
    return [created, loaded, after, during.decides("load_peak_over_steady")]


def _resident(model: models.RealModel, count: int) -> list[Row]:
    """Loads of what is there already, each by a session of its own; then from another path."""
    with broker("qnn") as where, Child() as child:
        with connect(where.directory) as holder, tempfile.TemporaryDirectory() as other:
            holder.load(model.wrapper)
            times = []
            for _ in range(count):
                with connect(where.directory) as session:
                    child.ask("clients:connect", directory=str(where.directory))
                    times.append(child.ask("clients:load", path=str(model.wrapper)))
                    session.load(model.wrapper)
            rows = spread(f"{model.label}, resident, from a new session", times, "ms")
            readings = [_own_mib(where.pid)]
            for number in (2, 3):  # the second path may be the first that is hashed in a thread
                folder = Path(other) / str(number)
                folder.mkdir()
                for part in (model.wrapper, model.binary):
                    shutil.copy(part, folder)
                if not holder.load(folder / model.wrapper.name).shared:
                    raise RuntimeError("the same bytes from another path were loaded again")
                readings.append(_own_mib(where.pid))
    case = f"{model.label}, from another path"
    extra = Row(case, "memory added by the second", readings[1] - readings[0], "MiB")
    third = Row(case, "memory added by the third", readings[2] - readings[1], "MiB")
    return [
        rows[0].decides("load_resident_ms"),
        rows[1],
        extra.decides("second_path_extra_mb"),
        third,
    ]


def _beside(model: models.RealModel, seconds: float) -> list[Row]:
    """Runs of another client, alone and while the large context is loaded over and over."""
    small = models.graph("conv")
    with (
        broker("qnn", verify="never") as where,
        Child() as child,
        connect(where.directory) as loader,
    ):
        child.ask("clients:attach", directory=str(where.directory), path=str(small.wrapper))
        child.ask("clients:run", count=20)
        alone = child.ask("clients:stream", start_ns=time.monotonic_ns(), seconds=seconds)
        child.send("clients:stream", start_ns=time.monotonic_ns(), seconds=seconds)
        end, loads = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            loader.load(model.wrapper).unload()
            loads += 1
        loaded = child.receive()
    case = f"a 1.2 ms graph of another client, while a {model.label} is loaded again and again"
    quiet = "a 1.2 ms graph of a client, nothing loads"
    before = spread(quiet, alone["total_ns"], "ms", scale=1e-6)
    during = spread(case, loaded["total_ns"], "ms", scale=1e-6)
    rates = [len(times["total_ns"]) / seconds for times in (alone, loaded)]
    rate = Row(quiet, "runs per second", rates[0], "1/s")
    return [
        *before,
        rate,
        *against(during, before),
        Row(case, "runs per second", rates[1], "1/s").against(rate),
        Row(case, "loads", loads, ""),
    ]


def _cpu(model: models.RealModel, count: int) -> list[Row]:
    """CPU time that a load takes from everybody else: the first ever, and later ones."""
    label = f"{model.label}, CPU of"
    tried, trials, later = list[float](), list[float](), list[float]()
    for _ in range(count):
        with (
            tempfile.TemporaryDirectory() as verdicts,
            broker("qnn", verdict_dir=verdicts) as where,
            connect(where.directory) as session,
        ):
            for own, others in ((tried, trials), (later, [])):
                before = cpu_time(where.pid)
                session.load(model.wrapper).unload()
                _wait_freed(where, session)
                after = cpu_time(where.pid)
                own.append((after.own_ns - before.own_ns) / 1e6)
                others.append((after.children_ns - before.children_ns) / 1e6)
    again = Row(f"{label} a load and unload, hash and verdict known", "p50", median(later), "ms")
    first = Row(f"{label} the first load ever and unload", "p50", median(tried), "ms")
    trial = Row(f"{label} the process that tries it first", "p50", median(trials), "ms")
    return [again, first.against(again), trial.against(again)]


def _mutants(count: int) -> list[Row]:
    """Damaged models, one after the other, beside a client that goes on working."""
    survived = refused = 0
    with (
        _original() as (original, scratch),
        broker("qnn", trial_seconds=_TRIAL_SECONDS, verdict_dir=str(scratch / "v")) as where,
        connect(where.directory) as bystander,
        connect(where.directory) as session,
    ):
        check = _steady_result(bystander)
        check()
        before = memory(where.pid).pss_bytes / MIB
        for mutant in mutants(original, count, scratch):
            try:
                session.load(mutant.path).unload()
            except BrokerError:
                refused += 1
            if session.server_info().pid != where.pid or not check():
                break
            survived += 1
        growth = memory(where.pid).pss_bytes / MIB - before
    case = f"{count} damaged models"
    return [
        Row(case, "refused", refused, ""),
        Row(case, "PSS growth", growth, "MiB"),
        Row(
            case,
            "survived",
            survived,
            "",
            vs="all of them",
            vs_value=count,
            ratio=survived / count,
            target="mutants_survived",
        ),
    ]


def _steady_result(session: Session) -> Callable[[], bool]:
    """Runs a model of the session's, and says whether the result is what it was at first."""
    model = session.load(models.graph("conv").wrapper)
    binding = model.graph.bind()
    inside, outside = binding.arrays()
    for array in inside.values():
        array[...] = 1
    binding.run()
    first = {name: array.copy() for name, array in outside.items()}

    def same() -> bool:
        binding.run()
        return all((array == first[name]).all() for name, array in outside.items())

    return same


@contextlib.contextmanager
def _original() -> Iterator[tuple[Original, Path]]:
    """A sound small model to damage, under the names that mutants have, and room for them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "original"
        folder.mkdir()
        shutil.copy(models.graph("cnn").binary, folder / BINARY_NAME)
        command = [sys.executable, "-P", "-m", "qnnbroker.cli.main", "wrap"]
        wrapper = folder / BINARY_NAME.replace("_qnn.bin", ".onnx")
        subprocess.run(
            [*command, str(folder / BINARY_NAME), "--output", str(wrapper)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield Original(folder, models.graph("dense").binary.read_bytes()), Path(name)


def _soak(start: int, end: int) -> list[Row]:
    """Load, run and unload several models, over and over; one at a time, so none stays.

    Medians of some ten readings each: now and then a broker has just given back what loads leave
    in its heap, tens of MiB of which the next load takes again.
    """
    wrappers = [models.graph(name).wrapper for name in ("gather", "conv", "cnn")]
    readings: dict[int, list[float]] = {start: [], end: []}
    step = max(1, start // 20)
    with broker("qnn", verify="never") as where, connect(where.directory) as session:
        for cycle in range(1, end + 1):
            for wrapper in wrappers:
                with session.load(wrapper) as model, model.graph.bind() as binding:
                    binding.run()
            for last, seen in readings.items():
                if last - start // 2 < cycle <= last and cycle % step == 0:
                    _wait_freed(where, session)
                    seen.append(memory(where.pid).pss_bytes / MIB)
    before, after = (median(seen) for seen in readings.values())
    case = f"cycles {start} to {end} of load, run, unload over {len(wrappers)} models"
    growth = Row(case, "PSS growth", after - before, "MiB")
    return [
        Row(f"after {start} cycles", "PSS", before, "MiB"),
        growth.decides("soak_load_growth_mb"),
    ]


def _wait_freed(where: Broker, session: Session) -> None:
    """Until no context is being freed any more."""
    while True:
        counters = session.statistics().counters
        if not counters["contexts"] and not counters["contexts_closing"]:
            return


def _own_mib(pid: int) -> float:
    """Anonymous and shared memory of a process: what is not a page of some file."""
    total = 0
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total / MIB


@contextlib.contextmanager
def _peak(pid: int) -> Iterator[Callable[[], float]]:
    """Looks at `_own_mib` all the time in the block; gives the largest that was seen."""
    stop, seen = threading.Event(), [_own_mib(pid)]

    def look() -> None:
        while not stop.wait(0.001):
            seen.append(_own_mib(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: max(seen)
    finally:
        stop.set()
        thread.join()
