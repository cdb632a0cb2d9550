"""Allocate KV pages on the device, count their holders, and find pages by the hash of their prefix.

A page is free, or held by one or more sequences. A free page whose content is published under a block hash can be found
until the page is needed; the least valuable are evicted first (`IdlePages`). If the host gives memory on demand
(`Memory`), new pages are allocated before a known prefix is evicted.

Invariants: every page is in exactly one of held, `idle` (free and published) and `blank` (free, content unknown). A
block is published only while the block before it is, so a binary search finds how many blocks of a prompt are known.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.block_changes import GPU
from scheduler.cache.block_events import BlockEvents
from scheduler.cache.idle_pages import NOBODY, IdlePages

_MOST_PREFIXES = 16  # remembered fronts


def count_front(hashes: list[bytes], has: Callable[[bytes], bool], near: int, end: int) -> int:
    """Count the first hashes, of `end`, for which `has` is true. It must be false for all after the first false one.

    It takes two calls if the count is still `near` (at most `end`), and a binary search otherwise.
    """
    low, high = 0, end
    if near and not has(hashes[near - 1]):
        high = near - 1
    elif near == end or not has(hashes[near]):
        return near
    else:
        low = near + 1
    while low < high:
        middle = (low + high) // 2
        if has(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class PrefixPages:
    """The pages of a prompt's first blocks, in both forms that callers need: an int64 array `[blocks]` and a tuple."""

    array: np.ndarray
    page_ids: tuple[int, ...]


class Memory(Protocol):
    """Allocates pages or windows on demand.

    commit(begin, end): allocate those with these numbers; False if the host has no memory. least_rows: the fewest
    that are worth a call.
    """

    @property
    def least_rows(self) -> int: ...

    def commit(self, begin: int, end: int) -> bool: ...


def commit_more(memory: Memory, num_there: int, num_all: int, counts: Sequence[int]) -> int:
    """Allocate the first of these counts that the host can give, beyond `num_there`; return how many there are then."""
    for count in counts:
        end = min(num_all, num_there + count)
        if num_there < end and memory.commit(num_there, end):
            return end
    return num_there


_NO_PREFIX = PrefixPages(np.zeros(0, np.int64), ())


class PagePool:
    """Allocation and the prefix cache over page ids `[first_page, first_page + num_pages)`.

    memory: allocates pages on demand, in order; None: all are allocated. is_refused: the host gave fewer pages than
    `reach` last asked for.
    """

    def __init__(self, first_page: int, num_pages: int, prefix_cache: bool,
                 memory: Memory | None = None) -> None:  # fmt: skip
        self.num_pages = num_pages
        self.is_refused = False
        self.events: BlockEvents | None = None  # records what is published
        self._memory = memory
        self.num_committed = num_pages if memory is None else 0  # pages whose memory the host has given
        self.prefix_cache = prefix_cache
        self._first_page = first_page
        self._holders = np.zeros(num_pages, np.int32)
        self._blank: deque[int] = deque(range(first_page, first_page + self.num_committed))
        self.idle = IdlePages()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._before: dict[bytes, bytes | None] = {}  # for a published block, the one before it
        self._num_behind: dict[bytes, int] = {}  # for a published block, how many directly follow it, if any do
        self._twins: dict[bytes, int] = {}  # for a published block, a held page with the same content
        self._twin_of: dict[int, bytes] = {}
        self._prefixes: dict[bytes, PrefixPages] = {}  # recently used ones, by their last blocks

    @property
    def num_available(self) -> int:
        return len(self._blank) + len(self.idle)

    @property
    def num_held(self) -> int:
        return self.num_committed - self.num_available

    @property
    def num_idle(self) -> int:
        return len(self.idle)

    def num_holders(self, page: int) -> int:
        return int(self._holders[page - self._first_page])

    def reach(self, count: int) -> None:
        """Make `count` pages free by allocating more, or by counting those with a known prefix if memory is short."""
        self.is_refused = False
        num_short = count - len(self._blank)
        if self._memory is None or num_short <= 0:
            return
        before, first = self.num_committed, self._first_page
        counts = max(num_short, self._memory.least_rows), num_short, count - self.num_available
        self.num_committed = commit_more(self._memory, before, self.num_pages, counts)
        self._blank.extend(range(first + before, first + self.num_committed))
        self.is_refused = self.num_available < count and self.num_committed < self.num_pages

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages of unknown content with one holder. The caller must have checked `num_available`."""
        assert count <= self.num_available, f"pages: asked {count}, have {self.num_available}"
        while len(self._blank) < count:
            self._evict(count - len(self._blank))
        pages = [self._blank.popleft() for _ in range(count)]
        self._holders[np.array(pages, np.int64) - self._first_page] = 1
        return pages

    def hold(self, pages: list[int] | np.ndarray) -> None:
        """Add one holder to each of these pages. They must be published or held, and all different."""
        places = np.asarray(pages, np.int64) - self._first_page
        for place in places[self._holders[places] == 0].tolist():
            self.idle.remove(place + self._first_page)
        self._holders[places] += 1

    def release(self, pages: list[int], owner: int = NOBODY) -> None:
        """Remove one holder of each page. Whoever held a page last becomes its owner.

        The last blocks of a prompt are evicted first, so that shared prefixes are kept longest.
        """
        places = np.array(pages[::-1], np.int64) - self._first_page
        self._holders[places] -= 1
        for place in places[self._holders[places] == 0].tolist():
            self._free_page(place + self._first_page, owner)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def count_known(self, hashes: list[bytes], near: int, end: int) -> int:
        """Count the first blocks, of `end`, that are published. near: the last count, which is checked first."""
        page_of = self._page_of
        if (not near or hashes[near - 1] in page_of) and (near == end or hashes[near] not in page_of):
            return near
        return count_front(hashes, page_of.__contains__, near, end)

    def is_known(self, digest: bytes | None) -> bool:
        """Return whether a block is published by this hash."""
        return digest in self._page_of

    def page_of(self, digest: bytes) -> int:
        """Return the page of a published block."""
        return self._page_of[digest]

    def count_held(self, hashes: list[bytes], near: int, end: int) -> int:
        """Count the first blocks, of `end` published ones, whose pages are held.

        A sequence that holds a block's page also holds those before it. The count may be too low if three sequences
        have computed the same block.
        """
        return count_front(hashes, self._is_held, near, end)

    def prefix_pages(self, hashes: list[bytes], count: int) -> PrefixPages:
        """Return the pages of the first `count` blocks, which must be published. They get no
        holder.
        """
        if not count:
            return _NO_PREFIX
        front = self._prefixes.get(hashes[count - 1])
        if front is None:
            page_ids = tuple(map(self._page_of.__getitem__, hashes[:count]))
            front = PrefixPages(np.array(page_ids, np.int64), page_ids)
            if len(self._prefixes) == _MOST_PREFIXES:
                self._prefixes.clear()
            self._prefixes[hashes[count - 1]] = front
        return front

    def find_pages(self, hashes: Sequence[bytes]) -> list[int] | None:
        """Return the pages of these blocks; None if one is no longer published."""
        pages = [self._page_of.get(digest) for digest in hashes]
        found = [page for page in pages if page is not None]
        return found if len(found) == len(pages) else None

    def publish(self, hashes: list[bytes], pages: list[int], begin: int, end: int) -> None:
        """Publish a prompt's final blocks `[begin, end)`, if the block before them is. pages: of all its blocks."""
        before = hashes[begin - 1] if begin else None
        if not self.prefix_cache or begin >= end or (before is not None and before not in self._page_of):
            return
        new, places = hashes[begin:end], pages[begin:end]
        fronts = [before, *new[:-1]]
        if new[0] in self._page_of or not self._hash_of.keys().isdisjoint(places):
            for digest, front, page in zip(new, fronts, places, strict=True):
                self._publish(digest, front, page)
            return
        self._page_of.update(zip(new, places, strict=True))
        self._hash_of.update(zip(places, new, strict=True))
        self._before.update(zip(new, fronts, strict=True))
        self._num_behind.update(dict.fromkeys(new[:-1], 1))
        if before is not None:
            self._num_behind[before] = self._num_behind.get(before, 0) + 1
        if self.events is not None:
            self.events.add(GPU, new)

    def retract(self, digest: bytes) -> None:
        """Withdraw the block with this hash, if it is published, and all blocks that follow it."""
        if digest in self._page_of:
            for one in self._all_behind(digest) if digest in self._num_behind else [digest]:
                self._forget(one)

    def forget(self, hashes: list[bytes]) -> None:
        """Withdraw this prefix's last blocks, as many as are not held and have no other blocks after them."""
        for digest in reversed(hashes[: self.count_known(hashes, 0, len(hashes))]):
            if digest in self._num_behind or self._is_held(digest):
                return
            self._forget(digest)

    def forget_left_by(self, owner: int) -> None:
        """Withdraw the idle blocks that an owner left, unless other blocks follow them."""
        for page in self.idle.left_by(owner):  # last blocks first
            if self._is_last(page):
                self._forget(self._hash_of[page])

    def _publish(self, digest: bytes, before: bytes | None, page: int) -> None:
        """Publish one block, unless its page has another block or the block `before` it is not published."""
        if page in self._hash_of or (before is not None and before not in self._page_of):
            return
        if digest in self._page_of:
            if digest not in self._twins and page not in self._twin_of:
                self._twins[digest], self._twin_of[page] = page, digest
            return
        self._page_of[digest] = page
        self._hash_of[page] = digest
        self._before[digest] = before
        if before is not None:
            self._num_behind[before] = self._num_behind.get(before, 0) + 1
        if self.events is not None:
            self.events.add(GPU, (digest,))

    def _is_held(self, digest: bytes) -> bool:
        return bool(self._holders[self._page_of[digest] - self._first_page])

    def _evict(self, most: int) -> None:
        """Withdraw up to `most` idle blocks of the owner with the lowest rank, last blocks of prefixes first."""
        pages = self.idle.lowest(most, self._is_last)
        self.retract(self._hash_of[pages[0]])
        for page in pages[1:]:
            if page in self.idle:  # else it followed the first, and is gone
                if not self._is_last(page):
                    return
                self._forget(self._hash_of[page])

    def _is_last(self, page: int) -> bool:
        """Return whether no published block follows that of this idle page."""
        return self._hash_of[page] not in self._num_behind

    def _free_page(self, page: int, owner: int) -> None:
        """Free a page that has no holder any more."""
        digest = self._hash_of.get(page)
        twin = None if digest is None else self._twins.get(digest)
        if digest is None:
            self._drop_twin(page)
            self._blank.append(page)
        elif twin is None:
            self.idle.add(page, owner)
        else:
            self._drop_twin(twin)
            del self._hash_of[page]
            self._hash_of[twin], self._page_of[digest] = digest, twin
            self._prefixes.clear()
            self._blank.append(page)

    def _drop_twin(self, page: int) -> None:
        digest = self._twin_of.pop(page, None)
        if digest is not None:
            del self._twins[digest]

    def _all_behind(self, digest: bytes) -> list[bytes]:
        """Return a published block and all that follow it, by a scan. This is rare, as evicted blocks come last."""
        behind: dict[bytes | None, list[bytes]] = {}
        for one, before in self._before.items():
            behind.setdefault(before, []).append(one)
        found = [digest]
        for one in found:
            found += behind.get(one, [])
        return found

    def _forget(self, digest: bytes) -> None:
        before = self._before.pop(digest)
        if before is not None:
            if self._num_behind[before] == 1:
                del self._num_behind[before]
            else:
                self._num_behind[before] -= 1
        if digest in self._twins:
            self._drop_twin(self._twins[digest])
        self._prefixes.pop(digest, None)
        if self.events is not None:
            self.events.remove(GPU, (digest,))
        page = self._page_of.pop(digest)
        del self._hash_of[page]
        if page in self.idle:
            self.idle.remove(page)
            self._blank.append(page)
