# SPDX-License-Identifier: Apache-2.0
"""The soak: short-lived clients come and go, some of them killed; the broker is as it was before.

    python -m tests.soak [--rounds N] [--seed N] [--backend qnn|fake]

Batches of ten client processes over three models, each doing some rounds of load, run and unload.
After each batch all gauges of the broker must be where they were before the first, and its memory
must not grow once it is warm. Writes `pss.png` and `soak.json` to `build/soak`. Exits with 1 when
something was not given back.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.broker_process import BrokerProcess, spawn_broker
from tests.soak_client import STAGES

import zoo

CLIENTS = 10
ROUNDS_EACH = 1
ROUNDS = 200
#: Of the clients, those that are killed.
KILLED_SHARE = 0.3
#: After a stage that a victim reached, at the latest.
KILL_DELAY_SECONDS = 0.1
#: Of the batches, one in so many, until libraries and allocators have what they keep.
WARM_UP_SHARE = 3
#: Pools of threads (gRPC's, asyncio's) may fill up after the warm-up; a leak of one per client
#: would be far more.
THREAD_SLACK = 5
#: Growth of an idle broker that is warm, over all further batches.
GROWTH_LIMIT_BYTES = 8 << 20
SAMPLE_SECONDS = 0.1
CLIENT_SECONDS = 240
MIB = 1 << 20
ZOO_MODELS = ("silero_vad", "ocr_cls", "blazeface")


class SoakError(AssertionError):
    """Something was not given back, or a client failed."""


class Weight(NamedTuple):
    """What the broker took at a time. All of it depends on who else has the QNN library mapped."""

    seconds: float
    pss_bytes: int
    #: Of that, memory that belongs to no file: heaps, stacks.
    own_bytes: int


@dataclass
class Memory:
    """What the broker took, from the start of the soak."""

    pid: int
    started: float = field(default_factory=time.monotonic)
    #: All the time, and after each batch, when nobody was attached.
    samples: list[Weight] = field(default_factory=list)
    idle: list[Weight] = field(default_factory=list)

    def weigh(self) -> Weight:
        """The memory now."""
        values = {
            line.split()[0]: int(line.split()[1]) * 1024
            for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]
        }
        return Weight(time.monotonic() - self.started, values["Pss:"], values["Pss_Anon:"])

    def growth_bytes(self) -> int:
        """Of its own memory when idle, from the first third after the warm-up to the last."""
        warm = [weight.own_bytes for weight in self.idle[len(self.idle) // WARM_UP_SHARE :]]
        third = max(1, len(warm) // 3)
        return int(median(warm[-third:]) - median(warm[:third]))


@dataclass
class Result:
    """What a soak did and found."""

    seed: int
    memory: Memory
    rounds: int = 0
    clients: int = 0
    killed: int = 0
    #: At which stage the killed ones were.
    killed_after: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    growth_bytes: int = 0
    #: The broker's, after each batch.
    threads: list[int] = field(default_factory=list)
    gauges_before: dict[str, int] = field(default_factory=dict)
    gauges_after: dict[str, int] = field(default_factory=dict)


class Sampler(threading.Thread):
    """Weighs a process all the time; a context manager."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                self._memory.samples.append(self._memory.weigh())
            except OSError:  # it has ended
                return

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


class Client:
    """One client process, and the thread that hears it and may kill it."""

    def __init__(self, broker: BrokerProcess, model: Path, rng: random.Random) -> None:
        self.victim = rng.random() < KILLED_SHARE
        self._last_stage = rng.randrange(2 + (len(STAGES) - 2) * ROUNDS_EACH)
        self._delay = rng.uniform(0, KILL_DELAY_SECONDS)
        self.stages: list[str] = []
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak_client"]
            + [str(broker.runtime_dir), str(model), str(ROUNDS_EACH)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.stages.append(line.strip())
            if self.victim and len(self.stages) > self._last_stage:
                time.sleep(self._delay)
                self._process.kill()

    @property
    def killed(self) -> bool:
        """Whether the kill came before its own end."""
        return self._process.returncode < 0

    def finish(self) -> None:
        """Waits for its end.

        Raises:
            SoakError: it failed.
        """
        try:
            self._process.wait(CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise SoakError(f"a client did not end; it was at {self.stages[-1:]}") from None
        finally:
            self._process.wait()
            self._reader.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            self._errors.close()
        if self._process.returncode and not (self.victim and self.killed):
            raise SoakError(f"a client ended with {self._process.returncode}: {said}")


def soak(broker: BrokerProcess, models: list[Path], rounds: int, seed: int) -> Result:
    """Runs the rounds against `broker`, which nobody else uses.

    Raises:
        SoakError: a client failed.
        Failed (pytest's): a gauge did not come back.
    """
    rng, result = random.Random(seed), Result(seed, Memory(broker.pid))
    result.gauges_before = broker.gauges()
    killed_after: Counter[str] = Counter()
    with Sampler(result.memory):
        while result.rounds < rounds:
            clients = [Client(broker, models[i % len(models)], rng) for i in range(CLIENTS)]
            failures = []
            for client in clients:
                try:
                    client.finish()
                except SoakError as error:
                    failures.append(error)
            if failures:
                raise failures[0]
            killed = [client for client in clients if client.killed]
            killed_after.update(client.stages[-1] for client in killed)
            result.clients += len(clients)
            result.killed += len(killed)
            result.rounds += CLIENTS * ROUNDS_EACH
            broker.wait_gauges(result.gauges_before)
            result.memory.idle.append(result.memory.weigh())
            result.threads.append(broker.counters()["threads"])
    result.killed_after = dict(killed_after)
    result.gauges_after = broker.gauges()
    result.growth_bytes = result.memory.growth_bytes()
    result.seconds = result.memory.idle[-1].seconds
    return result


def check_growth(result: Result) -> None:
    """Whether the broker stayed as large as it was once warm.

    Raises:
        SoakError
    """
    if result.growth_bytes > GROWTH_LIMIT_BYTES:
        raise SoakError(
            f"the idle broker grew by {result.growth_bytes / MIB:.1f} MiB after the warm-up; "
            f"{GROWTH_LIMIT_BYTES / MIB:.0f} are allowed"
        )
    warm = max(result.threads[: 1 + len(result.threads) // WARM_UP_SHARE])
    if result.threads[-1] > warm + THREAD_SLACK:
        raise SoakError(f"{result.threads[-1]} threads of the broker are left, of {warm} once warm")


def plot(result: Result, path: Path) -> None:
    """The broker's memory over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for weights, form, when in (
        (result.memory.samples, "-", "all the time"),
        (result.memory.idle, "o", "after each batch, nobody attached"),
    ):
        seconds = [weight.seconds for weight in weights]
        pss = [weight.pss_bytes / MIB for weight in weights]
        own = [weight.own_bytes / MIB for weight in weights]
        axes.plot(seconds, pss, form, color="tab:blue", label=f"PSS {when}")
        axes.plot(seconds, own, form, color="tab:orange", label=f"of that, no file's, {when}")
    axes.set(xlabel="seconds", ylabel="memory of the broker, MiB", ylim=(0, None))
    axes.set_title(
        f"{result.rounds} rounds by {result.clients} clients, {result.killed} of them killed"
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def fake_models(folder: Path) -> list[Path]:
    """Three binaries of the fake library, of different size and speed."""
    from tests.fake_models import adder

    from qnnbroker.native.fake import write_binary

    made = []
    for number, mib in enumerate((1, 8, 32)):
        slow = adder(f"add{number}", execute_us=1000 * (number + 1))
        graph = replace(slow, weight_bytes=mib * MIB)
        path = folder / f"soak{number}.bin"
        made.append(write_binary(path, [graph], create_us=5000 * mib))
    return made


def main() -> int:
    """The command; 0 if everything was given back."""
    parser = argparse.ArgumentParser(description="Clients come and go, some are killed.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of who is killed when (%(default)s)")
    parser.add_argument("--backend", choices=("qnn", "fake"), default="qnn")
    parser.add_argument("--output", type=Path, default=Path("build/soak"), metavar="DIR")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qb-soak-", dir="/tmp") as name:
        folder = Path(name)
        if arguments.backend == "fake":
            models = fake_models(folder)
        else:
            models = [zoo.compiled(name, print) for name in ZOO_MODELS]
        broker = spawn_broker(folder / "run", folder, backend=arguments.backend)
        try:
            result = soak(broker, models, arguments.rounds, arguments.seed)
            code = broker.stop()
            broker.check()
        except BaseException:
            print(broker.log()[-3000:], file=sys.stderr)
            raise
        finally:
            if broker.process.poll() is None:
                broker.kill()
    (arguments.output / "soak.json").write_text(json.dumps(asdict(result), indent=1))
    plot(result, arguments.output / "pss.png")
    idle = [weight.pss_bytes / MIB for weight in result.memory.idle]
    print(
        f"{result.rounds} rounds by {result.clients} clients in {result.seconds:.0f} s, "
        f"{result.killed} of them killed ({json.dumps(result.killed_after)})\n"
        f"all {len(result.gauges_after)} gauges are where they were, "
        f"{result.threads[0]} to {max(result.threads)} threads\n"
        f"idle broker: {min(idle):.1f} to {max(idle):.1f} MiB (PSS); its own memory has grown by "
        f"{result.growth_bytes / MIB:.1f} MiB after the warm-up\n"
        f"{arguments.output / 'pss.png'}"
    )
    try:
        check_growth(result)
    except SoakError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
