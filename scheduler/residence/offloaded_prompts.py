"""Plan prompts that are offloaded in part: where each can start, and what it needs of both memories.

Such a prompt has a sink in pages, a run of offloaded blocks, and a window in pages. The run's first blocks may be
shared with another context, the `source`; the others are computed. With fixed residence, token counts decide how many
of its own blocks are evicted from the start. With adaptive residence, only as many are as find no pages. Invariant: a
prompt has all that it needs, or holds nothing.
"""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, replace

from gpu.step import HostPrompt
from scheduler.cache.page_pool import PagePool
from scheduler.cache.window_pool import Windows
from scheduler.residence.evictions import Evictor
from scheduler.residence.host_contexts import HostContexts
from scheduler.residence.page_room import PageRoom
from scheduler.sequences.capacity import HostCapacity
from scheduler.sequences.offloaded_context import HostContext, RunSize
from scheduler.sequences.sequence import Sequence

_AHEAD_TOKENS = 2048  # of output for which host memory is charged at admission, so that no context is preempted soon


@dataclass(frozen=True, slots=True)
class Start:
    """Where a prompt's prefill starts: after cached blocks, or after the blocks shared with a `source` context.

    end: where the offloaded run ends; 0: the whole prompt stays on the device. disk_end: tokens from `begin` up to here
    are read from disk; 0: none are.
    """

    begin: int
    end: int
    source: HostContext | None
    disk_end: int = 0

    @property
    def first_computed(self) -> int:
        return max(self.begin, self.disk_end)


@dataclass(frozen=True, slots=True)
class _Need:
    """The pages and host memory that a prompt needs.

    num_shared, num_own: blocks of its run that are its source's, and its own.
    num_evicted: how many of its own are evicted from the start, at least.
    num_new: pages of all layers for its window, and for its sink unless it shares that.
    num_spare: further such pages that it may take soon.
    size: the size of the host context with which it is admitted.
    """

    num_shared: int
    num_own: int
    num_evicted: int
    num_new: int
    num_spare: int
    size: RunSize


class OffloadedPrompts:
    def __init__(
        self,
        host: HostCapacity,
        contexts: HostContexts,
        evictor: Evictor,
        pages: PagePool,
        room: PageRoom,
        windows: Windows,
    ) -> None:
        self._host = host
        self._contexts = contexts
        self._evictor = evictor
        self._pages = pages
        self._room = room
        self._windows = windows

    def run_end(self, sequence: Sequence) -> int:
        """Return where the offloaded run of a sequence's prompt ends; 0: it has none."""
        if not sequence.profile.offloads:
            return 0
        if self._evictor.is_adaptive:
            return self._host.of(sequence.profile.name).prompt_end(sequence.num_tokens)
        return self._host.of(sequence.profile.name).run_end(sequence.num_prompt_tokens, sequence.num_tokens)

    # --- where one begins ---------------------------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> Start:
        """Return the best start of a prompt that is available now: behind the context that shares the most blocks."""
        num_sink, anew = self._host.num_sink_blocks, Start(0, sequence.run_end, None)
        end = min(self._landed_end(sequence) // self._host.page_tokens, sequence.num_usable_blocks)
        source, num_shared = self._contexts.find(sequence.hashes, num_sink, max(num_sink, end))
        if source is None:
            return anew
        if not self._evictor.is_adaptive:
            num_shared = min(num_shared, source.num_landed)
        end = self._windows.last_end(sequence.hashes, num_sink + num_shared, sequence.border_blocks)
        num_shared = max(0, end - num_sink)
        if num_shared == 0 or not self._fits_beside(sequence, source, num_shared):
            return anew
        return Start(self._host.end_of_blocks(num_shared), sequence.run_end, source)

    def _fits_beside(self, sequence: Sequence, source: HostContext, num_shared: int) -> bool:
        """Return whether both memories can hold the prompt beside its source once all else that is idle is dropped.

        If not, the source itself must be dropped.
        """
        need = self._need(sequence, num_shared)
        if not self._contexts.num_held and not self._contexts.has_room(need.size, source):
            return False
        num_pages = need.num_new + need.num_spare + self._least_pages(need)
        return num_pages + self._contexts.num_pages_once_evicted(source) <= self._pages.num_pages

    # --- what one takes -----------------------------------------------------------------------------------------------

    def take(self, sequence: Sequence, start: Start, num_spare: int, kept: Collection[HostContext]) -> bool:
        """Give the sequence what its prompt needs of both memories, if that leaves `num_spare` pages; else give
        nothing.

        Offloaded blocks are evicted for it, and idle contexts other than `kept` are dropped.
        """
        source = start.source
        need = self._need(sequence, 0 if source is None else self._host.blocks_of_run(start.begin))
        num_left = need.num_spare + num_spare
        num_pages, room = need.num_new + self._least_pages(need), self._room
        spared = kept if source is None else [*kept, source]
        if not room.could_free_pages(num_pages + num_left, spared) or not room.free_pages(num_pages, spared):
            return False
        num_evicted = self._num_to_evict(need, need.num_new + num_left, source)
        is_behind_evicted = num_evicted or not self._evictor.is_adaptive  # then the shared blocks are evicted, too
        if source is not None and is_behind_evicted and not self._evictor.evict_to(source, need.num_shared):
            return False
        if need.num_new + self._own_pages(need, num_evicted) > self._pages.num_available:
            return False
        context = self._add_context(need, source)
        if context is None:
            return False
        self._take_pages(sequence, context, need, num_evicted)
        self._evictor.hold(sequence, context)
        return True

    def _need(self, sequence: Sequence, num_shared: int) -> _Need:
        """Return what a prompt needs. num_shared: blocks of its run that are its source's; 0: it has no source."""
        host, is_adaptive = self._host, self._evictor.is_adaptive
        num_run = host.blocks_of_run(sequence.run_end)
        num_own = num_run - num_shared
        num_window = sequence.num_pages - self._host.num_sink_blocks - num_run
        num_evicted = 0
        if not is_adaptive:
            num_evicted = max(0, host.blocks_of_run(self._landed_end(sequence)) - num_shared)
        size = self._admitted_size(sequence, num_shared, num_own)
        num_there = num_own if is_adaptive else num_evicted
        num_resident = self._host.num_sink_blocks + num_window + num_own - num_there
        num_spare = self._room.most_window_pages(sequence) - num_resident + self._room.num_coming_dense(size, num_there)
        num_new = num_window if num_shared else num_window + self._host.num_sink_blocks
        return _Need(num_shared, num_own, num_evicted, num_new, num_spare, size)

    def _admitted_size(self, sequence: Sequence, num_shared: int, num_own: int) -> RunSize:
        """Return the size of the run with which a sequence is admitted: its prompt's, and room for some output."""
        most = min(sequence.num_prompt_tokens + sequence.request.max_tokens, sequence.num_tokens + _AHEAD_TOKENS)
        num_blocks = self._host.of(sequence.profile.name).most_run_tokens(most) // self._host.page_tokens
        return RunSize(num_shared, num_own, num_blocks, sequence.profile.reading)

    def _least_pages(self, need: _Need) -> int:
        """Return the fewest pages of a prompt's own blocks: as many of them as possible are evicted."""
        num_evicted = need.num_own if self._evictor.is_adaptive else need.num_evicted
        return self._own_pages(need, num_evicted)

    def _own_pages(self, need: _Need, num_evicted: int) -> int:
        """Return the pages of a prompt's own blocks if `num_evicted` of them have only dense pages."""
        return need.num_own - num_evicted + self._host.layout.blocks_for(num_evicted)

    # --- step by step -------------------------------------------------------------------------------------------------

    def _num_to_evict(self, need: _Need, num_other: int, source: HostContext | None) -> int:
        """Return how many of a prompt's own blocks must be evicted from the start to leave `num_other` pages.

        Idle contexts are evicted before that, the source last.
        """
        if not self._evictor.is_adaptive:
            return need.num_evicted
        num_own, evictor = need.num_own, self._evictor
        self._pages.reach(num_own + num_other)
        idle = [one for one in evictor.evictable() if not one.is_held]
        evictor.evict_pages(num_own + num_other, [one for one in idle if one is not source])
        if source is not None and num_own + num_other > self._pages.num_available:
            evictor.evict_pages(num_own + num_other, [source])
        num_free = self._pages.num_available - num_other
        block_pages = self._host.offload_block_tokens // self._host.page_tokens
        fewest = bisect_left(range(num_own), True, key=lambda num: self._own_pages(need, num) <= num_free)
        return min(num_own, -(-fewest // block_pages) * block_pages)

    def _add_context(self, need: _Need, source: HostContext | None) -> HostContext | None:
        """Add a context for the run, with host memory for some output; None: there is no room now."""
        self._evictor.finish_reload()  # before another context shares its blocks
        context = self._contexts.add(need.size, source)
        if context is None and not self._contexts.num_held:  # it is alone, and fits without room to grow
            context = self._contexts.add(replace(need.size, num_blocks=need.num_shared + need.num_own), source)
        return context

    def _take_pages(self, sequence: Sequence, context: HostContext, need: _Need, num_evicted: int) -> None:
        """Allocate pages for sink, run and window, in this order. num_evicted: own blocks that get only dense pages."""
        if context.parent is None:
            sink = self._pages.allocate(self._host.num_sink_blocks)
            self._contexts.keep_sink(context, sink)
        else:
            sink = context.sink_pages
            self._pages.hold(sink)
        if num_evicted:
            self._contexts.append_evicted(context, num_evicted)
        self._contexts.append(context, self._pages.allocate(need.num_own - num_evicted))
        context.is_open, context.is_written = True, False
        sequence.pages = sink + context.pages
        sequence.pages += self._pages.allocate(sequence.num_pages - len(sequence.pages))

    # --- its prefill --------------------------------------------------------------------------------------------------

    def host_prompt(self, sequence: Sequence, start: Start) -> HostPrompt | None:
        """Describe the offloaded part of a prompt for its prefill; None: there is none."""
        context = sequence.context
        if context is None:
            return None
        return HostPrompt(
            context_id=context.context_id,
            source_id=None if start.source is None else start.source.context_id,
            sink=self._host.sink_tokens,
            evicted=self._host.end_of_blocks(context.num_evicted),
            end=start.end,
            reading=sequence.profile.reading,
        )

    def finish_prefill(self, sequence: Sequence, context: HostContext) -> None:
        """Mark the prompt's blocks as written: the current plan ends its prefill."""
        context.is_written = True
        context.num_landed = self._host.blocks_of_run(self._landed_end(sequence))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _landed_end(self, sequence: Sequence) -> int:
        """Return where the part of a prompt's run ends that may be shared.

        With fixed residence, this part is evicted after the prefill.
        """
        if self._evictor.is_adaptive:
            return sequence.run_end
        return self._host.of(sequence.profile.name).landed_end(sequence.num_prompt_tokens, sequence.num_tokens)
