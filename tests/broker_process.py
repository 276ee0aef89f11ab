# SPDX-License-Identifier: Apache-2.0
"""A real broker, `python -m qnnbroker.broker`, as a child process of the tests."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tests.waiting import PATIENCE_SECONDS, wait_readable, wait_until

from qnnbroker.broker.config import BrokerConfig
from qnnbroker.native.fake import SWITCHES_ENV, FakeCall, FakeControl, read_record, switches
from qnnbroker.protos.paths import ATTACH_SOCKET, GRPC_SOCKET
from qnnbroker.v1 import control_pb2 as pb
from qnnbroker.v1 import control_pb2_grpc

#: What no broker may write, whatever a client does.
_ACCIDENTS = re.compile(
    r"^\S+ \S+ (ERROR|CRITICAL) (?!qnnbroker\.qnn)|Traceback|^\S*(Error|Warning):"
)
#: Counters that only grow, and what differs for reasons of Python's and gRPC's own.
_NOT_COMPARED = re.compile(r"_total$|^threads$|^resident_executes$")


@dataclass
class BrokerProcess:
    """One broker: its process, its files, and its counters over gRPC."""

    runtime_dir: Path
    process: "subprocess.Popen[bytes]"
    log_path: Path
    output_path: Path
    record_path: Path
    faults: FakeControl | None = None
    _channels: list[grpc.Channel] = field(default_factory=list)
    _totals_before: dict[str, int] = field(default_factory=dict)
    _calls_before: int = 0
    accidents_expected: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def attach_path(self) -> Path:
        return self.runtime_dir / ATTACH_SOCKET

    @property
    def grpc_path(self) -> Path:
        return self.runtime_dir / GRPC_SOCKET

    @property
    def stub(self) -> control_pb2_grpc.ControlServiceStub:
        """gRPC without a session."""
        if not self._channels:
            self._channels.append(grpc.insecure_channel(f"unix:{self.grpc_path}"))
            self._stub = control_pb2_grpc.ControlServiceStub(self._channels[0])
        return self._stub

    def start_afresh(self) -> None:
        """From now on totals and recorded calls are those since now."""
        self._totals_before, self._calls_before = {}, 0
        self._totals_before = {k: v for k, v in self.counters().items() if k.endswith("_total")}
        self._calls_before = len(read_record(self.record_path))

    def counters(self) -> dict[str, int]:
        answer = self.stub.GetStatistics(pb.GetStatisticsRequest(), timeout=PATIENCE_SECONDS)
        return {k: v - self._totals_before.get(k, 0) for k, v in answer.counters.items()}

    def gauges(self) -> dict[str, int]:
        """The counters that must be as before once everybody has gone.

        gRPC opens fds of its own with each connection; those that it has are not ours to count, so
        `open_fds` is without Unix stream sockets.
        """
        values = {k: v for k, v in self.counters().items() if not _NOT_COMPARED.search(k)}
        values["open_fds"] = len(self.fds())
        return values

    def fds(self) -> list[str]:
        """What the broker has open, without gRPC's connections and the record of the fake."""
        names = []
        with open("/proc/net/unix") as f:
            streams = {w[6] for w in map(str.split, f) if w[4] == "0001"}
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                name = os.readlink(f"/proc/{self.pid}/fd/{fd}")
                inode = name.removeprefix("socket:[").removesuffix("]")
                grpcs = name.startswith("socket:[") and inode in streams
                if not grpcs and name != str(self.record_path):
                    names.append(name)
        return sorted(names)

    def wait_counters(self, **wanted: int) -> None:
        """Until the counters have these values."""

        def reached() -> bool:
            found = self.counters()
            return all(found[k] == v for k, v in wanted.items())

        wait_until(reached, f"counters {wanted} of the broker")

    def wait_gauges(self, before: dict[str, int]) -> None:
        """Until every gauge is what it was `before`."""
        last: dict[str, int] = {}

        def back() -> bool:
            last.clear()
            last.update(self.gauges())
            return last == before

        try:
            wait_until(back, "the gauges are where they were")
        except BaseException:
            different = {k: (before.get(k), v) for k, v in last.items() if before.get(k) != v}
            print("gauges (before, after):", different, *self.fds(), sep="\n")
            raise

    def set_faults(self, *words: str, **values: str | int | bool) -> None:
        """Switches of the fake QNN library, from the next call on."""
        assert self.faults is not None
        self.faults.set(*words, **values)

    def calls(self, name: str) -> list[FakeCall]:
        """The calls of that name that the fake QNN library has recorded, as they ended."""
        calls = read_record(self.record_path)[self._calls_before :]
        return [c for c in calls if c.name == name]

    def wait_hanging(self, count: int) -> None:
        """Until so many calls have come to where a fault rule makes them hang."""

        def hanging() -> bool:
            return sum(c.arguments["kind"] == "hang" for c in self.calls("fault")) >= count

        wait_until(hanging, f"{count} calls of the fake hang")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close_channel(self) -> None:
        while self._channels:
            self._channels.pop().close()

    def wait_exit(self, seconds: float = PATIENCE_SECONDS) -> int:
        """The exit code, once it has ended by itself."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(self.log())
            raise

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.close_channel()
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def kill(self) -> None:
        """The way a crash ends it."""
        self.close_channel()
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        """What holds for every broker however it ended: no output, no accident in the log."""
        assert self.output_path.read_bytes() == b""
        if not self.accidents_expected:
            wrong = [line for line in self.log().splitlines() if _ACCIDENTS.search(line)]
            assert wrong == [], self.log()


def spawn_broker(
    runtime_dir: Path,
    folder: Path,
    *,
    switch_words: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    wait_ready: bool = True,
    **config: Any,
) -> BrokerProcess:
    """Starts a broker over the fake QNN library, and waits until it is ready.

    Args:
        runtime_dir: of the sockets; short.
        folder: for its log, its output and the control file of the fake's faults.
        switch_words: of the fake, from the start.
        pass_fds: fds it inherits besides the one that it tells "ready" on.
        wait_ready: False returns at once.
        config: options of BrokerConfig.
    """
    number = len(list(folder.glob("broker-*.log")))
    log, output = folder / f"broker-{number}.log", folder / f"broker-{number}.out"
    faults = FakeControl(folder / f"faults-{number}")
    record = folder / f"record-{number}"
    words = [f"control={faults.path}", f"record={record}", *switch_words]
    ready, theirs = os.pipe()
    try:
        options = {"backend": "fake", "runtime_dir": str(runtime_dir)} | config
        with open(log, "wb") as err, open(output, "wb") as out:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "qnnbroker.broker",
                    BrokerConfig(**options, ready_fd=theirs).to_json(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[theirs, *pass_fds],
                env={**os.environ, SWITCHES_ENV: switches(*words)},
            )
        os.close(theirs)
        theirs = -1
        broker = BrokerProcess(runtime_dir, process, log, output, record, faults)
        if wait_ready:
            try:
                wait_readable(ready, "the broker is ready or has ended")
                said = os.read(ready, 64)
                assert said == b"ready\n", broker.log()
            except BaseException:
                broker.kill()
                raise
        return broker
    finally:
        os.close(ready)
        if theirs >= 0:
            os.close(theirs)


@contextlib.contextmanager
def all_stopped(brokers: list[BrokerProcess]) -> Iterator[None]:
    """Afterwards none of `brokers` runs, and each passed `BrokerProcess.check`."""
    try:
        yield
        for broker in brokers:
            if broker.process.poll() is None:
                assert broker.stop() == 0, broker.log()
            broker.close_channel()
            broker.check()
    finally:
        for broker in brokers:
            if broker.process.poll() is None:
                broker.kill()
