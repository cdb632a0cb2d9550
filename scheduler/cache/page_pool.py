"""KV pages on the device: who holds which, and which of them hold a known prefix.

A page is held by sequences (counted) or free. A free page whose content is published under a block hash can be found
until it is needed for something else, what is worth least first (`IdlePages`). Where the host gives memory on demand
(`Memory`), a page that is not there yet is taken before a known prefix is evicted. Invariants: every page is in exactly
one of held, `idle` (free, published) and `blank` (free, content unknown); a block is published only as long as the
block before it is, so the number of known blocks of a prompt is found without looking at each.
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
    """Return how many of the first `end` hashes `has` holds for; it holds for those in front of one that it holds for.

    Two looks if it is still `near`, at most `end`, and a binary search else.
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
    """The pages of a prompt's first blocks, in the two forms in which they are wanted: int64 `[blocks]` and a list."""

    array: np.ndarray
    page_ids: list[int]


class Memory(Protocol):
    """How pages, or windows, come to be there on a host that gives memory as it is asked.

    commit(begin, end): whether those of these numbers are there from now on. `least_rows`: how many are worth it.
    """

    @property
    def least_rows(self) -> int: ...

    def commit(self, begin: int, end: int) -> bool: ...


def commit_more(memory: Memory, num_there: int, num_all: int, counts: Sequence[int]) -> int:
    """Return how many of `num_all` are there once the first of these counts that can be had is, beside `num_there`."""
    for count in counts:
        end = min(num_all, num_there + count)
        if num_there < end and memory.commit(num_there, end):
            return end
    return num_there


_NO_PREFIX = PrefixPages(np.zeros(0, np.int64), [])


class PagePool:
    """Allocation and the prefix cache over page ids `[first_page, first_page + num_pages)`. memory: how these come
    to be there, the first ones first; None: all are. `is_refused`: fewer came than were asked for last.
    """

    def __init__(self, first_page: int, num_pages: int, prefix_cache: bool,
                 memory: Memory | None = None) -> None:  # fmt: skip
        self.num_pages = num_pages
        self.is_refused = False
        self.events: BlockEvents | None = None  # who is told what is published
        self._memory = memory
        self.num_committed = num_pages if memory is None else 0  # pages whose memory the host has given
        self.prefix_cache = prefix_cache
        self._first_page = first_page
        self._holders = np.zeros(num_pages, np.int32)
        self._blank: deque[int] = deque(range(first_page, first_page + self.num_committed))
        self.idle = IdlePages()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._before: dict[bytes, bytes | None] = {}  # of a published block, the one in front of it
        self._num_behind: dict[bytes, int] = {}  # published blocks right behind one, where there are any
        self._twins: dict[bytes, int] = {}  # a held page with a block that is published in another
        self._twin_of: dict[int, bytes] = {}
        self._prefixes: dict[bytes, PrefixPages] = {}  # those that were asked for, by their last blocks

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
        """Have so many free pages, as far as the host gives memory; those with a known prefix are the last to count."""
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
        """Allocate `count` pages of unknown content, held once. The caller has checked `num_available`."""
        assert count <= self.num_available, f"pages: asked {count}, have {self.num_available}"
        while len(self._blank) < count:
            self._evict(count - len(self._blank))
        pages = [self._blank.popleft() for _ in range(count)]
        self._holders[np.array(pages, np.int64) - self._first_page] = 1
        return pages

    def hold(self, pages: list[int] | np.ndarray) -> None:
        """Add one holder to each of these pages, which are known or held, and all different."""
        places = np.asarray(pages, np.int64) - self._first_page
        for place in places[self._holders[places] == 0].tolist():
            self.idle.remove(place + self._first_page)
        self._holders[places] += 1

    def release(self, pages: list[int], owner: int = NOBODY) -> None:
        """Remove one holder of each; who held it last is its owner. Last blocks are evicted first, so that prefixes
        outlive their branches.
        """
        places = np.array(pages[::-1], np.int64) - self._first_page
        self._holders[places] -= 1
        for place in places[self._holders[places] == 0].tolist():
            self._free_page(place + self._first_page, owner)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def count_known(self, hashes: list[bytes], near: int, end: int) -> int:
        """Return how many of the first `end` blocks are published: all in front of one that is.

        Two looks if it is still `near`, the last count.
        """
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
        """Return how many of the first `end` blocks, which are published, are in pages that somebody holds.

        Whoever holds one holds those in front. It may be short where three sequences have computed the same block.
        """
        return count_front(hashes, self._is_held, near, end)

    def prefix_pages(self, hashes: list[bytes], count: int) -> PrefixPages:
        """Return the pages of the first `count` blocks, which are published; they are not held, and not to be
        changed.
        """
        if not count:
            return _NO_PREFIX
        front = self._prefixes.get(hashes[count - 1])
        if front is None:
            page_ids = list(map(self._page_of.__getitem__, hashes[:count]))
            front = PrefixPages(np.array(page_ids, np.int64), page_ids)
            if len(self._prefixes) == _MOST_PREFIXES:
                self._prefixes.clear()
            self._prefixes[hashes[count - 1]] = front
        return front

    def find_pages(self, hashes: Sequence[bytes]) -> list[int] | None:
        """Return the pages of blocks that are all published; None: one is not, any more."""
        pages = [self._page_of.get(digest) for digest in hashes]
        found = [page for page in pages if page is not None]
        return found if len(found) == len(pages) else None

    def publish(self, hashes: list[bytes], pages: list[int], begin: int, end: int) -> None:
        """Publish a prompt's final blocks `[begin, end)`, if the one before them is known; `pages` are those of all."""
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
        """Take back what is published by this hash, if anything, and with it all that is behind it."""
        if digest in self._page_of:
            for one in self._all_behind(digest) if digest in self._num_behind else [digest]:
                self._forget(one)

    def forget(self, hashes: list[bytes]) -> None:
        """Take back the blocks at the end of this front that nobody holds, and behind which nothing else stands."""
        for digest in reversed(hashes[: self.count_known(hashes, 0, len(hashes))]):
            if digest in self._num_behind or self._is_held(digest):
                return
            self._forget(digest)

    def forget_left_by(self, owner: int) -> None:
        """Take back the idle blocks that an owner left and behind which nothing else stands."""
        for page in self.idle.left_by(owner):  # ends of prefixes before what is in front of them
            if self._is_last(page):
                self._forget(self._hash_of[page])

    def _publish(self, digest: bytes, before: bytes | None, page: int) -> None:
        """Publish one block, unless its page has another or the one `before` it is not known."""
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
        """Take back what the owner of lowest rank left, up to so many blocks: the first, and more behind which nothing
        stands.
        """
        pages = self.idle.lowest(most, self._is_last)
        self.retract(self._hash_of[pages[0]])
        for page in pages[1:]:
            if page in self.idle:  # else it stood behind the first
                if not self._is_last(page):
                    return
                self._forget(self._hash_of[page])

    def _is_last(self, page: int) -> bool:
        """Return whether nothing that is published stands behind the block of an idle page."""
        return self._hash_of[page] not in self._num_behind

    def _free_page(self, page: int, owner: int) -> None:
        """Free a page that nobody holds any more."""
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
        """Return a published block and all that are behind it: by a scan, since what is evicted has nothing
        behind it.
        """
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
