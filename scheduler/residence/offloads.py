"""Decide when the next tokens of a running sequence are offloaded to host memory."""

from collections.abc import Iterable

from gpu.step import Offload
from scheduler.cache.page_pool import PagePool
from scheduler.residence.evictions import Evictor
from scheduler.residence.host_contexts import HostContexts
from scheduler.sequences.capacity import HostCapacity
from scheduler.sequences.offloaded_context import HostContext, RunSize
from scheduler.sequences.sequence import Sequence


class Offloads:
    def __init__(
        self,
        host: HostCapacity,
        contexts: HostContexts,
        evictor: Evictor,
        pages: PagePool,
    ) -> None:
        self._host = host
        self._contexts = contexts
        self._evictor = evictor
        self._pages = pages
        self._offloaded_short: list[tuple[Sequence, Offload]] = []  # for the current plan

    def reserve(self, sequence: Sequence) -> bool:
        """Reserve host memory for the offload that the next draw makes due, if any; False if there is no room."""
        end = self._end(sequence)
        if not end:
            return True
        num_blocks = self._host.blocks_of_run(end)
        if sequence.context is not None:
            return self._contexts.grow(sequence.context, num_blocks)
        return self._open(sequence, num_blocks)

    def num_dense_pages(self, sequence: Sequence) -> int:
        """Return the dense pages that a sequence takes if blocks that land at the next draw are evicted at once."""
        context = sequence.open_context
        if self._evictor.is_adaptive or context is None or not self._lands(sequence, context):
            return 0
        return self._host.layout.blocks_for(context.num_own) - len(context.storage)

    def land(self, sequence: Sequence) -> None:
        """Note that offloaded rows have landed by the next draw.

        Fixed residence evicts them at once, by token counts alone, before other sequences take the pages that were
        reserved for the dense layers.
        """
        context = sequence.open_context
        if context is None or not self._lands(sequence, context):
            return
        context.num_landed = context.num_blocks
        if not self._evictor.is_adaptive:
            given = self._evictor.evict_to(context, context.num_landed)
            assert given, "room for dense pages was made when the offload was reserved"

    def take_due(self, stepping: Iterable[Sequence]) -> list[tuple[Sequence, Offload]]:
        """Return the next plan's offloads: short contexts, to make room, and those that the next draws make due."""
        due, self._offloaded_short = self._offloaded_short, []
        for sequence in stepping:
            end = self._end(sequence) if sequence.wants_draw else 0
            if end:
                due.append((sequence, self._write(sequence, end)))
        return due

    def most_known(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens may follow the next draw's in its step, at most `most`, without making an
        offload due.
        """
        if not sequence.profile.offloads:
            return most
        context, host = sequence.open_context, self._host.of(sequence.profile.name)
        run_end = None if context is None else self._run_end(context)
        for ahead in range(1, most + 1):
            num_tokens = sequence.next_position + 1 + ahead
            is_landing = context is not None and context.num_landed < context.num_blocks
            if host.offload_end(num_tokens, run_end) or (is_landing and host.has_landed(num_tokens, run_end or 0)):
                return ahead - 1
        return most

    def offload_short(self, running: Iterable[Sequence]) -> bool:
        """Offload a short context that is wholly on the device, so that its pages can be evicted; False: there is none.

        The context whose tokens cost the host least comes first, and of these the longest. The whole offload blocks
        between its sink and its window are offloaded.
        """
        for sequence in sorted(filter(self._is_resident, running), key=self._turn):
            end = self._middle_end(sequence)
            num_blocks = self._host.blocks_of_run(end)
            own = sequence.pages[self._host.num_sink_blocks :][:num_blocks]
            num_freed = sum(self._pages.num_holders(page) == 1 for page in own)
            if num_freed > self._host.layout.blocks_for(num_blocks) and self._open(sequence, num_blocks):
                self._offloaded_short.append((sequence, self._write(sequence, end)))
                return True
        return False

    def forget(self, sequence: Sequence) -> None:
        """Forget the offload of a sequence that is preempted in the same plan, so that the device never sees it."""
        left = [entry for entry in self._offloaded_short if entry[0] is not sequence]
        if len(left) < len(self._offloaded_short) and sequence.context is not None:
            sequence.context.is_open = False
        self._offloaded_short = left

    # --- inside -------------------------------------------------------------------------------------------------------

    def _run_end(self, context: HostContext) -> int:
        return self._host.end_of_blocks(context.num_blocks)

    def _end(self, sequence: Sequence) -> int:
        """Return where the run ends after the offload that the next draw makes due; 0: it makes none."""
        if not sequence.profile.offloads:
            return 0
        context = sequence.open_context
        run_end = None if context is None else self._run_end(context)
        return self._host.of(sequence.profile.name).offload_end(sequence.next_position + 1, run_end)

    def _lands(self, sequence: Sequence, context: HostContext) -> bool:
        """Return whether all offloaded rows of its context have landed at the next draw."""
        return self._host.of(sequence.profile.name).has_landed(sequence.next_position + 1, self._run_end(context))

    def _open(self, sequence: Sequence, num_blocks: int) -> bool:
        """Add a context of `num_blocks` blocks that the sequence holds; False if there is no room."""
        reading = sequence.profile.reading
        context = self._contexts.add(RunSize(0, num_blocks, num_blocks, reading), None)
        if context is not None:
            self._evictor.hold(sequence, context)
        return context is not None

    def _write(self, sequence: Sequence, end: int) -> Offload:
        """Plan the offload of the run up to `end`, for which host memory is reserved."""
        context, host = sequence.context, self._host
        assert context is not None, "an offload is planned after its room is reserved"
        is_new_context = not context.is_open
        if is_new_context:
            self._contexts.keep_sink(context, sequence.pages[: host.num_sink_blocks])
            context.is_open = True
        begin = self._run_end(context)
        page_ids = sequence.pages[begin // host.page_tokens : end // host.page_tokens]
        self._contexts.append(context, page_ids)
        reading = sequence.profile.reading
        return Offload(sequence.slot, context.context_id, begin, end, tuple(page_ids), is_new_context, reading)

    def _is_resident(self, sequence: Sequence) -> bool:
        """Return whether a sequence may be offloaded, is wholly on the device, and has a middle to offload."""
        offloads = sequence.profile.offloads and sequence.context is None
        return offloads and self._middle_end(sequence) > self._host.sink_tokens

    def _middle_end(self, sequence: Sequence) -> int:
        host = self._host.of(sequence.profile.name)
        num_tokens = sequence.next_position - host.window_tokens - host.sink_tokens
        return host.sink_tokens + num_tokens // host.offload_block_tokens * host.offload_block_tokens

    def _turn(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.profile.reading.cost_order, -sequence.next_position
