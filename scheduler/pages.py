"""Who holds which KV page, and which pages hold a known prefix. Knows ids and hashes; never sees a tensor.

A page is held by sequences (counted), or free. A free page whose content is published under a block hash stays findable
until it is needed for something else: least recently used first. Invariant: every page is in exactly one of `held`,
`idle` (free, published) and `blank` (free, content unknown).
"""

from collections import OrderedDict, deque
from hashlib import blake2b

import numpy as np


def extend_hashes(hashes: list[bytes], token_ids: list[int], page_tokens: int, seed: bytes) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it lacks; each covers all tokens to its end.

    `seed` (at most 64 bytes) names the model and what produced the KV, so that KV of another making never matches.
    """
    for block in range(len(hashes), len(token_ids) // page_tokens):
        tokens = np.asarray(token_ids[block * page_tokens : (block + 1) * page_tokens], dtype=np.int32)
        hashes.append(blake2b(tokens.tobytes(), key=hashes[-1] if hashes else seed, digest_size=16).digest())


class PagePool:
    """Allocation and the prefix cache over page ids `[first_page, first_page + num_pages)`."""

    def __init__(self, first_page: int, num_pages: int, prefix_cache: bool) -> None:
        self.num_pages = num_pages
        self.prefix_cache = prefix_cache
        self._holders: dict[int, int] = {}
        self._blank: deque[int] = deque(range(first_page, first_page + num_pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def num_held(self) -> int:
        return len(self._holders)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def num_holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """`count` pages of unknown content, held once. The caller has checked `num_available`."""
        assert count <= self.num_available, f"pages: asked {count}, have {self.num_available}"
        pages = []
        for _ in range(count):
            if self._blank:
                page = self._blank.popleft()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def match(self, hashes: list[bytes]) -> list[int]:
        """Pages of the longest published run from the start of `hashes`; not held by this call."""
        pages = []
        for digest in hashes:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: list[int]) -> None:
        """One more holder for each of these matched pages."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def release(self, pages: list[int]) -> None:
        """One holder less. Last blocks become the first to be evicted, so that prefixes outlive their branches."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._hash_of:
                self._idle[page] = None
            else:
                self._blank.append(page)

    def publish(self, digest: bytes, page: int) -> None:
        """The page's content is final and known by this hash. The first publisher of a hash wins."""
        if self.prefix_cache and digest not in self._page_of and page not in self._hash_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def retract(self, digest: bytes) -> None:
        """Take back what is published by this hash, if anything: the page's content turned out to be wrong."""
        page = self._page_of.pop(digest, None)
        if page is None:
            return
        del self._hash_of[page]
        if page in self._idle:
            del self._idle[page]
            self._blank.append(page)
