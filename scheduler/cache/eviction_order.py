"""Which of equal things is given up first: what costs least to make again, and was used longest ago.

Young: On-line file caching, SODA 1998 (GreedyDual). A thing is worth its cost above a floor, when it comes and whenever
it is used; the one of the least worth goes, and its worth is the floor from then on. Of equal costs the one goes that
was used longest ago. What an owner says of its things counts: how often their cost counts, and whether they were kept
alive by others that used something else.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from scheduler.cache.idle_pages import NOBODY

Key = TypeVar("Key", bound=Hashable)


class Owners(Protocol):
    """Who left things. weight_of(owner): how often the cost of its things counts; infinite: they go last. num_favours:
    how often it was kept alive by what others did.
    """

    def weight_of(self, owner: int) -> float: ...

    def num_favours(self, owner: int) -> int: ...


class Alike:
    """Owners of which none counts more than another."""

    def weight_of(self, owner: int) -> float:
        return 1.0

    def num_favours(self, owner: int) -> int:
        return 0


@dataclass(slots=True)
class _Thing:
    cost: float
    owner: int
    floor: float
    num_favours: int


class EvictionOrder(Generic[Key]):
    """Things by key, with their costs and owners, of which `owners` tells at the time of a choice."""

    def __init__(self, owners: Owners | None = None) -> None:
        self.owners: Owners = owners or Alike()
        self._things: dict[Key, _Thing] = {}  # used last last
        self._floor = 0.0

    def put(self, key: Key, cost: float, owner: int = NOBODY) -> None:
        """Take in a thing, or note that it is used."""
        self._things.pop(key, None)
        self._things[key] = _Thing(cost, owner, self._floor, self.owners.num_favours(owner))

    def touch(self, key: Key) -> None:
        """Note that a thing is used."""
        self.put(key, self._things[key].cost, self._things[key].owner)

    def remove(self, key: Key) -> None:
        del self._things[key]

    def pop(self) -> Key:
        """Remove and return what is to go."""
        key = min(self._things, key=lambda key: self._worth(self._things[key]))
        thing = self._things.pop(key)
        worth = self._worth(thing)
        self._floor = max(self._floor, thing.floor + thing.cost if worth == math.inf else worth)
        return key

    def _worth(self, thing: _Thing) -> float:
        num_favours, weight = self.owners.num_favours(thing.owner), self.owners.weight_of(thing.owner)
        if num_favours != thing.num_favours:  # the floor has not risen since: only a choice raises it
            thing.num_favours, thing.floor = num_favours, self._floor
        return math.inf if weight == math.inf else thing.floor + thing.cost * weight
