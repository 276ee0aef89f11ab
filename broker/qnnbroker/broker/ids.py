# SPDX-License-Identifier: Apache-2.0
"""Ids that carry a generation, so that a stale one is an error and never somebody else's object."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from qnnbroker.protos.errors import LeaseRevoked, NotFound

T = TypeVar("T")

_INDEX_BITS = 32
_INDEX_MASK = (1 << _INDEX_BITS) - 1


class IdTable(Generic[T]):
    """id -> object. An id is (generation << 32) | (index + 1); indexes are reused, ids are not.

    Args:
        noun: what the objects are called in messages, e.g. "buffer".
        reason: the NotFound reason, e.g. "BUFFER_UNKNOWN".
    """

    def __init__(self, noun: str, reason: str) -> None:
        self._noun = noun
        self._reason = reason
        self._slots: list[tuple[int, T | None]] = []
        self._free: list[int] = []
        self._count = 0

    def add(self, make: Callable[[int], T]) -> T:
        """Stores and returns `make(id)` under a new id."""
        if self._free:
            index = self._free.pop()
            generation = self._slots[index][0]
        else:
            index, generation = len(self._slots), 1
            self._slots.append((generation, None))
        try:
            value = make((generation << _INDEX_BITS) | (index + 1))
        except BaseException:
            self._free.append(index)
            raise
        self._slots[index] = (generation, value)
        self._count += 1
        return value

    def get(self, id: int) -> T:
        """The object of `id`.

        Raises:
            NotFound: no such id was ever given out.
            LeaseRevoked: reason STALE_GENERATION; it was, and the object is gone.
        """
        index, generation = (id & _INDEX_MASK) - 1, id >> _INDEX_BITS
        if not 0 <= index < len(self._slots) or generation < 1:
            raise NotFound(f"no {self._noun} has the id {id}", reason=self._reason, id=id)
        current, value = self._slots[index]
        if generation > current or (generation == current and value is None):
            raise NotFound(f"no {self._noun} has the id {id}", reason=self._reason, id=id)
        if generation < current:
            raise LeaseRevoked(
                f"{self._noun} {id} is gone (released, or its owner closed)",
                reason="STALE_GENERATION",
                id=id,
            )
        assert value is not None
        return value

    def remove(self, id: int) -> T:
        """Takes the object out; the id is stale from now on."""
        value = self.get(id)
        index = (id & _INDEX_MASK) - 1
        self._slots[index] = ((id >> _INDEX_BITS) + 1, None)
        self._free.append(index)
        self._count -= 1
        return value

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return iter([value for _, value in self._slots if value is not None])
