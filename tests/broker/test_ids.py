# SPDX-License-Identifier: Apache-2.0
"""Ids with generations: a stale one is an error, never somebody else's object."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qnnbroker.broker.ids import IdTable
from qnnbroker.protos.errors import LeaseRevoked, NotFound


def table() -> IdTable[str]:
    return IdTable("thing", "BUFFER_UNKNOWN")


def add(things: IdTable[str], value: str) -> int:
    ids: list[int] = []
    things.add(lambda id: ids.append(id) or value)  # type: ignore[func-returns-value]
    return ids[0]


def test_an_id_finds_its_object() -> None:
    things = table()
    first, second = add(things, "a"), add(things, "b")
    assert (things.get(first), things.get(second)) == ("a", "b")
    assert list(things) == ["a", "b"]
    assert len(things) == 2


def test_a_removed_id_is_stale_even_when_its_place_is_taken() -> None:
    things = table()
    old = add(things, "a")
    assert things.remove(old) == "a"
    with pytest.raises(LeaseRevoked) as gone:
        things.get(old)
    assert gone.value.reason == "STALE_GENERATION"
    new = add(things, "b")
    assert new != old
    assert new & 0xFFFFFFFF == old & 0xFFFFFFFF
    with pytest.raises(LeaseRevoked):
        things.get(old)
    with pytest.raises(LeaseRevoked):
        things.remove(old)
    assert things.get(new) == "b"


@pytest.mark.parametrize("id", [0, 1, 1 << 32, 2 << 32 | 1, 1 << 32 | 2, 2**64 - 1, 2**63])
def test_an_id_that_was_never_given_out_is_not_found(id: int) -> None:
    things = table()
    assert add(things, "a") == 1 << 32 | 1
    with pytest.raises(NotFound) as unknown:
        things.get(id)
    assert unknown.value.reason == "BUFFER_UNKNOWN"
    assert str(id) in str(unknown.value)


def test_the_next_generation_is_not_found_before_it_is_given_out() -> None:
    things = table()
    things.remove(add(things, "a"))
    with pytest.raises(NotFound):
        things.get(2 << 32 | 1)


def test_a_failed_make_leaves_the_table_as_it_was() -> None:
    things = table()
    add(things, "a")

    def fail(id: int) -> str:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        things.add(fail)
    assert list(things) == ["a"]
    assert len(things) == 1
    assert things.get(add(things, "b")) == "b"
    assert len(things) == 2


def test_iteration_may_remove() -> None:
    things = table()
    ids = [add(things, str(n)) for n in range(5)]
    for _, id in zip(things, ids, strict=True):
        things.remove(id)
    assert len(things) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=80))
def test_whatever_is_added_and_removed_ids_are_never_used_twice(
    steps: list[tuple[bool, int]],
) -> None:
    things = table()
    alive: dict[int, str] = {}
    dead: set[int] = set()
    for number, (adding, which) in enumerate(steps):
        if adding or not alive:
            id = add(things, str(number))
            assert id not in alive
            assert id not in dead
            alive[id] = str(number)
        else:
            id = sorted(alive)[which % len(alive)]
            assert things.remove(id) == alive.pop(id)
            dead.add(id)
    assert {id: things.get(id) for id in alive} == alive
    for id in dead:
        with pytest.raises(LeaseRevoked):
            things.get(id)
    assert len(things) == len(alive)
