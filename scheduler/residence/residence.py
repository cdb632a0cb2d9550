"""Place keys and values of sequences: pages on the device, and contexts in host memory for offloaded tokens.

Offloaded tokens keep their pages while no request needs these. If one does, the pages are evicted at once, and nothing
is computed again. Invariant: `sequence.pages` has a page for each position, in order. The pages of offloaded tokens
belong to the sequence's host context, evicted ones (dense pages) first. The sequence holds all others.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from gpu.operations.recurrent.state_arrays import MOST_STEP_ROWS
from gpu.step import HostRead, PageWrite
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
from scheduler.sequences.capacity import Capacity
from scheduler.sequences.offloaded_context import HostContext
from scheduler.sequences.sequence import Sequence, State
from transfer.reading import Reading

Shortage = Literal["pages", "host", "index"]


class Residence:
    """Manages where each context lies: its pages on the device, its blocks in host memory and on disk.

    model_key: names the model in prefix hashes.
    page_memory, window_memory: allocate pages and windows on demand; None: all are allocated from the start.
    disk: contexts on disk; None: there are none.
    contexts, evictor: None if every context stays on the device.
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
        if host is not None and self.contexts is not None and self.evictor is not None:
            self.prompts = OffloadedPrompts(host, self.contexts, self.evictor, self.pages, self.room, self.windows)
            self.offloads = Offloads(host, self.contexts, self.evictor, self.pages)

    @property
    def is_adaptive(self) -> bool:
        """Return whether offloaded tokens keep their pages until these are needed; False without a host tier."""
        return self.evictor is not None and self.evictor.is_adaptive

    def tell_blocks(self) -> BlockEvents:
        """Start to record which blocks can be found. Only blocks on disk may be published before."""
        store = None if self.disk.side is None else self.disk.side.store
        events = BlockEvents(self.page_tokens, 0 if store is None else store.block_tokens)
        self.pages.events = events
        if self.contexts is not None:
            self.contexts.events = events
        if store is not None:
            store.watch_blocks(events.move_record)
        return events

    def cached_from(self, start: Start) -> dict[str, int]:
        """Count a prompt's cached tokens, by the place where they were found."""
        sink = 0 if start.source is None else self.num_sink_blocks * self.page_tokens
        from_host = start.begin - sink if start.source is not None else 0
        return {"card": start.begin - from_host, "host": from_host, "disk": start.first_computed - start.begin}

    # --- prompts ------------------------------------------------------------------------------------------------------

    def await_room(self, sequence: Sequence) -> None:
        """Note how many pages and offloaded tokens a waiting sequence will have; they do not change while it waits."""
        sequence.num_pages = -(-sequence.num_tokens // self.page_tokens)
        sequence.run_end = 0 if self.prompts is None else self.prompts.run_end(sequence)
        self.prefixes.await_blocks(sequence)

    def num_uncached_tokens(self, sequence: Sequence) -> int:
        """Count the tokens of a waiting sequence that are neither in pages nor in host memory now."""
        return sequence.num_tokens - self.page_tokens * self.windows.last_end(
            sequence.hashes, self._count_rows(sequence), sequence.border_blocks
        )

    def _count_rows(self, sequence: Sequence) -> int:
        """Count the prompt's blocks, from the first one on, whose keys and values are in pages or host memory."""
        end = max(sequence.num_known_blocks, sequence.num_usable_blocks)
        if not sequence.run_end or self.contexts is None:
            return self.pages.count_known(sequence.hashes, sequence.num_known_blocks, end)
        last = min(sequence.run_end // self.page_tokens, end)
        source, shared = self.contexts.find(sequence.hashes, self.num_sink_blocks, max(self.num_sink_blocks, last))
        return 0 if source is None else self.num_sink_blocks + shared

    def num_computed_again(self, sequence: Sequence, start: Start) -> int:
        """Count the tokens that a prompt computes although their keys and values are cached.

        They are computed again because no window or state is kept at their end.
        """
        if not self.windows.count:
            return 0
        rows = self._count_rows(sequence) // sequence.border_blocks * sequence.border_blocks
        return max(0, rows * self.page_tokens - start.first_computed)

    def take(self, sequence: Sequence, start: Start, num_spare: int, kept: Collection[HostContext]) -> bool:
        """Give the sequence the pages of its prompt, if that leaves `num_spare` free; else give nothing, return False.

        `OffloadedPrompts.take` is for prompts that are offloaded in part. Running sequences may soon take the spare
        pages; without them a long prompt might be preempted and computed twice. Idle contexts other than `kept` are
        dropped for it.
        """
        num_front = sequence.num_known_blocks if sequence.finds_live else start.begin // self.page_tokens
        front = self.pages.prefix_pages(sequence.hashes, num_front)
        self.pages.hold(front.array)
        last = self.prefixes.take_live(sequence) if sequence.finds_live else []  # pages that it left for itself
        num_new = sequence.num_pages - len(front.page_ids) - len(last)
        if not self.room.could_free_pages(num_new + num_spare, kept) or not self.room.free_pages(num_new, kept):
            self.pages.release([*front.page_ids, *last])
            return False
        sequence.pages = [*front.page_ids, *last, *self.pages.allocate(num_new)]
        return True

    def start_prefill(self, sequence: Sequence, start: Start) -> None:
        """Give a window to a sequence that starts its prefill, and note the blocks that it computes or reads."""
        begin = start.begin
        if sequence.finds_live:
            self.windows.take_live(sequence)
            begin = sequence.num_known_blocks * self.page_tokens  # the part that others may find
        else:
            num_seen = 0 if sequence.run_end else sequence.num_seen_blocks
            self.windows.take(sequence, start.first_computed // self.page_tokens, num_seen, start.disk_end > 0)
        self.prefixes.forget_live(sequence)
        self.prefixes.start(sequence, begin)

    def finish_prefill(self, sequence: Sequence) -> None:
        """Publish a prompt and mark its offloaded blocks as written: the current plan ends its prefill."""
        self.prefixes.stop(sequence)
        context = sequence.context
        if context is not None and self.prompts is not None and self.evictor is not None:
            self.prompts.finish_prefill(sequence, context)
            if context.parent is not None and context.num_evicted:
                self.evictor.allow_reload_now()
        self.prefixes.publish(sequence, sequence.num_tokens)
        self.windows.keep_prompt(sequence)

    # --- running ------------------------------------------------------------------------------------------------------

    def needs_page(self, sequence: Sequence) -> bool:
        """Return whether the next draw begins a page."""
        return sequence.next_position // self.page_tokens >= len(sequence.pages)

    def find_shortage(self, sequence: Sequence, kept: Collection[HostContext]) -> Shortage | None:
        """Make room for the next draw and the offload that it makes due; return what is short, or None.

        Idle contexts other than `kept` are dropped for it.
        """
        num_pages = int(self.needs_page(sequence))
        if self.offloads is not None:
            if not self.offloads.reserve(sequence):
                return "host"
            num_pages += self.offloads.num_dense_pages(sequence)
        return "pages" if num_pages and not self.room.free_pages(num_pages, kept) else None

    def grow(self, sequence: Sequence) -> list[PageWrite]:
        """Allocate a page if the next token begins one, and evict the offloaded blocks that have landed by then.

        `find_shortage` must have made room, with no call for another sequence in between.
        """
        if self.offloads is not None:
            self.offloads.land(sequence)
        if self.windows.wants_snapshot(sequence):
            self.prefixes.known_hashes(sequence)
            self.windows.snapshot(sequence)
        if not self.needs_page(sequence):
            return []
        write = PageWrite(sequence.slot, len(sequence.pages), tuple(self.pages.allocate(1)))
        sequence.pages += write.page_ids
        return [write]

    def most_known(self, sequence: Sequence, most: int, num_spare: int) -> int:
        """Return how many tokens may follow the next draw's in its step, at most `most`.

        Their pages leave `num_spare` free, and no sequence is preempted and nothing evicted for them.
        """
        self.pages.reach(num_spare + most // self.page_tokens + 1)
        num_pages = len(sequence.pages) + max(0, self.pages.num_available - num_spare)
        most = min(most, num_pages * self.page_tokens - sequence.next_position - 1)
        if self.windows.snapshot_tokens is not None:
            most = self.windows.most_behind(sequence, min(most, MOST_STEP_ROWS - 1))
        elif self.windows.count:
            most = min(most, self._capacity.spare_window_tokens)  # more would overwrite what the first of them sees
        if most <= 0 or self.offloads is None:
            return max(most, 0)
        return self.offloads.most_known(sequence, most)

    def end_draft(self, sequence: Sequence) -> None:
        """Note the outcome of a sequence's draft: the tokens in flight are now those that were accepted."""
        self.windows.note_accepted(sequence)
        if sequence.live and sequence.state is State.WAITING:
            sequence.num_live_tokens = sequence.next_position

    def grow_known(self, sequence: Sequence, num_tokens: int) -> list[PageWrite]:
        """Allocate pages for `num_tokens` after the next draw's, at most what `most_known` returned."""
        self.windows.note_written(sequence, sequence.next_position + 1 + num_tokens)
        num_pages = (sequence.next_position + num_tokens) // self.page_tokens + 1 - len(sequence.pages)
        if num_pages <= 0:
            return []
        write = PageWrite(sequence.slot, len(sequence.pages), tuple(self.pages.allocate(num_pages)))
        sequence.pages += write.page_ids
        return [write]

    def offload_short(self, running: Iterable[Sequence]) -> bool:
        """Offload a running sequence that is wholly on the device, to evict its pages; False if there is none."""
        return self.offloads is not None and self.is_adaptive and self.offloads.offload_short(running)

    def host_read(self, sequence: Sequence) -> HostRead | None:
        """Return the evicted tokens that a decode step reads in host memory, those of this plan included; or None."""
        if sequence.context is None:
            return None
        context, host = sequence.open_context, self._capacity.host
        if context is None or host is None or not context.num_evicted:
            return None
        reads_all = sequence.profile.reading is Reading.WHOLE
        return HostRead(context.context_id, host.sink_tokens, host.end_of_blocks(context.num_evicted), reads_all)

    # --- what others may find -----------------------------------------------------------------------------------------

    def publish_run(self, sequence: Sequence, context: HostContext, num_blocks: int) -> None:
        """Publish the first `num_blocks` of a host context; discard the context if the sequence has failed."""
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
        """Give back all that a sequence holds.

        is_kept: its window and host context stay, idle, for prompts with the same prefix. goes_on: the sequence is
        preempted, and leaves what it needs to continue after its last computed token.
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
        """Count a sequence's blocks, from the first one on, that are final and known in pages or host memory."""
        if sequence.context is None:
            return sequence.num_published
        context = sequence.open_context
        return 0 if context is None else self.num_sink_blocks + len(context.hashes)

    def _leave_context(self, sequence: Sequence, context: HostContext, is_kept: bool) -> None:
        """Give back the pages before and after the offloaded run; the run's own pages belong to the context."""
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

    # --- inside -------------------------------------------------------------------------------------------------------

    def _release(self, sequence: Sequence, first_pages: list[int], other_pages: list[int]) -> None:
        """Release a sequence's pages; its conversation, or its front, becomes their owner in the prefix cache."""
        one, front = sequence.conversation, sequence.front
        num_front = 0 if front is None else min(front.num_blocks, len(first_pages))
        self.pages.release(first_pages[num_front:] + other_pages, NOBODY if one is None else one.number)
        if front is not None:
            self.pages.release(first_pages[:num_front], front.number)
