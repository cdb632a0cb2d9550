"""Find free pages on the device: evict what host memory has a copy of, then idle contexts.

Invariant: an idle context is dropped only if enough pages are free then.
"""

from collections.abc import Collection

from scheduler.cache.page_pool import PagePool
from scheduler.residence.evictions import Frontier
from scheduler.residence.host_contexts import HostContexts
from scheduler.sequences.capacity import SETTLING_TOKENS, Capacity
from scheduler.sequences.offloaded_context import HostContext, RunSize
from scheduler.sequences.sequence import Sequence


class PageRoom:
    """`contexts`, `frontier`: None where every context stays on the device, so that nobody has pages to give."""

    def __init__(
        self, capacity: Capacity, pages: PagePool, contexts: HostContexts | None, frontier: Frontier | None
    ) -> None:
        self._capacity = capacity
        self._pages = pages
        self._contexts = contexts
        self._frontier = frontier

    # --- who gives way ------------------------------------------------------------------------------------------------

    def has_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Tell whether there may be so many: what the host has given up, and idle contexts gone but `kept`. It is
        certain where nothing is shared.
        """
        self._pages.reach(num_pages)
        num_short = num_pages - self._pages.num_available
        if num_short <= 0:
            return True
        if self._frontier is None:
            return False
        num_yielding = self._frontier.num_yielding
        return num_short <= num_yielding or num_short <= num_yielding + self.num_idle_pages(kept)

    def free_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Tell whether so many pages are free, once offloaded blocks are evicted and then idle contexts but `kept`
        dropped.
        """
        self._pages.reach(num_pages)
        if self._contexts is None or self._frontier is None:
            return num_pages <= self._pages.num_available
        if self._frontier.is_adaptive and num_pages > self._pages.num_available and self._frontier.num_yielding:
            self._frontier.end_restore()
            self._frontier.yield_pages(num_pages, self._frontier.yielding())
        return self._contexts.free_pages(num_pages, kept)

    def num_idle_pages(self, kept: Collection[HostContext]) -> int:
        """Return pages that are free once idle contexts are gone, all but `kept`."""
        return 0 if self._contexts is None else len(self._contexts.idle_pages(kept))

    # --- what those that run may take soon ----------------------------------------------------------------------------

    def num_coming_pages(self, sequence: Sequence) -> int:
        """Return what one that holds pages may take soon: as much as a window holds and the dense layers of what it
        will send down, or one page where all of it stays.
        """
        context = sequence.open_context
        if context is None:
            return 1
        assert self._frontier is not None
        num_there = context.num_blocks if self._frontier.is_adaptive else context.num_released
        num_dense = self.num_coming_dense(context.size, num_there - context.size.num_shared)
        return self.most_window_pages(sequence) - (len(sequence.pages) - num_there) + num_dense

    def most_window_pages(self, sequence: Sequence) -> int:
        """Return what it keeps in resident pages once it has written all it may: where residence is fixed, also while
        the last of it settles.
        """
        assert self._capacity.host is not None
        assert self._frontier is not None
        host = self._capacity.host.of(sequence.request.attention_profile)
        settling = 0 if self._frontier.is_adaptive else self._capacity.pages_for(SETTLING_TOKENS)
        return (host.sink_tokens + host.window_tokens + host.lump_tokens) // host.page_tokens + settling

    def num_coming_dense(self, size: RunSize, num_own: int) -> int:
        """Return pages that the dense layers take of what is paid for and not written yet, behind `num_own` blocks."""
        assert self._capacity.host is not None
        blocks_for = self._capacity.host.layout.blocks_for
        return max(0, blocks_for(size.num_own) - blocks_for(num_own))
