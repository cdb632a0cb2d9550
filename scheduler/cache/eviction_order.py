"""Which of equal things is given up first: what costs least to make again, and was used longest ago.

Young: On-line file caching, SODA 1998 (GreedyDual). A thing is worth its cost above a floor, when it comes and whenever
it is used; the one of the least worth goes, and its worth is the floor from then on. Of equal costs the one goes that
was used longest ago.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionOrder(Generic[Key]):
    """Things by key, with their costs."""

    def __init__(self) -> None:
        self._worth: dict[Key, float] = {}  # used last last
        self._costs: dict[Key, float] = {}
        self._floor = 0.0

    def put(self, key: Key, cost: float) -> None:
        """Take in a thing, or note that it is used."""
        self._worth.pop(key, None)
        self._costs[key], self._worth[key] = cost, self._floor + cost

    def touch(self, key: Key) -> None:
        """Note that a thing is used."""
        self.put(key, self._costs[key])

    def remove(self, key: Key) -> None:
        del self._worth[key], self._costs[key]

    def pop(self) -> Key:
        """Remove and return what is to go."""
        key = min(self._worth, key=self._worth.__getitem__)
        self._floor = self._worth[key]
        self.remove(key)
        return key
