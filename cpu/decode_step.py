"""Attend for a decode step over host contexts: the table of pieces of every layer, and the host requests of the device.

A table of pieces is made again only if a context's pieces or its number of requested tokens have changed. Other steps
cost a dictionary look-up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cpu.audits import Audits
from cpu.builder import Builder
from cpu.host_attention import HostAttention
from cpu.host_context import Context
from cpu.lease import Lease, Loans, SegmentLoan
from cpu.pieces import (
    BEGIN,
    CENTRE,
    COLUMNS,
    END,
    EXACT,
    FOLLOWERS,
    KEY_HEAD,
    KEY_ROW,
    KEY_SCALE,
    KEYS,
    MODE,
    PIECE,
    REQUEST,
    RUN_BEGIN,
    SAMPLED,
    VALUE_HEAD,
    VALUE_ROW,
    VALUE_SCALE,
    VALUES,
)
from cpu.segment import TableState
from cpu.segment_store import SegmentStore
from transfer.exchange import ExchangeSlot, late
from transfer.host_tier import Answered

HOST_REQUEST_LIMIT_S = 20.0  # for the device to reach a layer: a step behind a whole prefill unit takes a second or two
MOST_TABLES = 64  # batches whose tables are cached: half batches of a few groups, and those of earlier steps
QUERY_TYPES = {torch.bfloat16: np.uint16, torch.float32: np.float32}

_Cut = tuple[int, int]  # a context's version, and how many of its tokens
_Table = tuple[np.ndarray, Lease]  # PIECE [layers, pieces], on the segments that they lie in
_Part = tuple[np.ndarray, ExchangeSlot, Sequence[Context | None]]  # PIECE [layers, pieces], the rows' contexts
_NO_VERSION = -1
_LENT = [RUN_BEGIN, END, KEYS, KEY_HEAD, KEY_ROW, VALUES, VALUE_HEAD, VALUE_ROW, CENTRE, KEY_SCALE, VALUE_SCALE]


@dataclass(slots=True)
class AttentionCounts:
    """Sums over all host requests. wait_s: idle time waiting for the device. rows_read: keys, and as many values.
    bytes_read: of rows and hash tables. tokens_covered: for each wanted head, without excluded tokens; keys_scored:
    those of them whose keys were read.
    """

    host_requests: int = 0
    wait_s: float = 0.0
    attend_s: float = 0.0
    rows_read: int = 0
    bytes_read: int = 0
    tokens_covered: int = 0
    keys_scored: int = 0


class PieceTables:
    """A cache of tables of pieces, by context and by batch. A batch is a sequence of (context, tokens); the context is
    None for rows without host reads.

    Adjacent rows with the same read share its pieces if none is sampled, at most `most_sharing` rows. Tables are kept
    as int64, because numpy copies structures field by field. store: holds the segments that leases are on.
    """

    def __init__(self, num_layers: int, most_sharing: int, store: SegmentStore) -> None:
        self._num_layers, self._most_sharing, self._store = num_layers, most_sharing, store
        self._contexts: dict[int, tuple[_Cut, np.ndarray]] = {}  # by context id
        self._batches: dict[tuple[_Cut, ...], _Table] = {}

    def find(self, batch: Sequence[tuple[Context | None, int]]) -> _Table | None:
        """Return PIECE `[layers, pieces]` of a batch and a lease to begin, if cached and up to date; else None."""
        return self._batches.get(tuple(_cut(context, tokens) for context, tokens in batch))

    def knows(self, context: Context, tokens: int) -> bool:
        """Return whether a context's first `tokens` tokens are cached, and the context has not changed since."""
        known = self._contexts.get(context.context_id)
        return known is not None and known[0] == _cut(context, tokens)

    def make(self, batch: Sequence[tuple[Context | None, int]]) -> _Table:
        """Make and cache what `find` returns; context i is request i. Call it once rows and tables are complete."""
        shares = self._share(batch)
        parts = [self._of_context(*batch[first]) for first, _ in shares]
        columns, sizes = np.concatenate(parts, axis=1), [part.shape[1] for part in parts]  # [layers, pieces, COLUMNS]
        columns[:, :, REQUEST] = np.repeat([first for first, _ in shares], sizes)
        columns[:, :, FOLLOWERS] = np.repeat([count - 1 for _, count in shares], sizes)
        read = {piece.segment for context, tokens in batch if context for piece in context.first_pieces(tokens)}
        table = columns.view(PIECE)[:, :, 0], Lease([*read], self._store)
        if len(self._batches) >= MOST_TABLES:
            self._batches.clear()
        self._batches[tuple(_cut(context, tokens) for context, tokens in batch)] = table
        return table

    def forget(self, context: Context) -> None:
        self._contexts.pop(context.context_id, None)
        self._batches = {
            key: table for key, table in self._batches.items() if all(version != context.version for version, _ in key)
        }

    def _share(self, batch: Sequence[tuple[Context | None, int]]) -> list[tuple[int, int]]:
        """Cut the batch into rows that share pieces: return pairs (first row, number of rows), in order."""
        shares: list[tuple[int, int]] = []
        for row, (context, tokens) in enumerate(batch):
            first, count = shares[-1] if shares else (0, self._most_sharing)
            is_same = context is not None and batch[first] == (context, tokens) and count < self._most_sharing
            if is_same and not any(piece.reading.has_tables for piece in context.first_pieces(tokens)):  # type: ignore[union-attr]
                shares[-1] = first, count + 1
            else:
                shares.append((row, 1))
        return shares

    def _of_context(self, context: Context | None, tokens: int) -> np.ndarray:
        if context is None:
            return np.empty((self._num_layers, 0, COLUMNS), np.int64)
        if self.knows(context, tokens):
            return self._contexts[context.context_id][1]
        pieces, run_begin = context.first_pieces(tokens), 0
        columns = np.empty((self._num_layers, len(pieces), COLUMNS), np.int64)
        for index, piece in enumerate(pieces):
            columns[:, index] = piece.segment.places()
            columns[:, index, END] = piece.tokens
            columns[:, index, RUN_BEGIN] = run_begin
            built = [state is TableState.BUILT for state in piece.segment.tables]
            columns[:, index, MODE] = np.where(built, SAMPLED, EXACT) if piece.reading.has_tables else EXACT
            run_begin += piece.tokens
        self._contexts[context.context_id] = _cut(context, tokens), columns
        return columns


def _cut(context: Context | None, tokens: int) -> _Cut:
    return (_NO_VERSION, 0) if context is None else (context.version, tokens)


class Attend:
    """The compiled attention for queries of one dtype, with its threads, the builder's gate, the counts and the loans.

    leaves_core: whether a core is left to the launching thread (`transfer.host_tier.HostTier.leave_core`).
    """

    def __init__(
        self, kernel: HostAttention, num_threads: int, builder: Builder, counts: AttentionCounts, audits: Audits | None
    ) -> None:
        """audits: audits of answers' estimated errors, or None."""
        self.kernel, self.builder, self.counts, self.audits = kernel, builder, counts, audits
        self.loans = Loans()
        self.leaves_core = False
        self._num_threads = num_threads

    @property
    def num_threads(self) -> int:
        """Return the number of threads for the next answers. Cores of the builder, and the one left to launches, are
        not used: all threads of an attention would wait for one whose core is taken.
        """
        return self._num_threads - self.builder.num_busy_cores - self.leaves_core


class StepAttention:
    """The attention of one step; see `transfer.host_tier.Attention`.

    The builder pauses from the first layer's request to the last layer's answer. The time between two layers is shorter
    than one piece of its work, and every thread of an attention would wait for the slowest.
    """

    def __init__(self, table: np.ndarray, lease: Lease, attend: Attend, contexts: Sequence[Context | None]) -> None:
        """Begin the lease. table: PIECE `[layers, pieces]`; row i of the slot is request i, of context i."""
        self.table, self.contexts, self._attend = table, contexts, attend
        self._lease: Lease | None = lease
        self._pauses = False
        lease.begin()

    def run(self, layer: int, slot: ExchangeSlot) -> None:
        """Answer one layer's request. Raises ExchangeError if the device does not send it in time."""
        try:
            self._pauses = True
            _answer(self._attend, [(self.table[layer : layer + 1], slot, self.contexts)], layer)
        except BaseException:
            self.give_up()
            raise
        if layer == len(self.table) - 1:
            self.give_up()

    def give_up(self) -> None:
        """End the step, finished or not: resume the builder and release the segments. A second call does nothing."""
        if self._pauses:
            self._attend.builder.go_on()
            self._pauses = False
        if self._lease is not None:
            self._lease.end()
            self._lease = None

    def places(self, row: int) -> np.ndarray:
        columns = self.table.view(np.int64).reshape(*self.table.shape, COLUMNS)
        ahead = row - columns[0, :, REQUEST]
        own = columns[:, (ahead >= 0) & (ahead <= columns[0, :, FOLLOWERS])]  # [layers, pieces, COLUMNS]
        assert not own[..., BEGIN].any(), "places: pieces begin where their segments do"
        lent = own[..., _LENT].swapaxes(1, 2)
        lent[:, 1] += lent[:, 0]
        return np.ascontiguousarray(lent)

    def lend(self) -> SegmentLoan:
        assert self._lease is not None, "lend: the step is under way"
        return self._attend.loans.begin(self._lease)


def answer_step(attend: Attend, parts: Sequence[tuple[StepAttention, ExchangeSlot]]) -> Answered:
    """Answer all host requests of a step in one call: layer by layer, and in each layer part by part. No Python runs
    between two of them.

    A slot's current host request is the first one before the call, and the last one after it. Raises ExchangeError if
    the device does not send one in time.
    """
    try:
        return _answer(attend, [(attention.table, slot, attention.contexts) for attention, slot in parts], 0)
    finally:
        attend.builder.go_on()
        for attention, _ in parts:
            attention.give_up()


def _answer(attend: Attend, parts: Sequence[_Part], first_layer: int) -> Answered:
    """Answer the host requests of all parts, from `first_layer` on. The parts' tables are PIECE `[layers, pieces]`.

    Afterwards a slot's current host request is its last, or the one that did not come. The builder runs until the first
    layer's request arrives, and then pauses.
    """
    counts, kernel, gate = attend.counts, attend.kernel, None if first_layer else attend.builder.gate
    noted = [_new_errors(attend, part, first_layer) for part in parts]
    host_requests = np.stack(
        [kernel.host_requests_in(slot, table, *noting) for (table, slot, _), noting in zip(parts, noted, strict=True)],
        axis=1,
    )  # [layers, parts, columns]
    answered = kernel.answer(
        host_requests.reshape(-1, host_requests.shape[-1]), attend.num_threads, HOST_REQUEST_LIMIT_S, gate
    )
    counts.host_requests += answered.host_requests
    counts.wait_s += (answered.idle_ns + answered.waited_ns) / 1e9
    counts.attend_s += answered.attended_ns / 1e9
    counts.rows_read += answered.rows
    counts.bytes_read += answered.rows * kernel.row_bytes + answered.index_bytes
    counts.tokens_covered += answered.covered
    counts.keys_scored += answered.keys
    layers, place = divmod(answered.host_requests, len(parts))
    for index, (_, slot, _) in enumerate(parts):
        slot.advance(slot.rows, min(layers + (index < place), len(host_requests) - 1))
    if answered.host_requests < host_requests.shape[0] * len(parts):
        raise late(parts[place][1], first_layer + layers, HOST_REQUEST_LIMIT_S)
    if attend.audits is not None:
        for (_, _, contexts), (errors, full) in zip(parts, noted, strict=True):
            assert errors is not None, "errors: of every part, where they are estimated"
            attend.audits.note(contexts, errors, full, first_layer)
        if first_layer + layers == attend.audits.layers:
            attend.audits.end_step()
    return Answered(answered.waited_ns / 1e9, answered.attended_ns / 1e9)


def _new_errors(attend: Attend, part: _Part, first_layer: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return an array for the errors of a part's requests, and the mask of heads that read all keys, for
    `HostAttention.host_requests_in`; None each if errors are not estimated.
    """
    if attend.audits is None:
        return None, None
    table, slot, contexts = part
    full = attend.audits.full(contexts, slot.rows, first_layer, first_layer + len(table))
    return attend.audits.new_errors(len(table), slot.rows), full
