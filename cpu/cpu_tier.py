"""Implement the host tier (`transfer.host_tier.HostTier`): contexts in the CPU's memory, and attention over them.

With fixed residence, answers depend on the sequence of calls alone, and not on when copies land or tables are built.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cpu.attend_rate import attend_alike_rows, best_seconds
from cpu.audits import Audits, ErrorCounts
from cpu.builder import Builder
from cpu.cores import share_cores
from cpu.decode_step import QUERY_TYPES, Attend, AttentionCounts, PieceTables, StepAttention, answer_step
from cpu.growth import Growth, SegmentReservation
from cpu.host_attention import Compiled, HostAttention
from cpu.host_context import Context
from cpu.lease import Lease
from cpu.segment import ROW_TYPES
from cpu.segment_store import SegmentStore
from transfer.exchange import ExchangeSlot
from transfer.host_config import ErrorsConfig
from transfer.host_pages import map_pages, pin_pages, unpin_pages
from transfer.host_tier import (
    Answered,
    Attention,
    ContextLostError,
    ContextRead,
    Filled,
    HostMemoryError,
    LayerRows,
    LentRows,
    Reservation,
)
from transfer.reading import Reading
from transfer.slabs import PageSource, SlabPool
from transfer.tier_shape import TierShape

log = logging.getLogger(__name__)

_RATE_TOKENS = 32_768  # tokens that a rate is measured on: more bytes than caches hold
_RATE_REPEATS = 3

MAX_MAPPING_THREADS = 4  # threads that map, touch and pin slabs: more would only wait for the kernel's locks


@dataclass(frozen=True, slots=True)
class TierStats:
    """The tier's memory and its counts since the start.

    bytes_in_use: by contexts. bytes_held: in use, idle or being allocated. limit_bytes: of held bytes.
    tables_built, tables_failed: layers of segments; a failed one is read exactly.
    merges, merges_dropped: merges of small segments, and those that were dropped for lack of memory.
    """

    contexts: int
    tokens: int
    segments: int
    leases: int
    bytes_in_use: int
    bytes_held: int
    bytes_pinned: int
    limit_bytes: int
    tables_built: int
    tables_failed: int
    merges: int
    merges_dropped: int
    attention: AttentionCounts
    errors: ErrorCounts

    @property
    def method_counts(self) -> dict[str, int]:
        """Return the counts of single methods, by the names under which these declare them (`host_counters`)."""
        return {
            "host_tables_built": self.tables_built,
            "host_tables_failed": self.tables_failed,
            "host_answers_estimated": self.errors.estimated,
            "host_answers_heavy": self.errors.heavy,
            "host_answers_beyond_bound": self.errors.beyond,
            "host_answers_heavy_beyond_bound": self.errors.heavy_beyond,
            "host_steps_beyond_bound": self.errors.steps_beyond,
            "host_answers_in_full": self.errors.in_full,
        }


def compiled_for(shape: TierShape, query_dtype: torch.dtype) -> Compiled:
    """Return the compile parameters of attention to rows of this shape. query_dtype: bfloat16 or float32."""
    return Compiled(
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        dim=shape.dim,
        row_type=ROW_TYPES[shape.rows][0],
        query_type=QUERY_TYPES[query_dtype],
        bits=max(shape.bits_per_table, 1),
        tables=max(shape.num_tables, 2),  # without tables nothing is sampled, and these values are not used
        scale=shape.dim**-0.5,
    )


class CpuTier:
    """The host tier of an engine, with all its host contexts. Called from one thread."""

    def __init__(
        self, shape: TierShape, query_dtype: torch.dtype, limit_bytes: int, num_threads: int, source: PageSource,
        errors: ErrorsConfig | None = None, is_adaptive: bool = False,
    ) -> None:  # fmt: skip
        """Compile the attention, or read it from numba's cache.

        query_dtype: bfloat16 or float32. num_threads: of attention. errors: settings of error estimates, or None.
        is_adaptive: whether the choice of tokens to sample may depend on timing.

        Raises ValueError for a shape that the kernels do not support, RuntimeError for a CPU without AVX2.
        """
        self.shape = shape
        kernel = HostAttention(compiled_for(shape, query_dtype), num_threads, estimates=errors is not None)
        audits = None if errors is None else Audits(errors, len(shape.layers), shape.num_heads)
        self._errors = ErrorCounts() if audits is None else audits.counts
        self._pool = SlabPool(limit_bytes, "host.memory_limit_gib", source, min(MAX_MAPPING_THREADS, num_threads))
        self._cores = share_cores(num_threads)
        log.info(
            "host_cores attention=%d while_building=%d while_launching=%d",
            num_threads, num_threads - self._cores.building, num_threads - self._cores.launching,
        )  # fmt: skip
        self._builder = Builder(self._cores.builders, self._cores.building)
        self._store = SegmentStore(self._pool, self._builder)
        self._growth = Growth(shape, self._store, is_adaptive)
        self._attend = Attend(kernel, num_threads, self._builder, AttentionCounts(), audits)
        self._tables = PieceTables(len(shape.layers), kernel.most_sharing, self._store)
        self._contexts: dict[int, Context] = {}

    def open(self, context_id: int, reading: Reading) -> None:
        """Open a new, empty context. reading: how attention reads it."""
        assert context_id not in self._contexts, "context: opened once"
        self._contexts[context_id] = Context(context_id, reading.on_cpu(self.shape.num_tables))

    def fork(self, source_id: int, context_id: int, num_tokens: int, reading: Reading) -> None:
        """Open a context that shares the first `num_tokens` tokens of another."""
        source = self._contexts[source_id]
        self.open(context_id, reading)
        context = self._contexts[context_id]
        context.pieces = source.first_pieces(num_tokens)
        context.take_readings(source)
        with self._store.changed:
            for piece in context.pieces:
                piece.segment.want()
                piece.reading = piece.reading if context.reading is source.reading else Reading.WHOLE
        if context.reading is not source.reading:
            context.sample_sealed()

    def close(self, context_id: int) -> None:
        """Close a context; an unknown id is ignored. Memory that no other context shares is freed once its fills have
        landed and all steps that read it are answered.

        Copies to it that were not announced by `fill` must have ended.
        """
        context = self._contexts.pop(context_id, None)
        if context is None:
            return
        self._tables.forget(context)
        self._growth.drop_merge(context)
        with self._store.changed:
            for piece in context.pieces:
                piece.segment.leave(context_id)
                piece.segment.give_up()

    def reserve(self, context_id: int, num_tokens: int) -> list[Reservation]:
        """Reserve room for `num_tokens` more tokens, in order. Raises HostMemoryError without changing anything."""
        return [*self._growth.reserve(self._contexts[context_id], num_tokens, list(self._contexts.values()))]

    def fill(self, reservation: Reservation, layers: Sequence[int], done: Filled) -> None:
        """Announce that rows of these layers (with codes, centre and scales) are being copied. They have landed once
        `done` is reached.
        """
        assert isinstance(reservation, SegmentReservation), "fill: a reservation of this tier"
        first, num_tokens = reservation.first, reservation.end - reservation.begin
        self._store.fill(reservation.segment, layers, first, first + num_tokens, done)

    def rows(self, context_id: int, layer: int, num_tokens: int) -> list[LayerRows]:
        """Return rows of the first `num_tokens` tokens for a reload, without codes. Waits for their copies."""
        pieces = self._contexts[context_id].first_pieces(num_tokens)
        for piece in pieces:
            self._store.wait_for_rows(piece.segment, (layer,), piece.tokens)
        return [piece.segment.rows(layer, 0, piece.tokens, with_codes=False) for piece in pieces]

    def lend_rows(self, context_id: int, num_tokens: int) -> LentRows | None:
        """Lend rows of the first `num_tokens` tokens to a thread that reads them. None if they have not all landed."""
        context = self._contexts.get(context_id)
        if context is None or context.tokens < num_tokens:
            return None
        pieces = context.first_pieces(num_tokens)
        for piece in pieces:
            if piece.segment.error is not None or not self._store.is_ready(piece.segment, piece.tokens, False):
                return None
        lease = Lease([piece.segment for piece in pieces], self._store)
        lease.begin()
        layers = range(len(self.shape.layers))
        rows = tuple(
            tuple(piece.segment.rows(layer, 0, piece.tokens, with_codes=False) for piece in pieces) for layer in layers
        )
        return LentRows(rows, lease.end)

    def runs(self, context_id: int) -> list[tuple[int, Reading]]:
        """Return a context's pieces in order: how many tokens, and how attention reads them."""
        return [(piece.tokens, piece.reading) for piece in self._contexts[context_id].pieces]

    def is_ready(self, read: ContextRead) -> bool:
        """Return whether `attention` would begin, or fail, without waiting. False if the context has fewer tokens."""
        context = None if read.context_id is None else self._contexts.get(read.context_id)
        if read.num_tokens == 0 or context is None:
            return read.num_tokens == 0
        if context.tokens < read.num_tokens or self._tables.knows(context, read.num_tokens):
            return context.tokens >= read.num_tokens
        pieces = context.first_pieces(read.num_tokens)
        return all(self._store.is_ready(piece.segment, piece.tokens, piece.reading.has_tables) for piece in pieces)

    def attention(self, reads: Sequence[ContextRead]) -> StepAttention:
        """Return the attention of a decode step, with a lease on the segments that it reads. reads: one for each row.

        Waits until the requested rows have landed and their tables are built, but not for later tokens. Raises
        ContextLostError for the first context whose rows are lost.
        """
        batch = [(self._context_of(read), read.num_tokens) for read in reads]
        found = self._tables.find(batch)
        if found is None:
            for context, tokens in batch:
                if context is not None and not self._tables.knows(context, tokens):
                    self._wait_for(context, tokens)
            found = self._tables.make(batch)
        return StepAttention(*found, self._attend, [context for context, _ in batch])

    def attend_seconds(self, num_rows: int) -> float:
        """Measure and return the seconds of attention to one token of one layer, for rows that read it together."""
        attend = self._attend
        num_rows = min(num_rows, attend.kernel.most_sharing)
        call, _ = attend_alike_rows(attend.kernel, self.shape, attend.num_threads, _RATE_TOKENS, num_rows)
        return best_seconds(call, _RATE_REPEATS) / _RATE_TOKENS

    def leave_core(self, leaves: bool) -> None:
        """Leave a core to the launching thread, or take it back. Does nothing on few cores (`cpu.cores`)."""
        self._attend.leaves_core = leaves and bool(self._cores.launching)

    def answer(self, parts: Sequence[tuple[Attention, ExchangeSlot]]) -> Answered:
        """Answer all host requests of a step. Raises ExchangeError if the device does not send one in time."""
        own = [(attention, slot) for attention, slot in parts if isinstance(attention, StepAttention)]
        assert len(own) == len(parts), "answer: attention of this tier"
        return answer_step(self._attend, own)

    def stats(self) -> TierStats:
        """Return the tier's memory, and the counts since its start."""
        counts = self._store.counts
        return TierStats(
            contexts=len(self._contexts),
            tokens=sum(context.tokens for context in self._contexts.values()),
            segments=counts.segments,
            leases=counts.leases,
            bytes_in_use=self._pool.bytes_in_use,
            bytes_held=self._pool.bytes_held,
            bytes_pinned=self._pool.bytes_pinned,
            limit_bytes=self._pool.limit_bytes,
            tables_built=counts.tables_built,
            tables_failed=counts.tables_failed,
            merges=self._growth.merges,
            merges_dropped=self._growth.merges_dropped,
            attention=replace(self._attend.counts),
            errors=replace(self._errors),
        )

    def shutdown(self) -> None:
        """Close all contexts. Wait for fills and attentions to end, and release threads and memory."""
        for context_id in list(self._contexts):
            self.close(context_id)
        self._store.wait_for_doomed()
        self._attend.loans.shutdown()
        self._store.shutdown()
        self._builder.shutdown()
        self._pool.shutdown()

    def _context_of(self, read: ContextRead) -> Context | None:
        """Return the context of a read, or None for a read of nothing."""
        if read.num_tokens == 0:
            return None
        assert read.context_id is not None, "context read: tokens are asked of a context"
        return self._contexts[read.context_id]

    def _wait_for(self, context: Context, tokens: int) -> None:
        for piece in context.first_pieces(tokens):
            try:
                self._store.wait_for_rows(piece.segment, range(len(self.shape.layers)), piece.tokens)
            except HostMemoryError as error:
                raise ContextLostError(context.context_id, str(error)) from error
            if piece.reading.has_tables:
                self._store.wait_for_tables(piece.segment)


def open_tier(
    shape: TierShape, query_dtype: torch.dtype, limit_bytes: int, num_threads: int, is_pinned: bool,
    errors: ErrorsConfig | None = None, is_adaptive: bool = False,
) -> CpuTier:  # fmt: skip
    """Return a tier in this host's memory. is_pinned: register it with CUDA, so that the device can copy into it. The
    other arguments are those of `CpuTier`.
    """
    pin, unpin = (pin_pages, unpin_pages) if is_pinned else (None, None)
    return CpuTier(shape, query_dtype, limit_bytes, num_threads, PageSource(map_pages, pin, unpin), errors, is_adaptive)
