"""Free pages on the device: first evict pages that have a copy in host memory, then drop idle contexts.

Invariant: idle contexts are dropped only if that frees enough pages.
"""

from collections.abc import Collection

from scheduler.cache.page_pool import PagePool
from scheduler.residence.evictions import Evictor
from scheduler.residence.host_contexts import HostContexts
from scheduler.sequences.capacity import LANDING_TOKENS, Capacity
from scheduler.sequences.offloaded_context import HostContext, RunSize
from scheduler.sequences.sequence import Sequence


class PageRoom:
    """The pages that requests may take. contexts, evictor: None if every context stays on the device, so that there is
    nothing to evict.
    """

    def __init__(
        self, capacity: Capacity, pages: PagePool, contexts: HostContexts | None, evictor: Evictor | None
    ) -> None:
        self._capacity = capacity
        self._pages = pages
        self._contexts = contexts
        self._evictor = evictor

    # --- free pages ---------------------------------------------------------------------------------------------------

    def could_free_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Return whether evicting offloaded blocks and dropping idle contexts other than `kept` may free enough pages.

        True is certain only if contexts share nothing.
        """
        self._pages.reach(num_pages)
        num_short = num_pages - self._pages.num_available
        if num_short <= 0:
            return True
        if self._evictor is None:
            return False
        num_evictable = self._evictor.num_evictable
        return num_short <= num_evictable or num_short <= num_evictable + self.num_idle_pages(kept)

    def free_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Free pages by evicting offloaded blocks and then dropping idle contexts other than `kept`.

        Returns whether `num_pages` are free then.
        """
        self._pages.reach(num_pages)
        if self._contexts is None or self._evictor is None:
            return num_pages <= self._pages.num_available
        if self._evictor.is_adaptive and num_pages > self._pages.num_available and self._evictor.num_evictable:
            self._evictor.finish_reload()
            self._evictor.evict_pages(num_pages, self._evictor.evictable())
        return self._contexts.free_pages(num_pages, kept)

    def num_idle_pages(self, kept: Collection[HostContext]) -> int:
        """Count the pages that dropping all idle contexts other than `kept` would free."""
        return 0 if self._contexts is None else len(self._contexts.idle_pages(kept))

    # --- what running sequences may take soon -------------------------------------------------------------------------

    def num_coming_pages(self, sequence: Sequence) -> int:
        """Estimate the pages that a sequence may take soon.

        With an offloaded context, these are its window and the dense pages of what it will offload; else one page.
        """
        context = sequence.open_context
        if context is None:
            return 1
        assert self._evictor is not None
        num_there = context.num_blocks if self._evictor.is_adaptive else context.num_evicted
        num_dense = self.num_coming_dense(context.size, num_there - context.size.num_shared)
        return self.most_window_pages(sequence) - (len(sequence.pages) - num_there) + num_dense

    def most_window_pages(self, sequence: Sequence) -> int:
        """Return the most resident pages of a sequence between two offloads.

        With fixed residence, they include pages whose rows have not landed in host memory yet.
        """
        assert self._capacity.host is not None
        assert self._evictor is not None
        host = self._capacity.host.of(sequence.profile.name)
        landing = 0 if self._evictor.is_adaptive else -(-LANDING_TOKENS // host.page_tokens)
        return (host.sink_tokens + host.window_tokens + host.offload_block_tokens) // host.page_tokens + landing

    def num_coming_dense(self, size: RunSize, num_own: int) -> int:
        """Return the dense pages still to come for a run that is paid for, after its first `num_own` blocks."""
        assert self._capacity.host is not None
        blocks_for = self._capacity.host.layout.blocks_for
        return max(0, blocks_for(size.num_own) - blocks_for(num_own))
