# SPDX-License-Identifier: Apache-2.0
"""Signals that reach a thread while it waits for a completion."""

import os
import signal
import threading

import pytest
from tests.native.executor_stage import OK, Hang
from tests.native.ring_stage import RingStage, bare_rings, complete
from tests.waiting import wait_until

from qnnbroker.native.executor import BAND_HIGH
from qnnbroker.native.fake import control_loaded


def test_a_signal_that_raises_cancels_the_run_and_leaves_the_ring_usable(rings: RingStage) -> None:
    control_loaded(concurrency=2)
    hang = Hang()
    _, slow = rings.bind("slow")
    _, name = rings.bind("add", band=BAND_HIGH)
    running = rings.submit(slow)
    hang.wait()

    class Rung(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1])
        timer.start()
        with pytest.raises(Rung):
            rings.client.run(slow)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    wait_until(lambda: rings.stage.stats(rings.session)[0] == 1, "the queued one was cancelled")
    done = rings.client.run(name)
    assert isinstance(done, tuple)
    assert done[0] == OK
    hang.end()
    assert rings.status(running) == OK
    assert rings.client.in_flight == 0


def test_a_signal_during_a_nap_is_handled_at_once() -> None:
    class Rung(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with bare_rings() as (_, client, memory):
            ticket = client.submit(1)
            complete(memory, ticket)
            client.wait(ticket)
            ticket = client.submit(1)
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            with pytest.raises(Rung):
                client.wait(ticket, 20_000_000_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_that_raises_nothing_does_not_end_the_wait(rings: RingStage) -> None:
    hang = Hang()
    _, slow = rings.bind("slow")
    seen: list[int] = []

    def ring(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) == 3:
            control_loaded("clear", "unhang")

    before = signal.signal(signal.SIGUSR1, ring)
    try:

        def poke() -> None:
            hang.wait()
            for _ in range(3):
                count = len(seen)
                os.kill(os.getpid(), signal.SIGUSR1)
                wait_until(lambda count=count: len(seen) > count, "the handler ran")  # type: ignore[misc]

        thread = threading.Thread(target=poke)
        thread.start()
        done = rings.client.run(slow)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(done, tuple)
    assert (done[0], len(seen)) == (OK, 3)
