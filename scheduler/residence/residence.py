"""Keys and values of sequences: pages on the device, and contexts in host memory for what is offloaded.

Offloaded tokens keep their pages while nobody needs them, and lose them at once where they do; nothing is computed
again. Invariant: `sequence.pages` has a page for each position, in order. Those of its context's run are the context's,
dense ones in front; the sequence holds all others.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS
from gpu.step import FinishedReload, HostRead, PageEviction, PageWrite, Reload
from scheduler.cache.block_events import BlockEvents
from scheduler.cache.conversations import Conversations
from scheduler.cache.idle_pages import NOBODY
from scheduler.cache.page_pool import Memory, PagePool
from scheduler.cache.prefix_cache import PrefixCache
from scheduler.cache.window_pool import Windows
from scheduler.residence.disk_contexts import DiskContexts, DiskSide
from scheduler.residence.evictions import Evictor
from scheduler.residence.host_contexts import HostContexts
from scheduler.residence.offloaded_prompts import OffloadedPrompts, Start
from scheduler.residence.offloads import Offloads
from scheduler.residence.page_room import PageRoom
from scheduler.residence.residence_counts import ResidenceCounts
from scheduler.sequences.capacity import Capacity
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State
from transfer.reading import Reading

Shortage = Literal["pages", "host", "index"]


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of contexts in host memory that the device has yet to hear of."""

    closed_contexts: tuple[int, ...] = ()
    finished_reloads: tuple[FinishedReload, ...] = ()
    evictions: tuple[PageEviction, ...] = ()


class Residence:
    """The place of each context: its pages, and its blocks in host memory.

    model_key: names the model in prefix hashes.
    page_memory, window_memory: allocate pages and windows on demand; None: all are there from the start.
    disk: where contexts are kept as well; None: nowhere.
    contexts, evictor: None where every context stays on the device.
    """

    def __init__(
        self, capacity: Capacity, prefix_cache: bool, model_key: bytes,
        page_memory: Memory | None = None, window_memory: Memory | None = None, disk: DiskSide | None = None,
        session_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self.page_tokens = page_tokens = capacity.page_tokens
        self._capacity = capacity
        self.pages = PagePool(0, capacity.num_pages, prefix_cache, page_memory)
        self.conversations = Conversations(page_tokens, capacity.num_pages, session_seconds)
        self.pages.idle.ranks = self.conversations
        self.windows = Windows(
            capacity.num_windows, capacity.spare_window_tokens, page_tokens, prefix_cache, window_memory,
            capacity.snapshot_tokens, capacity.num_host_states, self.conversations,
        )  # fmt: skip
        self.prefixes = PrefixCache(self.pages, self.windows, page_tokens, prefix_cache, model_key)
        self.contexts: HostContexts | None = None
        self.evictor: Evictor | None = None
        self.prompts: OffloadedPrompts | None = None
        self.offloads: Offloads | None = None
        host = capacity.host
        self.num_sink_blocks = 0 if host is None else host.num_sink_blocks
        if host is not None:
            self.contexts = HostContexts(host, self.pages, prefix_cache, self.conversations)
            self.evictor = Evictor(host, self.contexts, self.pages)
        self.disk = DiskContexts(disk, self.pages, page_tokens, self.contexts, self.num_sink_blocks, self.windows)
        self.room = PageRoom(capacity, self.pages, self.contexts, self.evictor)
        self.counts = ResidenceCounts(page_tokens, self.contexts, self.evictor)
        if host is not None and self.contexts is not None and self.evictor is not None:
            self.prompts = OffloadedPrompts(host, self.contexts, self.evictor, self.pages, self.room, self.windows)
            self.offloads = Offloads(host, self.contexts, self.evictor, self.pages)

    @property
    def is_adaptive(self) -> bool:
        """Return whether what is in host memory stays on the device while nobody needs its pages; not so
        without a host.
        """
        return self.evictor is not None and self.evictor.is_adaptive

    def tell_blocks(self) -> BlockEvents:
        """Return what follows which blocks can be found, from now on: nothing may be published yet but on disk."""
        store = None if self.disk.side is None else self.disk.side.store
        events = BlockEvents(self.page_tokens, 0 if store is None else store.block_tokens)
        self.pages.events = events
        if self.contexts is not None:
            self.contexts.events = events
        if store is not None:
            store.watch_blocks(events.move_record)
        return events

    def cached_from(self, start: Start) -> dict[str, int]:
        """Return where the tokens are that a prompt need not compute: how many by place."""
        sink = 0 if start.source is None else self.num_sink_blocks * self.page_tokens
        from_host = start.begin - sink if start.source is not None else 0
        return {"card": start.begin - from_host, "host": from_host, "disk": start.first_computed - start.begin}

    # --- prompts ------------------------------------------------------------------------------------------------------

    def await_room(self, sequence: Sequence) -> None:
        """Note the pages and the offloaded run that a waiting sequence will have; they do not change while it waits."""
        sequence.num_pages = -(-sequence.num_tokens // self.page_tokens)
        sequence.run_end = 0 if self.prompts is None else self.prompts.run_end(sequence)
        self.prefixes.await_blocks(sequence)

    def num_uncached_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a waiting sequence that are neither in pages nor in host memory now."""
        return sequence.num_tokens - self.page_tokens * self.windows.last_end(
            sequence.hashes, self._count_rows(sequence), sequence.border_blocks
        )

    def _count_rows(self, sequence: Sequence) -> int:
        """Count the blocks in front whose keys and values are in pages or in host memory, as the prompt has them."""
        end = max(sequence.num_known_blocks, sequence.num_usable_blocks)
        if not sequence.run_end or self.contexts is None:
            return self.pages.count_known(sequence.hashes, sequence.num_known_blocks, end)
        last = min(sequence.run_end // self.page_tokens, end)
        source, shared = self.contexts.find(sequence.hashes, self.num_sink_blocks, max(self.num_sink_blocks, last))
        return 0 if source is None else self.num_sink_blocks + shared

    def num_computed_again(self, sequence: Sequence, start: Start) -> int:
        """Count the tokens that a prompt computes though their keys and values are there, since no window or state is
        kept behind them.
        """
        if not self.windows.count:
            return 0
        rows = self._count_rows(sequence) // sequence.border_blocks * sequence.border_blocks
        return max(0, rows * self.page_tokens - start.first_computed)

    def take(self, sequence: Sequence, start: Start, num_spare: int, kept: Collection[HostContext]) -> bool:
        """Give the sequence what its prompt needs, if that leaves `num_spare` pages; else nothing.

        A prompt with a window needs few pages more than it has. Room for all of them is left, so that no long prompt is
        computed twice for want of a page. Idle contexts but `kept` are dropped for it.
        """
        if start.end and self.prompts is not None:
            return self.prompts.take(sequence, start, num_spare, kept)
        num_front = sequence.num_known_blocks if sequence.finds_live else start.begin // self.page_tokens
        front = self.pages.prefix_pages(sequence.hashes, num_front)
        self.pages.hold(front.array)
        last = self.prefixes.take_live(sequence) if sequence.finds_live else []  # pages that are its own
        num_new = sequence.num_pages - len(front.page_ids) - len(last)
        if not self.room.could_free_pages(num_new + num_spare, kept) or not self.room.free_pages(num_new, kept):
            self.pages.release(front.page_ids + last)
            return False
        sequence.pages = front.page_ids + last + self.pages.allocate(num_new)
        return True

    def start_prefill(self, sequence: Sequence, start: Start) -> None:
        """Give a window to a sequence that begins there, and note the blocks that its prefill computes, or reads."""
        begin = start.begin
        if sequence.finds_live:
            self.windows.take_live(sequence)
            begin = sequence.num_known_blocks * self.page_tokens  # of what others may find
        else:
            num_seen = 0 if sequence.run_end else sequence.num_seen_blocks
            self.windows.take(sequence, start.first_computed // self.page_tokens, num_seen, start.disk_end > 0)
        self.prefixes.forget_live(sequence)
        self.prefixes.start(sequence, begin)

    def finish_prefill(self, sequence: Sequence) -> None:
        """Let others find a prompt, and mark what it offloaded as written: the plan under way ends its prefill."""
        self.prefixes.stop(sequence)
        context = sequence.context
        if context is not None and self.prompts is not None and self.evictor is not None:
            self.prompts.finish_prefill(sequence, context)
            if context.parent is not None and context.num_evicted:
                self.evictor.allow_reload_now()
        self.prefixes.publish(sequence, sequence.num_tokens)
        self.windows.keep_prompt(sequence)

    # --- running ------------------------------------------------------------------------------------------------------

    def may_grow(self, sequence: Sequence) -> bool:
        """Return whether the next draw may take a page or memory of the host."""
        return self.offloads is not None or self._needs_page(sequence)

    def find_shortage(self, sequence: Sequence, kept: Collection[HostContext]) -> Shortage | None:
        """Make room for the next draw and the offload that it makes due; return what is short of that, or None.

        Idle contexts but `kept` are dropped for it.
        """
        num_pages = int(self._needs_page(sequence))
        if self.offloads is not None:
            if not self.offloads.reserve(sequence):
                return "host"
            num_pages += self.offloads.num_dense_pages(sequence)
        return "pages" if num_pages and not self.room.free_pages(num_pages, kept) else None

    def grow(self, sequence: Sequence) -> list[PageWrite]:
        """Take the page that the next token begins, if it begins one, and evict what settles with it.

        `find_shortage` has made room, and is called for nobody else in between.
        """
        if self.offloads is not None:
            self.offloads.land(sequence)
        if self.windows.wants_snapshot(sequence):
            self.prefixes.known_hashes(sequence)
            self.windows.snapshot(sequence)
        if not self._needs_page(sequence):
            return []
        write = PageWrite(sequence.slot, len(sequence.pages), tuple(self.pages.allocate(1)))
        sequence.pages += write.page_ids
        return [write]

    def most_known(self, sequence: Sequence, most: int, num_spare: int) -> int:
        """Return how many tokens may follow the next draw's in its step, at most `most`.

        That leaves `num_spare` pages, and nobody is preempted or evicted for it.
        """
        self.pages.reach(num_spare + most // self.page_tokens + 1)
        num_pages = len(sequence.pages) + max(0, self.pages.num_available - num_spare)
        most = min(most, num_pages * self.page_tokens - sequence.next_position - 1)
        if self.windows.snapshot_tokens is not None:
            most = self.windows.most_behind(sequence, min(most, MOST_STEP_ROWS - 1))
        elif self.windows.count:
            most = min(most, self._capacity.spare_window_tokens)  # or they take the place of what the first ones see
        if most <= 0 or self.offloads is None:
            return max(most, 0)
        return self.offloads.most_known(sequence, most)

    def settle_draft(self, sequence: Sequence) -> None:
        """Note what a draft of a sequence has come to, whose tokens in flight are those that were drawn."""
        self.windows.note_settled(sequence)
        if sequence.live and sequence.state is State.WAITING:
            sequence.num_live_tokens = sequence.next_position

    def grow_known(self, sequence: Sequence, num_tokens: int) -> list[PageWrite]:
        """Take the pages of so many tokens behind the next draw's: no more than `most_known` says."""
        self.windows.note_written(sequence, sequence.next_position + 1 + num_tokens)
        num_pages = (sequence.next_position + num_tokens) // self.page_tokens + 1 - len(sequence.pages)
        if num_pages <= 0:
            return []
        write = PageWrite(sequence.slot, len(sequence.pages), tuple(self.pages.allocate(num_pages)))
        sequence.pages += write.page_ids
        return [write]

    def offload_short(self, running: Iterable[Sequence]) -> bool:
        """Return whether a running sequence that is on the device whole is offloaded, so that its pages can be
        evicted.
        """
        return self.offloads is not None and self.is_adaptive and self.offloads.offload_short(running)

    def host_read(self, sequence: Sequence) -> HostRead | None:
        """Return what a decode step reads of the sequence in host memory: what is evicted, by this plan as well."""
        if sequence.context is None:
            return None
        context, host = sequence.open_context, self._capacity.host
        if context is None or host is None or not context.num_evicted:
            return None
        reads_all = sequence.profile.reading is Reading.WHOLE
        return HostRead(context.context_id, host.sink_tokens, host.end_of_blocks(context.num_evicted), reads_all)

    # --- what others may find -----------------------------------------------------------------------------------------

    def publish_run(self, sequence: Sequence, context: HostContext, num_blocks: int) -> None:
        """Publish the first `num_blocks` of a context's run, unless the sequence has failed: then it is discarded."""
        assert self.contexts is not None
        if sequence.has_failed:
            self.contexts.discard(context)
        elif self.prefixes.is_enabled and not context.is_closed:
            num_sink = self.num_sink_blocks
            hashes = self.prefixes.known_hashes(sequence)
            assert len(hashes) >= num_sink + num_blocks, (
                "what is offloaded is known: the window is longer than a flight"
            )
            end = min(num_sink + num_blocks, sequence.num_final_blocks)
            self.prefixes.describe(sequence, num_sink + len(context.hashes) if context.hashes else 0, end)
            self.pages.publish(hashes, context.sink_pages, 0, min(num_sink, end))
            self.contexts.publish(context, hashes[num_sink:end])

    def retract(self, sequence: Sequence) -> None:
        """Withdraw all blocks of a context that gave no finite logits, wherever they are."""
        self.prefixes.retract(sequence)
        if self.contexts is not None:
            self.contexts.retract(sequence.hashes)
        self.disk.retract(sequence)

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, sequence: Sequence, is_kept: bool, goes_on: bool = False) -> None:
        """Give all back; `is_kept`: its window and its offloaded context stay, idle, for prompts that begin alike.
        goes_on: it waits to be admitted again, and leaves what it can begin with behind its last computed token.
        """
        has_live = self.windows.snapshot_tokens is not None and sequence.window is not None
        if goes_on and is_kept and has_live and sequence.context is None:
            self.prefixes.leave_live(sequence)
        self.windows.give_back(sequence, is_kept)
        self.conversations.leave(sequence)
        context = sequence.left_context = sequence.context
        if context is None:
            self._release(sequence, sequence.pages, [])
        else:
            self._leave_context(sequence, context, is_kept)
        sequence.context = None
        sequence.pages = []

    def num_final_blocks(self, sequence: Sequence) -> int:
        """Return how many of a sequence's blocks in front are final, and known in pages or host memory."""
        if sequence.context is None:
            return sequence.num_published
        context = sequence.open_context
        return 0 if context is None else self.num_sink_blocks + len(context.hashes)

    def _leave_context(self, sequence: Sequence, context: HostContext, is_kept: bool) -> None:
        """Give back the pages in front of its run and behind it; those of the run are the context's."""
        assert self.contexts is not None
        assert self.evictor is not None
        assert self.offloads is not None
        first = self.num_sink_blocks if context.is_open else len(sequence.pages)
        last = first + context.num_blocks
        self._release(sequence, sequence.pages[:first], sequence.pages[last:])
        if sequence.conversation is not None:
            context.owner = sequence.conversation.number
        self.offloads.forget(sequence)
        del self.evictor.holders[context]
        self.contexts.release(context, is_kept)

    # --- reloads ------------------------------------------------------------------------------------------------------

    def next_reload(
        self, running: Iterable[Sequence], is_quiet: bool, is_ready: Callable[[HostRead], bool]
    ) -> list[Reload]:
        """Return what is reloaded beside the next step, of what running sequences had evicted.

        is_quiet: nobody waits for pages or begins. `finish_reload` is to be called once the plan is carried out.
        """
        if self.evictor is None or not self.evictor.is_adaptive:
            return []
        num_coming_pages = sum(map(self.room.num_coming_pages, running)) if is_quiet else 0
        reload = self.evictor.next_reload(is_quiet, num_coming_pages, is_ready)
        return [] if reload is None else [reload]

    def finish_reload(self) -> None:
        """Finish a reload: its rows are there, or will be before the next step reads them."""
        if self.evictor is not None:
            self.evictor.finish_reload()

    # --- what the device is told of -----------------------------------------------------------------------------------

    def take_changes(self) -> "Changes":
        """Return what was closed, reloaded and evicted since the last call."""
        if self.evictor is None or self.contexts is None:
            return Changes()
        reloads, evictions = self.evictor.take_moves()
        return Changes(tuple(self.contexts.take_closed()), tuple(reloads), tuple(evictions))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _release(self, sequence: Sequence, first_pages: list[int], other_pages: list[int]) -> None:
        """Release pages of a sequence, those of its first blocks and others, for its conversation to find again."""
        one, front = sequence.conversation, sequence.front
        num_front = 0 if front is None else min(front.num_blocks, len(first_pages))
        self.pages.release(first_pages[num_front:] + other_pages, NOBODY if one is None else one.number)
        if front is not None:
            self.pages.release(first_pages[:num_front], front.number)

    def _needs_page(self, sequence: Sequence) -> bool:
        return sequence.next_position // self.page_tokens >= len(sequence.pages)
