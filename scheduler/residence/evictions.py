"""Evict the resident pages of offloaded blocks, and reload them when pages are free.

A block is evicted or reloaded for all contexts that share it. Invariants: evicted blocks come before resident ones. An
evicted block has a dense page, a resident block a resident page. A reload takes two plans. The first copies rows to
pages that no step reads yet. Once that is done, the second gives these pages to their readers. A reload leaves free
what running sequences may take soon and a share of all pages, so that pages are not evicted again at once.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpu.step import FinishedReload, HostRead, PageEviction, Reload, TablePlace
from scheduler.block_changes import GPU
from scheduler.cache.page_pool import PagePool
from scheduler.residence.host_contexts import HostContexts
from scheduler.sequences.capacity import HostCapacity
from scheduler.sequences.offloaded_context import HostContext, end_of_shared, owner_of
from scheduler.sequences.sequence import Sequence

QUIET_STEPS = 32  # steps without an eviction or a shortage before pages are reloaded
RELOADED_TOKENS = 8192  # most tokens in one reload: the link takes about a step's time for them
_FREE_SHARE = 16  # one in so many pages stays free in a reload
_MOST_EVICTED = 8  # most offload blocks in one eviction


@dataclass(frozen=True, slots=True)
class _Span:
    """Blocks `[first, last)` of a run: the context that owns them, and all contexts that share them."""

    owner: HostContext
    first: int
    last: int
    sharers: tuple[HostContext, ...]

    @property
    def own(self) -> tuple[int, int]:
        """Return their range among the owner's own blocks."""
        return self.first - self.owner.size.num_shared, self.last - self.owner.size.num_shared


class Evictor:
    """Chooses pages of offloaded contexts to evict and to reload. holders: the sequence that holds each context.
    num_quiet_steps: steps since pages were last evicted or short.
    """

    def __init__(self, host: HostCapacity, contexts: HostContexts, pages: PagePool) -> None:
        self._host = host
        self._contexts = contexts
        self._pages = pages
        self._offload_block_pages = host.offload_block_tokens // host.page_tokens
        self._evictions: list[PageEviction] = []
        self._reloads: list[FinishedReload] = []
        self._coming: tuple[_Span, list[int]] | None = None  # blocks being reloaded, and their new pages
        self._has_evicted = False  # since the last step that asked for a reload
        self.num_quiet_steps = 0
        self.num_reloaded = 0  # blocks, since the start
        self.holders: dict[HostContext, Sequence] = {}

    @property
    def is_adaptive(self) -> bool:
        """Return whether offloaded blocks stay resident until their pages are needed; else token counts alone
        decide.
        """
        return self._host.is_adaptive

    def hold(self, sequence: Sequence, context: HostContext) -> None:
        """Give the context to the sequence."""
        sequence.context = context
        self.holders[context] = sequence

    # --- evict --------------------------------------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Return the most pages that evicting all offloaded blocks and ending the reload would free; 0: none."""
        if self._host.layout.dense_per_block == 1:
            return 0
        num_coming = 0 if self._coming is None else len(self._coming[1])
        return num_coming + self._contexts.num_resident - self._host.layout.blocks_for(self._contexts.num_resident)

    def evictable(self) -> list[HostContext]:
        """Return the contexts with pages to evict, in the order of their eviction.

        Idle contexts come first, the least recently used before others. Then come held ones: those that cost the host
        least per token first, and of these the largest.
        """
        having = [one for one in self._contexts if one.num_resident]
        idle = sorted((one for one in having if not one.is_held), key=lambda one: one.used)
        held = sorted(
            (one for one in having if one.is_held), key=lambda one: (one.size.reading.cost_order, -one.num_resident)
        )
        return idle + held

    def evict_pages(self, num_pages: int, contexts: Collection[HostContext]) -> None:
        """Evict pages of these contexts in turn until `num_pages` are free, or none is left to evict.

        Blocks whose rows may not have landed in host memory yet are evicted last.
        """
        for only_landed in (True, False):
            for context in contexts:
                while (num_short := num_pages - self._pages.num_available) > 0:
                    end = context.num_landed if only_landed else context.num_blocks
                    num_wanted = -(-2 * num_short // self._offload_block_pages) * self._offload_block_pages
                    num_blocks = min(end - context.num_evicted, num_wanted)
                    if num_blocks <= 0 or not self.evict(context, num_blocks):
                        break

    def evict_to(self, context: HostContext, num_blocks: int) -> bool:
        """Evict at least the first `num_blocks` of the run; return whether that was possible."""
        while context.num_evicted < num_blocks:
            if not self.evict(context, num_blocks - context.num_evicted):
                return False
        return True

    def evict(self, context: HostContext, num_blocks: int) -> bool:
        """Evict up to `num_blocks` more blocks, the first resident ones, for all contexts that share them.

        At most `_MOST_EVICTED` are evicted at once, since the device holds the dense layers' rows twice for a moment. A
        running reload is finished first. Returns False, and changes nothing else, if all blocks are evicted, a prefill
        still writes them, or there is no room for their dense pages.
        """
        self.finish_reload()
        first = context.num_evicted
        if first == context.num_blocks:
            return False
        span = self._span_from(context, min(num_blocks, _MOST_EVICTED * self._offload_block_pages))
        owner, page_ids = span.owner, context.pages[first : span.last]
        if not owner.is_written:
            return False
        num_new = self._host.layout.blocks_for(span.own[1]) - len(owner.storage)
        num_freed = sum(self._pages.num_holders(page) == len(span.sharers) for page in page_ids)
        if num_new > num_freed + self._pages.num_available:
            return False
        if self._contexts.events is not None:
            self._contexts.events.remove(GPU, owner.hashes[first : span.last])
        for _ in span.sharers:
            self._pages.release(page_ids)
        owner.storage += self._pages.allocate(num_new)
        dense_page_ids = self._host.layout.dense_pages(owner.storage, *span.own)
        places = self._exchange(span, dense_page_ids)
        for one in span.sharers:
            one.num_evicted = span.last
        self._evictions.append(PageEviction(tuple(page_ids), tuple(dense_page_ids), tuple(places)))
        self._has_evicted = True
        return True

    # --- reload -------------------------------------------------------------------------------------------------------

    @property
    def is_reloading(self) -> bool:
        return self._coming is not None

    def allow_reload_now(self) -> None:
        """Allow a reload at once, because a prefill has just read all evicted blocks of a context."""
        self.num_quiet_steps = QUIET_STEPS

    def next_reload(self, is_quiet: bool, num_coming_pages: int, is_ready: Callable[[HostRead], bool]) -> Reload | None:
        """Return the pages to reload during this step, or None.

        The context whose tokens cost the host most comes first, and of these the one with the least to reload.
        is_quiet: no request waits or prefills. num_coming_pages: pages that running sequences may take soon.
        """
        self.num_quiet_steps = self.num_quiet_steps + 1 if is_quiet and not self._has_evicted else 0
        self._has_evicted = False
        if self.num_quiet_steps < QUIET_STEPS or self.is_reloading:
            return None
        num_free = self._pages.num_available - num_coming_pages - self._pages.num_pages // _FREE_SHARE
        most_pages = min(num_free, RELOADED_TOKENS // self._host.page_tokens)
        num_blocks = most_pages // self._offload_block_pages * self._offload_block_pages
        if num_blocks <= 0:
            return None
        evicted = [one for one in self.holders if one.num_evicted and one.is_written]
        for context in sorted(evicted, key=lambda one: (-one.size.reading.cost_order, one.num_evicted)):
            reload = self.begin_reload(context, num_blocks, is_ready)
            if reload is not None:
                return reload
        return None

    def begin_reload(
        self, context: HostContext, num_blocks: int, is_ready: Callable[[HostRead], bool]
    ) -> Reload | None:
        """Begin to reload up to `num_blocks` of the last evicted blocks, for all contexts that share them.

        A context that shares them and has more blocks evicted is served first. The caller has checked that as many
        pages are free. Returns None, and changes nothing, if rows are still on their way to the host or a prefill reads
        them.
        """
        span = self._span_before(context, num_blocks)
        host, page_tokens = self._host, self._host.page_tokens
        host_read = HostRead(span.owner.context_id, host.sink_tokens, host.end_of_blocks(span.last))
        if not all(one.is_written for one in (span.owner, *span.sharers)) or not is_ready(host_read):
            return None
        page_ids = self._pages.allocate(span.last - span.first)
        self._coming = span, page_ids
        return Reload(span.owner.context_id, span.first * page_tokens, span.last * page_tokens, tuple(page_ids))

    def finish_reload(self) -> None:
        """Give reloaded pages to their readers in the next plan; the device waits for rows that have not arrived.

        Does nothing if there is no reload. If the context is closed, the pages are freed.
        """
        if self._coming is None:
            return
        (span, page_ids), self._coming = self._coming, None
        owner = span.owner
        if owner.is_closed:
            self._pages.release(page_ids)
            return
        sharers = self._contexts.sharers(owner, span.first)
        assert all(one.num_evicted == span.last for one in sharers), "what is reloaded is still evicted, for all"
        span = _Span(owner, span.first, span.last, tuple(sharers))
        for _ in sharers[1:]:
            self._pages.hold(page_ids)
        dense_page_ids = owner.pages[span.first : span.last]
        places = self._exchange(span, page_ids)
        for one in sharers:
            one.num_evicted = span.first
        kept = self._host.layout.blocks_for(span.own[0])
        self._pages.release(owner.storage[kept:])
        del owner.storage[kept:]
        if self._contexts.events is not None:
            self._contexts.events.add(GPU, owner.hashes[span.first : span.last])
        self._reloads.append(FinishedReload(tuple(page_ids), tuple(dense_page_ids), tuple(places)))
        self.num_reloaded += len(page_ids)

    def take_changes(self) -> tuple[list[int], list[FinishedReload], list[PageEviction]]:
        """Return the contexts closed, the finished reloads and the evictions since the last call."""
        changes = self._contexts.take_closed(), self._reloads, self._evictions
        self._reloads, self._evictions = [], []
        return changes

    def num_resident_tokens(self) -> int:
        """Count the tokens with pages of all layers in contexts that are offloaded in part.

        Sinks and windows are included, and shared tokens count once.
        """
        offloaded = [context for context in self._contexts if context.num_blocks]
        pages = {page for context in offloaded for page in context.sink_pages}
        for context in offloaded:
            if (sequence := self.holders.get(context)) is not None:
                pages.update(sequence.pages[len(context.sink_pages) + context.num_blocks :])
        num_blocks = self._contexts.num_blocks - self._contexts.num_evicted
        return (len(pages) + num_blocks) * self._host.page_tokens

    # --- inside -------------------------------------------------------------------------------------------------------

    def _span_from(self, context: HostContext, num_blocks: int) -> _Span:
        """Return the first resident blocks of one owner, as far as all sharing contexts have the same pages for
        them.
        """
        first = context.num_evicted
        owner, sharers = owner_of(context, first), self._contexts.sharers(context, first)
        page_ids = owner.pages[first : first + num_blocks]
        alike = min(_count_alike(one.pages[first : first + len(page_ids)], page_ids) for one in sharers)
        return _Span(owner, first, first + alike, tuple(sharers))

    def _span_before(self, context: HostContext, num_blocks: int) -> _Span:
        """Return the last evicted blocks of one owner that the same contexts share; none of these has more evicted."""
        while True:
            last = context.num_evicted
            owner, sharers = owner_of(context, last - 1), self._contexts.sharers(context, last - 1)
            further = max(sharers, key=lambda one: one.num_evicted)
            if further.num_evicted == last:
                break
            context = further
        ends = [end_of_shared(one, owner) for one in self._contexts if one not in sharers]
        return _Span(owner, max(owner.size.num_shared, last - num_blocks, *ends, 0), last, tuple(sharers))

    def _exchange(self, span: _Span, page_ids: list[int]) -> list[TablePlace]:
        """Set the pages of a span's blocks in all contexts that share them; return where page tables change."""
        places = []
        before = self._host.num_sink_blocks
        for one in span.sharers:
            one.pages[span.first : span.last] = page_ids
            sequence = self.holders.get(one)
            if sequence is not None:
                sequence.pages[before + span.first : before + span.last] = page_ids
                if sequence.slot >= 0:
                    places.append(TablePlace(sequence.slot, before + span.first))
        return places


def _count_alike(first: list[int], second: list[int]) -> int:
    """Count the leading elements that are equal."""
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
