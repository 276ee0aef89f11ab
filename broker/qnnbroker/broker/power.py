# SPDX-License-Identifier: Apache-2.0
"""Power: which performance mode the broker votes for, by what its sessions want while they work.

The highest mode wanted by a session that has work in flight applies, up to the operator's ceiling.
A higher one applies at once; a lower one only after the higher has not been wanted for a while, so
that the vote does not flap; and none at all after some idle time. What runs never waits for a vote:
the broker votes on a thread of its own. It looks at its sessions a few dozen times a second while a
vote stands, and otherwise not before the executor tells of a submission: an idle broker sleeps.

A vote lives in the DSP. When that restarts, or the machine was suspended, it may be gone: it is
made anew, by a new client of the infrastructure where the old one is refused.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from qnnbroker.protos.errors import InvalidRequest
from qnnbroker.v1 import control_pb2 as pb

from .config import PERF_MODES, BrokerConfig

log = logging.getLogger(__name__)

#: Between two looks: while a vote stands, and while there is work that wants none.
BUSY_SECONDS = 0.025
QUIET_SECONDS = 0.1
#: After a vote that failed: the first pause until the next try, and the longest.
RETRY_SECONDS, RETRY_MAX_SECONDS = 1.0, 60.0
#: The two clocks differ by less while the machine runs.
SUSPENDED_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Vote:
    """What a mode asks of the clocks; the numbers are QNN's."""

    dcvs: bool
    saver: bool
    sleep_latency_us: int
    corner: int
    #: Whether calls to the device are polled for.
    eager: bool = False


#: The modes of ONNX Runtime's QNN provider. "default" is no vote.
VOTES: dict[str, Vote] = {
    "extreme_power_saver": Vote(True, True, 1000, 0x10),
    "low_power_saver": Vote(True, False, 1000, 0x30),
    "power_saver": Vote(True, False, 1000, 0x40),
    "high_power_saver": Vote(True, False, 1000, 0x50),
    "low_balanced": Vote(True, False, 1000, 0x60),
    "balanced": Vote(True, False, 1000, 0x70),
    "high_performance": Vote(False, False, 100, 0x80, eager=True),
    "sustained_high_performance": Vote(False, False, 40, 0xA0, eager=True),
    "burst": Vote(False, False, 40, 0xA0, eager=True),
}


def check_mode(mode: str) -> str:
    """`mode` if it is one, or empty.

    Raises:
        InvalidRequest: says which there are.
    """
    if mode and mode not in PERF_MODES:
        raise InvalidRequest(f"a perf_mode of {', '.join(PERF_MODES)} wanted, found {mode!r}")
    return mode


def rank(mode: str) -> int:
    """Higher is faster; 0 is no vote."""
    return PERF_MODES.index(mode) if mode else 0


class PowerPolicy:
    """Decides; knows nothing of threads and libraries. Times are seconds of any steady clock."""

    def __init__(self, ceiling: str, hold_seconds: float, idle_seconds: float) -> None:
        self.ceiling = ceiling
        self._hold = hold_seconds
        self._idle = idle_seconds
        #: What is voted for; empty for nothing.
        self.mode = ""
        self._wanted_at: dict[str, float] = {}

    def decide(self, wanted: Iterable[str], now: float) -> str:
        """The mode to vote for, given the modes that are wanted at this moment."""
        for mode in wanted:
            capped = min(mode, self.ceiling, key=rank)
            if rank(capped):
                self._wanted_at[capped] = now
        # What is left is wanted now, or was a short time ago: more patience before giving up all.
        alive = {m: t for m, t in self._wanted_at.items() if now - t < self._hold or t == now}
        best = max(alive, key=rank, default="")
        if not best and self.mode:
            last = max(self._wanted_at.values(), default=now - self._idle)
            best = self.mode if now - last < self._idle else ""
        self._wanted_at = {m: t for m, t in self._wanted_at.items() if now - t < self._idle}
        self.mode = best
        return best


def suspended_seconds() -> float:
    """How long this machine was suspended since it started; it is right to some microseconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class PowerPort(Protocol):
    """A client of the performance infrastructure; see `QnnPower`."""

    def vote(
        self,
        *,
        dcvs: bool,
        saver: bool,
        sleep_latency_us: int,
        corner: int,
        rpc_latency_us: int = 0,
        rpc_polling_us: int = 0,
    ) -> None: ...

    def close(self) -> None: ...


class PowerGovernor:
    """Looks, decides, votes. Belongs to the event loop's thread; the calls run on its own thread.

    Args:
        open_port: makes a client of the infrastructure; raises when there is none.
        wanted: the modes of sessions that have worked since it was last asked.
        next_submission: a future that is done with the next submission of anybody.
        emulated: votes are taken without effect.
        suspended: seconds that the machine was suspended so far.
    """

    def __init__(
        self,
        config: BrokerConfig,
        open_port: Callable[[], PowerPort],
        wanted: Callable[[], list[str]],
        next_submission: Callable[[], asyncio.Future[None]],
        *,
        emulated: bool,
        suspended: Callable[[], float] = suspended_seconds,
    ) -> None:
        self._config = config
        self._policy = PowerPolicy(
            config.perf_mode, config.perf_hold_seconds, config.perf_idle_seconds
        )
        self._open_port = open_port
        self._wanted = wanted
        self._next_submission = next_submission
        self._port: PowerPort | None = None
        self._thread = ThreadPoolExecutor(1, "qnnbroker-power")
        self._task: asyncio.Task[None] | None = None
        self._applied = ""
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._suspended = suspended
        self._emulated = "the emulation takes votes and has no clocks" if emulated else ""
        self._problem = ""
        self._retry_at = 0.0
        self._pause = RETRY_SECONDS
        self.votes_total = 0

    def start(self) -> None:
        """Begins, or goes on after `pause`, with what failed before forgotten. Idempotent."""
        if self._task is None:
            self._retry_at, self._pause = 0.0, RETRY_SECONDS
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        slept = self._suspended()
        while True:
            submission = self._next_submission()  # first: what comes while we look is told
            wanted = self._wanted()
            now = time.monotonic()
            mode = self._policy.decide(wanted, now)
            before, slept = slept, self._suspended()
            resumed = bool(self._applied) and slept - before > SUSPENDED_SECONDS
            if resumed:
                log.info("the machine was suspended for %.1f s: voting anew", slept - before)
            if (mode != self._applied or resumed) and now >= self._retry_at:
                await self._apply(mode)
            if self._applied:
                await asyncio.sleep(BUSY_SECONDS)
            elif wanted:
                await asyncio.sleep(QUIET_SECONDS)
            else:
                await asyncio.shield(submission)

    async def _apply(self, mode: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._vote, mode)
        except Exception as error:  # whatever it is, inference goes on without votes
            self._problem = f"no vote: {error}; tried again with work, after {self._pause:g} s"
            first = self._pause == RETRY_SECONDS
            log.log(
                logging.WARNING if first else logging.DEBUG, "voting for %s failed: %s", mode, error
            )
            self._retry_at = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, RETRY_MAX_SECONDS)
            mode = ""
        else:
            self._problem, self._pause = "", RETRY_SECONDS
            self.votes_total += 1
            log.debug("performance mode: %s", mode or "no vote")
        self._account()
        self._applied = mode

    def _vote(self, mode: str) -> None:
        """On the governor's thread."""
        if not mode:
            return self._drop_port()
        if self._port is not None:
            try:
                return self._vote_at(self._port, mode)
            except Exception as error:
                log.info("voting with a new client, the old one is refused: %s", error)
                self._drop_port()
        self._port = self._open_port()
        try:
            self._vote_at(self._port, mode)
        except BaseException:
            self._drop_port()
            raise

    def _drop_port(self) -> None:
        """Its vote goes with it; after a restart of the DSP it is gone already."""
        port, self._port = self._port, None
        if port is not None:
            try:
                port.close()
            except Exception as error:
                log.info("a vote was gone already: %s", error)

    def _vote_at(self, port: PowerPort, mode: str) -> None:
        vote, config = VOTES[mode], self._config
        port.vote(
            dcvs=vote.dcvs,
            saver=vote.saver,
            sleep_latency_us=vote.sleep_latency_us,
            corner=vote.corner,
            rpc_latency_us=config.rpc_latency_us,
            rpc_polling_us=config.rpc_polling_us if vote.eager else 0,
        )

    def _account(self) -> None:
        now = time.monotonic()
        name = self._applied or "none"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def info(self) -> pb.PowerInfo:
        """For status."""
        self._account()
        return pb.PowerInfo(
            mode=self._applied,
            ceiling=self._config.perf_mode,
            seconds=self._seconds,
            votes_total=self.votes_total,
            detail=self._problem or self._emulated,
        )

    async def pause(self) -> None:
        """Takes the vote back and forgets the infrastructure: the backend goes. `start` goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._applied or self._port is not None:
            await self._apply("")

    async def close(self) -> None:
        """Takes the vote back and ends the thread."""
        await self.pause()
        self._thread.shutdown(wait=True)
