"""Decide when evicted pages of a context are reloaded from host memory, and whose come first.

Invariant: a reload leaves free what running sequences may take soon and a share of all pages, so that pages are not
evicted again at once.
"""

from collections.abc import Callable

from gpu.step import HostRead, Reload
from scheduler.cache.page_pool import PagePool
from scheduler.residence.evictions import Evictor
from scheduler.sequences.capacity import HostCapacity
from scheduler.sequences.offloaded_context import HostContext

QUIET_STEPS = 32  # since pages were evicted last
FETCHED_TOKENS = 8192  # at once, at most: a step's time over the link, or a little more
_FREE_SHARE = 16  # one of so many pages stays free


class Reloads:
    """The choice of evicted pages to reload. `num_quiet_steps`: since pages were evicted last, or anybody was in need
    of some.
    """

    def __init__(self, host: HostCapacity, evictor: Evictor, pages: PagePool) -> None:
        self._host = host
        self._evictor = evictor
        self._pages = pages
        self._num_evictions = 0
        self.num_quiet_steps = 0

    def allow_now(self) -> None:
        """Allow a reload at once: a next turn's prefill has read all of what was evicted."""
        self.num_quiet_steps = QUIET_STEPS

    def next_reload(self, is_quiet: bool, num_coming_pages: int, is_ready: Callable[[HostRead], bool]) -> Reload | None:
        """Return what is reloaded beside this step, if anything.

        is_quiet: nobody waits or begins. num_coming_pages: what running sequences may take soon.
        """
        has_evicted = self._evictor.num_evictions != self._num_evictions
        self._num_evictions = self._evictor.num_evictions
        self.num_quiet_steps = self.num_quiet_steps + 1 if is_quiet and not has_evicted else 0
        if self.num_quiet_steps < QUIET_STEPS or self._evictor.is_reloading:
            return None
        num_free = self._pages.num_available - num_coming_pages - self._pages.num_pages // _FREE_SHARE
        block_pages = self._host.offload_block_tokens // self._host.page_tokens
        num_blocks = min(num_free, FETCHED_TOKENS // self._host.page_tokens) // block_pages * block_pages
        if num_blocks <= 0:
            return None
        evicted = [one for one in self._evictor.holders if one.num_evicted and one.is_written]
        for context in sorted(evicted, key=_turn):
            fetch = self._evictor.begin_reload(context, num_blocks, is_ready)
            if fetch is not None:
                return fetch
        return None


def _turn(context: HostContext) -> tuple[int, int]:
    """Order contexts: those whose tokens cost the host most come first, then those with the least to reload."""
    return -context.size.reading.cost_order, context.num_evicted
