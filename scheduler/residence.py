"""Where sequences' keys and values lie: pages of the device, and contexts of the host for what goes down.

Takes what a prompt or the next token needs, writes old tokens to host memory, and gives all of it back. What is written
there keeps its pages while nobody needs them; where they are needed, they are given up at once, and nothing is computed
again. Knows ids and counts; refuses to know who comes first. Invariant: `sequence.pages` has a page for each position,
in order; those of its context's run are the context's, dense ones in front, and all others are held by the sequence.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpu.profiles import Profile
from gpu.step import Deposit, Fetch, HostAsk, HostPrompt, PageWrite, Release, Restore
from scheduler.capacity import SETTLING_TOKENS, Capacity, HostCapacity
from scheduler.deposits import Deposits
from scheduler.frontier import Frontier
from scheduler.growing_back import GrowingBack
from scheduler.host_context import HostContext, RunSize
from scheduler.host_contexts import HostContexts
from scheduler.pages import PagePool
from scheduler.prefix_cache import PrefixCache
from scheduler.sequence import Sequence
from scheduler.windows import Windows

_AHEAD_TOKENS = 2048  # of a long context's output, paid for when it is admitted: it runs a while before it gives way

Shortage = Literal["pages", "host"]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a prompt's prefill begins: behind blocks that are known, or behind the front of a `source` context.

    `end`: where the run ends that goes down; 0: all of it stays on the device.
    """

    begin: int
    end: int
    source: HostContext | None


@dataclass(frozen=True, slots=True)
class _Need:
    """What a prompt takes that goes down: its own blocks; pages of all layers at once, and those that it may take soon,
    `num_spare`; the context that it is admitted with; and where what is released of it ends at least, in blocks.
    """

    num_own: int
    num_new: int
    num_spare: int
    size: RunSize
    num_released: int


class Residence:
    """`profiles`: those that are served, by name; `model_key` names the model in prefix hashes."""

    def __init__(
        self, capacity: Capacity, prefix_cache: bool, model_key: bytes, profiles: Mapping[str, Profile]
    ) -> None:
        page_tokens = capacity.page_tokens
        self._capacity = capacity
        self._profiles = profiles
        self.pages = PagePool(0, capacity.num_pages, prefix_cache)
        self.windows = Windows(capacity.num_windows, capacity.spare_window_tokens, page_tokens, prefix_cache)
        self.prefixes = PrefixCache(self.pages, self.windows, page_tokens, prefix_cache, model_key, profiles)
        self.contexts: HostContexts | None = None
        self.frontier: Frontier | None = None
        if capacity.host is not None:
            self.contexts = HostContexts(capacity.host, self.pages, prefix_cache)
            self.frontier = Frontier(capacity.host, self.contexts, self.pages)
            self._deposits = Deposits(capacity.host, self.contexts, self.frontier, self.pages, profiles)
            self._growing_back = GrowingBack(capacity.host, self.frontier, self.pages)

    @property
    def page_tokens(self) -> int:
        return self._capacity.page_tokens

    @property
    def is_adaptive(self) -> bool:
        """Whether what is in host memory stays on the device while nobody needs its pages; not so without a host."""
        return self.frontier is not None and self.frontier.is_adaptive

    def profile_of(self, sequence: Sequence) -> Profile:
        return self._profiles[sequence.request.attention_profile]

    # --- prompts ------------------------------------------------------------------------------------------------------

    def await_room(self, sequence: Sequence) -> None:
        """The sequence waits from now on: what it will take does not change meanwhile."""
        sequence.num_pages = self._capacity.pages_for(sequence.num_tokens)
        sequence.run_end = self._prompt_end(sequence)
        self.prefixes.await_blocks(sequence)

    def find(self, sequence: Sequence) -> Start:
        """The best start there is now of a prompt that goes down."""
        end = sequence.run_end
        host, contexts, _ = self._host
        first, last = self._blocks(host.sink_tokens), self._blocks(self._settled_end(sequence))
        source, num_shared = contexts.find(sequence.hashes, first, max(first, min(last, sequence.num_usable_blocks)))
        if source is not None and not self.is_adaptive:
            num_shared = min(num_shared, source.num_settled)
        num_shared = max(0, self.prefixes.align_blocks(sequence, first + num_shared) - first)
        size = self._admitted_size(sequence, num_shared, end)
        if num_shared == 0:
            source = None
        if source is not None and (
            (not contexts.num_held and not contexts.has_room(size, source))
            or not self._fits_beside(sequence, source, num_shared)
        ):
            source, num_shared = None, 0  # nobody else will make room: what it stands on must go
        begin = host.sink_tokens + num_shared * self._capacity.page_tokens if source is not None else 0
        return Start(begin, end, source)

    def has_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Whether there may be so many: what the host has given up, and idle contexts gone but `kept`. It is certain
        where nothing is shared.
        """
        num_short = num_pages - self.pages.num_available
        if num_short <= 0:
            return True
        if self.contexts is None:
            return False
        num_yielding = self._host[2].num_yielding
        return num_short <= num_yielding or num_short <= num_yielding + self.num_idle_pages(kept)

    def take(self, sequence: Sequence, start: Start, num_spare: int, kept: Collection[HostContext]) -> bool:
        """Give the sequence what its prompt needs, if that leaves `num_spare` pages; else change nothing.

        One with a window needs few pages more than it has: room for all of them is left, so that no long prompt is
        computed twice for want of a page. Idle contexts but `kept` give way to it.
        """
        num_pages = sequence.num_pages
        if not start.end:
            front = self.pages.front_of(sequence.hashes, self._blocks(start.begin))
            self.pages.hold(front.array)
            num_new = num_pages - len(front.page_ids)
            if not self.has_pages(num_new + num_spare, kept):
                self.pages.release(front.page_ids)
                return False
            if not self._free_pages(num_new, kept):
                self.pages.release(front.page_ids)
                return False
            sequence.pages = front.page_ids + self.pages.allocate(num_new)
            return True
        return self._take_down(sequence, start, num_spare, kept)

    def _take_down(self, sequence: Sequence, start: Start, num_spare: int, kept: Collection[HostContext]) -> bool:
        """Likewise, for a prompt of which a part goes down. What is not released of it takes what pages are left."""
        host, contexts, frontier = self._host
        source = start.source
        num_shared = 0 if source is None else self._blocks(start.begin - host.sink_tokens)
        need = self._need(sequence, start.end, num_shared, with_sink=source is None)
        num_own, num_new, size = need.num_own, need.num_new, need.size
        num_spare += need.num_spare
        kept = kept if source is None else [*kept, source]
        num_least = num_new + self._least_pages(need)
        if not self.has_pages(num_least + num_spare, kept) or not self._free_pages(num_least, kept):
            return False
        num_released = self._num_to_release(need, num_new + num_spare, source)
        is_behind = num_released > 0 or not self.is_adaptive
        if source is not None and is_behind and not frontier.release_to(source, num_shared):
            return False
        if num_new + num_own - num_released + host.layout.blocks_for(num_released) > self.pages.num_available:
            return False
        frontier.end_restore()  # before its contexts have another to share with
        context = contexts.add(size, source)
        if context is None and not contexts.num_held:  # it has the host to itself: no room to grow, but it fits
            context = contexts.add(replace(size, num_blocks=num_shared + num_own), source)
        if context is None:
            return False
        if source is not None:
            sink = context.sink_pages
            self.pages.hold(sink)
        else:
            sink = self.pages.allocate(self._blocks(host.sink_tokens))
            contexts.keep_sink(context, sink)
        if num_released:
            contexts.deposit_released(context, num_released)
        contexts.deposit(context, self.pages.allocate(num_own - num_released))
        context.is_open, context.is_written = True, False
        frontier.hold(sequence, context)
        sequence.pages = sink + context.pages
        sequence.pages += self.pages.allocate(sequence.num_pages - len(sequence.pages))
        return True

    def finish_prefill(self, sequence: Sequence) -> None:
        """The plan under way ends it: what went down is in host memory behind it."""
        context = sequence.context
        if context is not None:
            context.is_written = True
            context.num_settled = self._blocks(self._settled_end(sequence) - self._host[0].sink_tokens)
            if context.parent is not None and context.num_released:
                self._growing_back.hasten()

    def host_prompt(self, sequence: Sequence, start: Start) -> HostPrompt | None:
        """What a prefill is told of the part that goes down, if any does."""
        context = sequence.context
        if context is None:
            return None
        return HostPrompt(
            context_id=context.context_id,
            source_id=None if start.source is None else start.source.context_id,
            sink=self._host[0].sink_tokens,
            released=self._released_end(context),
            end=start.end,
            is_sampled=self.profile_of(sequence).is_sampled,
        )

    # --- running ------------------------------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, kept: Collection[HostContext]) -> Shortage | None:
        """Make room for the next draw, and for the deposit that it makes due; what is short if there is none.

        Idle contexts give way, but `kept` no page.
        """
        num_pages = int(self._needs_page(sequence))
        if self.frontier is not None:
            if not self._deposits.reserve(sequence):
                return "host"
            num_pages += self._deposits.num_dense_pages(sequence)
        return "pages" if num_pages and not self._free_pages(num_pages, kept) else None

    def grow(self, sequence: Sequence) -> list[PageWrite]:
        """The page that the next token begins, if it begins one; what settles with it moves. There is room: `reserve`
        has said so, and it is called for nobody else in between.
        """
        if self.frontier is not None:
            self._deposits.settle(sequence)
        if not self._needs_page(sequence):
            return []
        write = PageWrite(sequence.slot, len(sequence.pages), self.pages.allocate(1))
        sequence.pages += write.page_ids
        return [write]

    def most_ahead(self, sequence: Sequence, most: int, num_spare: int) -> int:
        """How many tokens, at most that many, may follow the next draw's in its step, with what is free: that leaves
        `num_spare` pages, and nobody gives way.
        """
        num_pages = len(sequence.pages) + max(0, self.pages.num_available - num_spare)
        most = min(most, num_pages * self._capacity.page_tokens - sequence.next_cell - 1)
        if self.windows.count:
            most = min(most, self._capacity.spare_window_tokens)  # or they take the place of what the first ones see
        if most <= 0 or self.frontier is None:
            return max(most, 0)
        return self._deposits.most_ahead(sequence, most)

    def grow_ahead(self, sequence: Sequence, num_tokens: int) -> list[PageWrite]:
        """The pages of so many tokens behind the next draw's: no more than `most_ahead` says."""
        num_pages = (sequence.next_cell + num_tokens) // self._capacity.page_tokens + 1 - len(sequence.pages)
        if num_pages <= 0:
            return []
        write = PageWrite(sequence.slot, len(sequence.pages), self.pages.allocate(num_pages))
        sequence.pages += write.page_ids
        return [write]

    def give_back_evicted(self, sequence: Sequence) -> None:
        """Its prompt is done, and what is left of it has moved up: pages behind that are free."""
        if sequence.num_evicted:
            first = self._blocks(sequence.next_cell) + 1
            self.pages.release(sequence.pages[first:])
            del sequence.pages[first:]

    def deposit(self, sequence: Sequence) -> Deposit | None:
        """Old tokens are written to the host where the next draw makes it due."""
        return None if self.frontier is None else self._deposits.next_deposit(sequence)

    def write_down(self, running: Iterable[Sequence]) -> bool:
        """Whether one of these that is on the device whole is written to the host, and can give up pages then."""
        return self.is_adaptive and self._deposits.write_down(running)

    def take_written_down(self) -> list[tuple[Sequence, Deposit]]:
        """Deposits of these since the last call, and whose they are."""
        return [] if self.frontier is None else self._deposits.take_written_down()

    def ask(self, sequence: Sequence) -> HostAsk | None:
        """What a decode step reads of the sequence in host memory: what is released, by this plan as well."""
        context = sequence.open_context
        if context is None or not context.num_released:
            return None
        return HostAsk(context.context_id, self._host[0].sink_tokens, self._released_end(context))

    # --- what others may find -----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks of a context that is on the device wholly are findable once a plan computes them."""
        if sequence.open_context is None:
            self.prefixes.publish(sequence, num_tokens)

    def publish_run(self, sequence: Sequence, context: HostContext, num_blocks: int) -> None:
        """The first `num_blocks` of a context's run are down, unless the sequence has failed: then it is of no use."""
        if sequence.has_failed:
            self._host[1].discard(context)
        elif self.prefixes.is_enabled and not context.is_closed:
            num_sink = self._blocks(self._host[0].sink_tokens)
            hashes = self.prefixes.known_hashes(sequence)
            assert len(hashes) >= num_sink + num_blocks, "what goes down is known: the window is longer than a flight"
            end = min(num_sink + num_blocks, sequence.num_final_blocks)
            self.pages.publish(hashes, context.sink_pages, 0, min(num_sink, end))
            self._host[1].publish(context, hashes[num_sink:end])

    def retract(self, sequence: Sequence) -> None:
        """Its context gave no finite logits: none of its blocks is found any more, wherever it is."""
        self.prefixes.retract(sequence)
        if self.contexts is not None:
            self.contexts.retract(sequence.hashes)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, sequence: Sequence, is_kept: bool) -> None:
        """Give all back; `is_kept`: a deposited context stays, idle, for those that begin with its tokens."""
        context = sequence.left = sequence.context
        if context is None:
            self.pages.release(sequence.pages)
        else:
            first = len(sequence.pages)
            if context.is_open:
                first = self._blocks(self._host[0].sink_tokens)
            last = first + context.num_blocks
            self.pages.release(sequence.pages[:first] + sequence.pages[last:])
            self._deposits.forget(sequence)
            del self._host[2].holders[context]
            self._host[1].let_go(context, is_kept)
        sequence.context = None
        sequence.pages = []

    def grow_back(
        self, running: Iterable[Sequence], is_quiet: bool, is_ready: Callable[[HostAsk], bool]
    ) -> list[Fetch]:
        """What is brought up beside the next step, of what those that run have given up. `is_quiet`: nobody waits for
        pages or begins. `end_fetches` is to be called once the plan is carried out.
        """
        if not self.is_adaptive:
            return []
        num_coming_pages = sum(map(self.num_coming_pages, running)) if is_quiet else 0
        fetch = self._growing_back.next_fetch(is_quiet, num_coming_pages, is_ready)
        return [] if fetch is None else [fetch]

    def end_fetches(self) -> None:
        """Rows that were on their way up are there, or will be before the next step reads them."""
        if self.frontier is not None:
            self.frontier.end_restore()

    def take_restores(self) -> list[Restore]:
        """What came back since the last call."""
        return [] if self.frontier is None else self.frontier.take_restores()

    @property
    def num_restored_tokens(self) -> int:
        """That came back to the device, since the start; what contexts share counted once."""
        return 0 if self.frontier is None else self.frontier.num_restored * self._capacity.page_tokens

    def take_releases(self) -> list[Release]:
        """What was given up since the last call."""
        return [] if self.frontier is None else self.frontier.take_releases()

    def take_closed(self) -> list[int]:
        """Contexts closed since the last call."""
        return [] if self.contexts is None else self.contexts.take_closed()

    @property
    def num_promised_bytes(self) -> int:
        """Of host memory: what contexts have, and may have before anybody is asked again."""
        return 0 if self.contexts is None else self.contexts.used_bytes

    @property
    def num_deposited_tokens(self) -> int:
        """In host memory, what contexts share counted once."""
        return 0 if self.contexts is None else self.contexts.num_blocks * self._capacity.page_tokens

    @property
    def num_released_tokens(self) -> int:
        """Of those in host memory, what the device has of dense layers alone."""
        return 0 if self.contexts is None else self.contexts.num_released * self._capacity.page_tokens

    @property
    def num_resident_tokens(self) -> int:
        """On the device in all layers, of contexts of which a part is in host memory: sinks and windows as well, and
        what they share counted once.
        """
        if self.contexts is None or self.frontier is None:
            return 0
        down = [context for context in self.contexts if context.num_blocks]
        pages = {page for context in down for page in context.sink_pages}
        for context in down:
            if (sequence := self.frontier.holders.get(context)) is not None:
                pages.update(sequence.pages[len(context.sink_pages) + context.num_blocks :])
        num_blocks = self.contexts.num_blocks - self.contexts.num_released
        return (len(pages) + num_blocks) * self._capacity.page_tokens

    def num_idle_pages(self, kept: Collection[HostContext]) -> int:
        """Pages that are free once idle contexts are gone, all but `kept`."""
        return 0 if self.contexts is None else len(self.contexts.idle_pages(kept))

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _host(self) -> tuple[HostCapacity, HostContexts, Frontier]:
        assert self._capacity.host is not None
        assert self.contexts is not None
        assert self.frontier is not None
        return self._capacity.host, self.contexts, self.frontier

    def _blocks(self, num_tokens: int) -> int:
        return num_tokens // self._capacity.page_tokens

    def _prompt_end(self, sequence: Sequence) -> int:
        if self._capacity.host is None or not self.profile_of(sequence).goes_down:
            return 0
        if self.is_adaptive:
            return self._capacity.host.prompt_end(sequence.num_tokens)
        return self._capacity.host.run_end(sequence.num_prompt_tokens, sequence.num_tokens)

    def _settled_end(self, sequence: Sequence) -> int:
        """Of a prompt's run, what is released when its prefill ends, where residence is fixed; and where what it may
        share ends.
        """
        if self.is_adaptive:
            return sequence.run_end
        return self._host[0].settled_end(sequence.num_prompt_tokens, sequence.num_tokens)

    def _admitted_size(self, sequence: Sequence, num_shared: int, end: int) -> RunSize:
        """The run that a sequence is admitted with: its prompt's, to `end`, and that of some output."""
        host = self._host[0]
        most = min(sequence.num_prompt_tokens + sequence.request.max_tokens, sequence.num_tokens + _AHEAD_TOKENS)
        num_run = self._blocks(end - host.sink_tokens)
        num_blocks = self._blocks(host.most_run_tokens(most))
        return RunSize(num_shared, num_run - num_shared, num_blocks, self.profile_of(sequence).is_sampled)

    def num_coming_pages(self, sequence: Sequence) -> int:
        """What one that holds pages may take soon: as much as a window holds and the dense layers of what it will send
        down, or one page where all of it stays.
        """
        context = sequence.open_context
        if context is None:
            return 1
        num_there = context.num_blocks if self.is_adaptive else context.num_released
        coming = self._num_coming_blocks(context.size, num_there - context.size.num_shared)
        return self._most_window_pages - (len(sequence.pages) - num_there) + coming

    @property
    def _most_window_pages(self) -> int:
        """What one keeps in resident pages that has written all it may: where residence is fixed, also while the last
        of it settles.
        """
        host = self._host[0]
        settling = 0 if self.is_adaptive else self._capacity.pages_for(SETTLING_TOKENS)
        return self._blocks(host.sink_tokens + host.window_tokens + host.lump_tokens) + settling

    def _released_end(self, context: HostContext) -> int:
        """Where what is released of it ends."""
        return self._host[0].sink_tokens + context.num_released * self._capacity.page_tokens

    # --- room ---------------------------------------------------------------------------------------------------------

    def _need(self, sequence: Sequence, end: int, num_shared: int, with_sink: bool) -> "_Need":
        """Of a prompt whose run ends at `end`, `num_shared` blocks of it another's."""
        host = self._host[0]
        num_sink, num_run = self._blocks(host.sink_tokens), self._blocks(end - host.sink_tokens)
        num_window = sequence.num_pages - num_sink - num_run
        size = self._admitted_size(sequence, num_shared, end)
        num_released = 0
        if not self.is_adaptive:
            num_released = max(0, self._blocks(self._settled_end(sequence) - host.sink_tokens) - num_shared)
        num_own = num_run - num_shared
        num_there = num_own if self.is_adaptive else num_released
        num_new = num_window + num_sink * with_sink
        num_resident = num_sink + num_window + num_own - num_there
        num_spare = self._most_window_pages - num_resident + self._num_coming_blocks(size, num_there)
        return _Need(num_own, num_new, num_spare, size, num_released)

    def _least_pages(self, need: _Need) -> int:
        """For a prompt's own blocks, as many of them released as may be."""
        num_released = need.num_own if self.is_adaptive else need.num_released
        return need.num_own - num_released + self._host[0].layout.blocks_for(num_released)

    def _fits_beside(self, sequence: Sequence, source: HostContext, num_shared: int) -> bool:
        """Whether there are pages for a prompt beside what its source keeps, all others gone."""
        contexts = self._host[1]
        need = self._need(sequence, sequence.run_end, num_shared, with_sink=False)
        num_least = need.num_new + need.num_spare + self._least_pages(need)
        return num_least + contexts.num_standing(source) <= self.pages.num_pages

    def _free_pages(self, num_pages: int, kept: Collection[HostContext]) -> bool:
        """Whether so many are free. What the host has gives way to that, and then idle contexts, but not `kept`."""
        if self.contexts is None or self.frontier is None:
            return num_pages <= self.pages.num_available
        if self.is_adaptive and num_pages > self.pages.num_available and self.frontier.num_yielding:
            self.frontier.end_restore()
            self.frontier.yield_pages(num_pages, self.frontier.yielding())
        return self.contexts.free_pages(num_pages, kept)

    def _num_to_release(self, need: _Need, num_other: int, source: HostContext | None) -> int:
        """How many of a prompt's own blocks begin released, so that `num_other` pages are left: all that must.

        Idle contexts give up theirs first, the source's last.
        """
        if not self.is_adaptive:
            return need.num_released
        host, _, frontier = self._host
        num_own = need.num_own
        idle = [one for one in frontier.yielding() if not one.is_held]
        frontier.yield_pages(num_own + num_other, [one for one in idle if one is not source])
        if source is not None and num_own + num_other > self.pages.num_available:
            frontier.yield_pages(num_own + num_other, [source])
        num_free, lump = self.pages.num_available - num_other, self._blocks(host.lump_tokens)
        blocks_for = host.layout.blocks_for
        fewest = bisect_left(range(num_own), True, key=lambda num: num_own - num + blocks_for(num) <= num_free)
        return min(num_own, -(-fewest // lump) * lump)

    def _num_coming_blocks(self, size: RunSize, num_own: int) -> int:
        """Pages that the dense layers take of what is paid for and not written yet, behind `num_own` blocks."""
        blocks_for = self._host[0].layout.blocks_for
        return max(0, blocks_for(size.num_own) - blocks_for(num_own))

    def _needs_page(self, sequence: Sequence) -> bool:
        return sequence.next_cell // self._capacity.page_tokens >= len(sequence.pages)
