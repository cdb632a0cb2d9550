"""Free pages with a known prefix, by the owner who left them, and the order in which they are evicted.

The owner with the lowest rank goes first. Pages of one owner go in the order in which they came, the last block of a
prefix first. Invariant: a page is evicted before the pages of earlier blocks, unless no such page is left.
"""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import islice
from typing import Protocol

NOBODY = 0


class Ranks(Protocol):
    """The eviction order of owners.

    rank_of(owner): the lowest goes first; NOBODY has the lowest of all. note_evicted(owner): one of its pages is
    evicted. take_lowered(): owners whose rank has fallen since the last call.
    """

    def rank_of(self, owner: int) -> float: ...

    def note_evicted(self, owner: int) -> None: ...

    def take_lowered(self) -> list[int]: ...


class LeastRecent:
    """Ranks for a pool without owners: the least recently used pages go first."""

    def rank_of(self, owner: int) -> float:
        return 0.0

    def note_evicted(self, owner: int) -> None:
        pass

    def take_lowered(self) -> list[int]:
        return []


class IdlePages:
    """Idle pages by owner. `ranks` may change at any time."""

    def __init__(self) -> None:
        self.ranks: Ranks = LeastRecent()
        self._owner_of: dict[int, int] = {}
        self._pages_of: dict[int, OrderedDict[int, None]] = {}  # ordered, since a dict finds its first key by a scan
        self._heap: list[tuple[float, int]] = []  # an entry whose rank has changed is corrected when it comes up

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, page: int) -> bool:
        return page in self._owner_of

    def left_by(self, owner: int) -> list[int]:
        """Return an owner's pages, in the order of their eviction."""
        return list(self._pages_of.get(owner, ()))

    def add(self, page: int, owner: int) -> None:
        self._owner_of[page] = owner
        pages = self._pages_of.get(owner)
        if pages is None:
            pages = self._pages_of[owner] = OrderedDict()
            heappush(self._heap, (self.ranks.rank_of(owner), owner))
        pages[page] = None

    def remove(self, page: int) -> None:
        owner = self._owner_of.pop(page)
        pages = self._pages_of[owner]
        del pages[page]
        if not pages:
            del self._pages_of[owner]

    def lowest(self, most: int, is_last: Callable[[int], bool]) -> list[int]:
        """Return the next pages to evict, at most `most`, all of one owner.

        It is the owner of lowest rank whose first page satisfies `is_last`, or else the owner of lowest rank.
        """
        for owner in self.ranks.take_lowered():
            if owner in self._pages_of:
                heappush(self._heap, (self.ranks.rank_of(owner), owner))
        passed: dict[int, float] = {}
        found = None
        while self._heap and found is None:
            rank, owner = self._heap[0]
            pages, now = self._pages_of.get(owner), self.ranks.rank_of(owner)
            if pages is None or owner in passed:
                heappop(self._heap)
            elif now != rank:
                heapreplace(self._heap, (now, owner))
            elif is_last(next(iter(pages))):
                found = owner
            else:
                passed[owner] = rank
                heappop(self._heap)
        for owner, rank in passed.items():
            heappush(self._heap, (rank, owner))
        owner = next(iter(passed)) if found is None else found
        self.ranks.note_evicted(owner)
        return list(islice(self._pages_of[owner], most))
