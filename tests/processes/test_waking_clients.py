# SPDX-License-Identifier: Apache-2.0
"""How the broker wakes a client that sleeps, and on which core it works for it."""

import ctypes
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.bound_ring import Bound, MakeBound
from tests.broker_process import BrokerProcess
from tests.raw_ring import BROKER_CORE, CLIENT_CORE, CLIENT_SLEEPS, CQ_TAIL
from tests.waiting import PATIENCE_SECONDS, wait_until

ON_BELL, ON_TAIL = 1, 2
SLEEPS_THERE = 2**31
FUTEX_WAIT = 0
#: Calls of futex(2), by machine.
FUTEX = {"x86_64": 202, "aarch64": 98}


two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")


class Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Napper:
    """A thread that sleeps on the tail of a client's completions."""

    def __init__(self, client: Bound) -> None:
        self.woken = False
        self._value = client.seen(CQ_TAIL)
        self._words = np.frombuffer(client.theirs, np.uint32)
        self._thread = threading.Thread(target=self._nap)
        self._thread.start()

    def _nap(self) -> None:
        word = ctypes.c_void_p(self._words.ctypes.data + CQ_TAIL)
        limit = ctypes.byref(Timespec(int(PATIENCE_SECONDS), 0))
        number = FUTEX[os.uname().machine]
        failed = ctypes.CDLL(None, use_errno=True).syscall(
            number, word, FUTEX_WAIT, self._value, limit, None, 0
        )
        self.woken = not failed
        del self._words

    def end(self) -> None:
        self._thread.join()


def sleeping() -> bool:
    """Some thread of ours sleeps in a futex(2) that other processes could end."""
    for task in os.listdir("/proc/self/task"):
        words = Path(f"/proc/self/task/{task}/syscall").read_text().split()
        if words[0] == str(FUTEX[os.uname().machine]) and int(words[2], 16) == FUTEX_WAIT:
            return True
    return False


def rung(client: Bound, seconds: float) -> bool:
    return bool(select.select([client.bell], [], [], seconds)[0])


@pytest.fixture
def client(make_bound: MakeBound) -> Bound:
    """A client whose bell is silent, after a run."""
    one = make_bound()
    one.check_run()
    while rung(one, 0):
        os.read(one.bell, 512)
    return one


@pytest.mark.parametrize("more", [0, 4, 2**31])
@pytest.mark.parametrize("how", [ON_BELL, ON_TAIL, ON_BELL | ON_TAIL])
def test_a_client_is_woken_as_it_says_that_it_sleeps(client: Bound, how: int, more: int) -> None:
    client.set(CLIENT_SLEEPS, how | more)
    napper = Napper(client) if how & ON_TAIL else None
    if napper is not None:
        wait_until(sleeping, "it sleeps")
    client.submit(client.binding)
    if napper is not None:
        napper.end()
        assert napper.woken
    assert rung(client, PATIENCE_SECONDS if how & ON_BELL else 0) == bool(how & ON_BELL)
    client.take()


@pytest.mark.parametrize("how", [0, 4, 2**32 - 4])
def test_a_client_that_does_not_sleep_is_left_alone(client: Bound, how: int) -> None:
    client.set(CLIENT_SLEEPS, how)
    tail = client.seen(CQ_TAIL)
    client.submit(client.binding)
    wait_until(lambda: client.seen(CQ_TAIL) != tail, "it has run")
    client.set(CLIENT_SLEEPS, ON_BELL)
    client.submit(client.binding)
    assert rung(client, PATIENCE_SECONDS)
    assert os.read(client.bell, 512) == b"\1", "for the second run alone"
    client.take(2)


def broker_may_run_on(broker: BrokerProcess) -> set[frozenset[int]]:
    """The affinities of its threads."""
    tasks = os.listdir(f"/proc/{broker.pid}/task")
    return {frozenset(os.sched_getaffinity(int(task))) for task in tasks}


def other_core(core: int) -> int:
    """1 + the number of one of ours that is not `core`, which is told in the same way."""
    return 1 + min(os.sched_getaffinity(0) - {core - 1})


def moves(client: Bound, says: Callable[[int], int], runs: int) -> int:
    """How often the broker's thread changes its core in so many runs.

    The client `says` where it is, when told where the broker was.
    """
    count = 0
    for _ in range(runs):
        core = client.seen(BROKER_CORE)
        client.set(CLIENT_CORE, says(core))
        client.check_run()
        count += client.seen(BROKER_CORE) != core
    return count


def check_moves(broker: BrokerProcess, client: Bound, says: Callable[[int], int]) -> None:
    """It moves because of what the client says, and may still run where it could."""
    before = broker_may_run_on(broker)
    told = untold = 0

    def moved() -> bool:
        nonlocal told, untold
        told += moves(client, says, 100)
        untold += moves(client, lambda _: 0, 100)
        return told >= 20 and told > 3 * untold  # the kernel moves it too, but seldom

    wait_until(moved, "it moves more often when it is told to", pause=0)
    wait_until(lambda: broker_may_run_on(broker) == before, "as before")


@two_cores
def test_the_broker_leaves_the_core_of_a_client_that_looks(
    shared_broker: BrokerProcess, client: Bound
) -> None:
    check_moves(shared_broker, client, lambda core: core)


@two_cores
def test_the_broker_goes_to_the_core_of_a_client_that_sleeps(
    shared_broker: BrokerProcess, client: Bound
) -> None:
    check_moves(shared_broker, client, lambda core: SLEEPS_THERE | other_core(core))


@pytest.mark.parametrize("core", [2**31, 2**31 + 1, 2**31 + 1025, 2**32 - 1, 1025, 1])
def test_a_core_that_there_is_not_changes_nothing(client: Bound, core: int) -> None:
    client.set(CLIENT_CORE, core)
    for seed in range(20):
        client.check_run(seed)
