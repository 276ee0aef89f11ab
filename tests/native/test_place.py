# SPDX-License-Identifier: Apache-2.0
"""Where the leading thread runs and how long it looks: qb_place.c, with a clock of our own."""

from collections.abc import Callable

import pytest
from tests.native.c_program import compiled, said

#: What the client says of its core: it looks there, or it sleeps there.
SLEEPS_THERE = 2**31
SPIN_NS, LOOK_LONGER_NS, MOVE_NS = 10_000, 50_000, 1_000_000
#: How exactly the program looks.
STEP_NS = 100

Place = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    program = compiled(tmp_path_factory.mktemp("place"), "place", ["qb_place.c"])
    return lambda script: [int(line) for line in said(program, *script.split()).split()]


def done(core: int, hint: int, *, woken: bool, short: bool = True) -> str:
    return f"executed {short:d} sleeping {woken:d} completed {core} {hint} {woken:d} "


def test_it_looks_for_ten_microseconds_after_a_short_execute(place: Place) -> None:
    for hint in (0, 2, SLEEPS_THERE | 2):
        (looked,) = place(done(1, hint, woken=False) + "look -1")
        assert abs(looked - SPIN_NS) <= STEP_NS


@pytest.mark.parametrize("hint", [0, 1, 2, SLEEPS_THERE | 1, SLEEPS_THERE | 2])
def test_after_a_long_execute_it_neither_looks_nor_moves(place: Place, hint: int) -> None:
    long = done(1, hint, woken=True, short=False)
    assert place(done(1, 0, woken=False) + "look -1 " + long + "go look -1")[1:] == [0, 0]


@pytest.mark.parametrize("up_ns", [0, 7_000, 30_000])
def test_it_looks_on_until_a_client_that_it_woke_is_up_and_ten_microseconds_more(
    place: Place, up_ns: int
) -> None:
    (looked,) = place(done(1, 2, woken=True) + f"up {up_ns}")
    assert abs(looked - (up_ns + SPIN_NS)) <= 2 * STEP_NS


def test_for_a_client_that_does_not_get_up_it_looks_no_longer_than_fifty_microseconds(
    place: Place,
) -> None:
    (looked,) = place(done(1, 2, woken=True) + "look -1")
    assert abs(looked - LOOK_LONGER_NS) <= STEP_NS


def test_looking_longer_in_vain_takes_a_twentieth_of_the_time_at_most(place: Place) -> None:
    rounds, gap_ns = 4000, 100_000
    looked = place((done(1, 2, woken=True) + f"look -1 pass {gap_ns} ") * rounds)
    longer = sum(ns for ns in looked if ns > SPIN_NS + STEP_NS)
    assert len(looked) == rounds
    whole = sum(looked) + rounds * gap_ns
    assert longer <= whole / 20 + 1_000_000 + LOOK_LONGER_NS
    assert longer >= whole / 40, "it is not given up either"
    assert min(looked) >= SPIN_NS - STEP_NS, "the usual look goes on"


def test_looking_longer_costs_nothing_when_something_comes(place: Place) -> None:
    looked = place((done(1, 2, woken=True) + "look 45000 ") * 1000)
    assert min(looked) >= 45_000


def test_what_runs_in_between_is_not_time_that_was_looked_in_vain(place: Place) -> None:
    # The second one is a call of gRPC: it executes for long, and is not completed in a ring.
    for second in ("executed 1 ", "executed 0 "):
        interrupted = done(1, 2, woken=True) + "pass 2000000000 " + second + "look -1 "
        looked = place(interrupted + done(1, 2, woken=True) + "look -1")
        assert looked[-1] >= LOOK_LONGER_NS


def test_it_does_not_look_longer_while_other_sessions_are_awake(place: Place) -> None:
    (looked,) = place("others 1 " + done(1, 2, woken=True) + "look -1")
    assert abs(looked - SPIN_NS) <= STEP_NS


@pytest.mark.parametrize("woken", [False, True])
def test_on_the_core_of_a_client_that_looks_it_does_not_look_and_goes_away(
    place: Place, woken: bool
) -> None:
    went, looked = place(done(2, 2, woken=woken) + "go look -1")
    assert went in {1, 3}
    assert looked == 0


def test_it_sleeps_at_once_on_the_core_of_a_client_that_sleeps(place: Place) -> None:
    assert place(done(2, SLEEPS_THERE | 2, woken=True) + "go look -1") == [0, 0]


def test_it_goes_to_the_core_of_a_client_that_sleeps(place: Place) -> None:
    assert place(done(1, SLEEPS_THERE | 3, woken=True) + "go look -1") == [3, 0]


@pytest.mark.parametrize("but", ["in_flight 1 ", "others 1 "])
def test_it_does_not_follow_one_of_several(place: Place, but: str) -> None:
    assert place(but + done(1, SLEEPS_THERE | 3, woken=True) + "go") == [0]


def test_it_does_not_follow_a_client_that_is_awake(place: Place) -> None:
    assert place(done(1, SLEEPS_THERE | 3, woken=False) + "go") == [0]


@pytest.mark.parametrize("core", [0, 4, 1024, 1025, SLEEPS_THERE - 1])
def test_it_goes_to_no_core_that_there_is_not(place: Place, core: int) -> None:
    assert place(done(1, SLEEPS_THERE | core, woken=True) + "go") == [0]


def test_it_moves_once_in_a_millisecond_at_most(place: Place) -> None:
    step_ns, rounds = 10_000, 1000
    script = "".join(
        done(1, hint, woken=True) + f"go pass {step_ns} "
        for hint in [1, SLEEPS_THERE | 2] * (rounds // 2)
    )
    moves = sum(core != 0 for core in place(script))
    assert moves == rounds * step_ns // MOVE_NS
