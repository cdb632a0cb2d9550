"""Grow host contexts: room for more tokens in the open tail or in new segments, and merges of small segments.

- A reservation may wait for memory, but not for the tables of a merge. A failed reservation changes nothing.
- With fixed residence a context's pieces depend on its past token counts alone, and readers wait for an incomplete
  merge. With adaptive residence a merge begins, and takes effect, only when nothing has to wait for it.
- An open tail belongs to one context. Another context that shares its first tokens gets a copy of them when it grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cpu.host_context import MERGE_DUE_SHARE, Context, ContextPiece, Merge
from cpu.segment import Centre, Segment
from cpu.segment_jobs import Source
from cpu.segment_store import SegmentStore
from transfer.host_memory import TAIL_TOKENS, is_bulk, shape_for, split_tokens
from transfer.host_tier import HostMemoryError, LayerRows
from transfer.reading import Reading
from transfer.tier_shape import TierShape

PREPARE_TOKENS = TAIL_TOKENS // 4  # with so little room left, memory for the next tail is prepared
MOST_PREPARED = 8  # tails prepared at once: many contexts may be nearly full and yet never grow again


@dataclass(frozen=True, slots=True)
class SegmentReservation:
    """Room for tokens `[begin, end)` of a context, at `first` of a segment. See `transfer.host_tier.Reservation`."""

    begin: int
    end: int
    has_centre: bool
    segment: Segment
    first: int

    def layer(self, layer: int) -> LayerRows:
        """Return the rows of a layer. Waits for memory; raises HostMemoryError if the host has none."""
        return self.segment.rows(layer, self.first, self.first + self.end - self.begin, with_codes=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The steps of a reservation.

    appended: tokens for the open tail.
    copied_tail: capacity of a copy that replaces the tail, or 0.
    seals_tail: whether the tail is sealed.
    opened: tokens and capacity of each new segment.
    """

    appended: int
    copied_tail: int
    seals_tail: bool
    opened: tuple[tuple[int, int], ...]


class Growth:
    """Makes reservations and merges for all contexts of a tier. merges: how many took effect. merges_dropped: how many
    were dropped for lack of memory.
    """

    def __init__(self, shape: TierShape, store: SegmentStore, is_adaptive: bool) -> None:
        self._shape, self._store, self._is_adaptive = shape, store, is_adaptive
        self.merges = self.merges_dropped = 0

    def reserve(self, context: Context, num_tokens: int, others: Sequence[Context]) -> list[SegmentReservation]:
        """Reserve room for `num_tokens` more tokens. Raises HostMemoryError without changing anything.

        others: further contexts. Their merges may be dropped if memory is short. Memory for their next tails is
        prepared too, because several may be due before the next reservation.
        """
        assert num_tokens > 0, "reserve: one token or more"
        shape = shape_for(self._shape, context.reading)
        plan = self._plan(context, num_tokens, shape)
        last = context.pieces[-1] if context.pieces else None
        continued = last.segment.centre if last else None
        bulk = is_bulk(num_tokens)
        rooms: list[tuple[int, Centre | None]] = [(plan.copied_tail, continued)] if plan.copied_tail else []
        rooms += [(capacity, None if bulk else continued) for _, capacity in plan.opened]
        segments = self._new_segments(shape, rooms, [context, *others])
        if plan.copied_tail:
            self._require_memory(segments)
        self._update_merges(context)
        begin, reservations = context.tokens, []
        if plan.copied_tail:
            self._replace_tail(context, segments.pop(0))
        if plan.seals_tail:
            self._store.seal(context.pieces[-1].segment)
            context.pieces[-1].reading = context.reading
        if plan.appended:
            tail = context.pieces[-1]
            reservations.append(self._append(context, tail, plan.appended, begin, has_centre=True))
        for (tokens, _), segment in zip(plan.opened, segments, strict=True):
            begin = context.tokens
            context.pieces.append(ContextPiece(segment, 0, context.reading if bulk else Reading.WHOLE))
            has_centre = not bulk and continued is not None
            reservations.append(self._append(context, context.pieces[-1], tokens, begin, has_centre))
        context.touch()
        if _is_nearly_full(context):
            alike = [one for one in others if one is not context and one.reading is context.reading]
            self._store.prepare(shape, TAIL_TOKENS, min(1 + sum(map(_is_nearly_full, alike)), MOST_PREPARED))
        return reservations

    def drop_merge(self, context: Context) -> None:
        """Drop a merge that has not taken effect."""
        if context.merge is not None:
            with self._store.changed:
                context.merge.target.give_up()
            context.merge = None

    def _plan(self, context: Context, num_tokens: int, shape: TierShape) -> _Plan:
        last = context.pieces[-1] if context.pieces else None
        bulk = is_bulk(num_tokens)
        goes_on = last is not None and last.segment.is_open and last.segment.has_codes == (shape.num_tables > 0)
        filled = last.tokens if last is not None and goes_on else TAIL_TOKENS
        copied = 0
        if last is not None and goes_on and not last.segment.may_append(context.context_id, last.tokens):
            copied = last.tokens if bulk else TAIL_TOKENS
        if bulk:
            seals = goes_on and shape.num_tables > 0
            return _Plan(0, copied if seals else 0, seals, tuple((size, size) for size in split_tokens(num_tokens)))
        appended = min(num_tokens, TAIL_TOKENS - filled)
        rest = num_tokens - appended
        return _Plan(appended, copied, False, ((rest, TAIL_TOKENS),) if rest else ())

    def _append(
        self, context: Context, piece: ContextPiece, tokens: int, begin: int, has_centre: bool
    ) -> SegmentReservation:
        with self._store.changed:
            piece.segment.owner_id = context.context_id
            first = piece.segment.take(tokens)
        piece.tokens += tokens
        return SegmentReservation(begin, begin + tokens, has_centre, piece.segment, first)

    def _replace_tail(self, context: Context, copy: Segment) -> None:
        """Copy the first tokens of another context's open tail into a segment of this context."""
        shared = context.pieces.pop()
        with self._store.changed:
            copy.take(shared.tokens)
        self._store.copy([Source(shared.segment, 0, shared.tokens)], copy)
        context.pieces.append(ContextPiece(copy, shared.tokens, Reading.WHOLE))
        with self._store.changed:
            shared.segment.give_up()

    def _new_segments(
        self, shape: TierShape, rooms: Sequence[tuple[int, Centre | None]], contexts: Sequence[Context]
    ) -> list[Segment]:
        """Return new segments. If memory is short, drop the contexts' merges and wait for closing segments, even if
        that means waiting for a step in flight.
        """
        try:
            return self._store.new_segments(shape, rooms)
        except HostMemoryError:
            for context in contexts:
                self.merges_dropped += context.merge is not None
                self.drop_merge(context)
            self._store.wait_for_doomed()
            return self._store.new_segments(shape, rooms)

    def _require_memory(self, segments: Sequence[Segment]) -> None:
        """Wait for the first segment's memory, or release all segments and raise HostMemoryError. The first one is the
        target of a copy, which no reservation waits for.
        """
        try:
            self._wait_for_memory(segments[0])
        except HostMemoryError:
            with self._store.changed:
                for segment in segments:
                    segment.give_up()
            raise

    def _update_merges(self, context: Context) -> None:
        """Apply merges and seals that are due, and begin the next merge."""
        merge = context.merge
        merging = context.find_merge() if merge is None else None
        if merge is not None and context.tokens >= merge.due_tokens:
            self._finish_merge(context, merge)
        context.sample_sealed()
        if merging is not None:
            self._begin_merge(context, *merging)

    def _begin_merge(self, context: Context, first: int, last: int) -> None:
        """Begin to copy pieces into one segment. With fixed residence this waits for their tables. A step that has read
        these pieces since the last reservation has waited for them already.
        """
        pieces = context.pieces[first:last]
        if self._is_adaptive and not all(self._stands(piece.segment) for piece in pieces):
            return
        for piece in pieces:
            self._store.wait_for_tables(piece.segment)
        if not context.can_merge(first, last):
            return
        tokens = sum(piece.tokens for piece in pieces)
        shape, centre = pieces[0].segment.shape, pieces[0].segment.centre
        try:
            (target,) = self._new_segments(shape, [(tokens, centre)], [])
        except HostMemoryError:
            self.merges_dropped += 1
            return
        target.is_background = True
        with self._store.changed:
            target.take(tokens)
        self._store.copy([Source(piece.segment, 0, piece.tokens) for piece in pieces], target)
        context.merge = Merge(first, last, target, context.tokens + tokens // MERGE_DUE_SHARE)

    def _finish_merge(self, context: Context, merge: Merge) -> None:
        target = merge.target
        if self._is_adaptive and not self._stands(target):
            return  # until then the pieces are read
        try:
            self._wait_for_memory(target)
        except HostMemoryError:  # already logged
            self.merges_dropped += 1
            self.drop_merge(context)
            return
        merged = context.pieces[merge.first : merge.last]
        context.pieces[merge.first : merge.last] = [ContextPiece(target, target.used, context.reading)]
        context.merge = None
        self.merges += 1
        with self._store.changed:
            target.is_background = False
            for piece in merged:
                piece.segment.give_up()

    def _stands(self, segment: Segment) -> bool:
        """Return whether the rows and tables of a merge's target are complete."""
        return self._store.is_ready(segment, segment.used, with_tables=True)

    def _wait_for_memory(self, segment: Segment) -> None:
        for layer in range(len(self._shape.layers)):
            segment.wait_for_memory(layer)


def _is_nearly_full(context: Context) -> bool:
    """Return whether a tail is nearly full, so that the context soon needs its next one."""
    return bool(context.pieces) and context.pieces[-1].segment.room <= PREPARE_TOKENS
