"""Choose which entry to evict: the cheapest to recompute, then the least recently used.

Young: On-line file caching, SODA 1998 (GreedyDual). An entry's priority is a floor plus its cost, set when it is added
and at each use. The entry with the lowest priority is evicted, and the floor rises to its priority. Among equal costs
the least recently used entry goes. An owner's weight multiplies the cost of its entries.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from scheduler.cache.idle_pages import NOBODY

Key = TypeVar("Key", bound=Hashable)


class Owners(Protocol):
    """The owners of cached entries. weight_of(owner): the factor of its entries' cost; infinite: they are evicted last.
    num_favours(owner): how often the use of other entries counted as a use of its own.
    """

    def weight_of(self, owner: int) -> float: ...

    def num_favours(self, owner: int) -> int: ...


class EqualOwners:
    """Give every owner the same weight."""

    def weight_of(self, owner: int) -> float:
        return 1.0

    def num_favours(self, owner: int) -> int:
        return 0


@dataclass(slots=True)
class _Entry:
    cost: float
    owner: int
    floor: float
    num_favours: int


class EvictionOrder(Generic[Key]):
    """Hold entries by key with their costs and owners; `owners` is asked when one is evicted."""

    def __init__(self, owners: Owners | None = None) -> None:
        self.owners: Owners = owners or EqualOwners()
        self._things: dict[Key, _Entry] = {}  # the least recently used one first
        self._floor = 0.0

    def put(self, key: Key, cost: float, owner: int = NOBODY) -> None:
        """Add an entry, or note that it is used."""
        self._things.pop(key, None)
        self._things[key] = _Entry(cost, owner, self._floor, self.owners.num_favours(owner))

    def touch(self, key: Key) -> None:
        """Note that an entry is used."""
        self.put(key, self._things[key].cost, self._things[key].owner)

    def remove(self, key: Key) -> None:
        del self._things[key]

    def pop(self) -> Key:
        """Remove and return the key to evict."""
        key = min(self._things, key=lambda key: self._worth(self._things[key]))
        thing = self._things.pop(key)
        worth = self._worth(thing)
        self._floor = max(self._floor, thing.floor + thing.cost if worth == math.inf else worth)
        return key

    def _worth(self, thing: _Entry) -> float:
        num_favours, weight = self.owners.num_favours(thing.owner), self.owners.weight_of(thing.owner)
        if num_favours != thing.num_favours:  # counts as a use; the floor has not risen since, as only `pop` raises it
            thing.num_favours, thing.floor = num_favours, self._floor
        return math.inf if weight == math.inf else thing.floor + thing.cost * weight
