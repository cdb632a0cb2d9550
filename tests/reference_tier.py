"""Stand in for the host tier in tests of the device side: rows in plain tensors, exact attention over them in float64.

There are no hash tables and no threads: a sampled context is read whole as well. Invariants: fresh rows are NaN (codes
65535, int8 rows -128) until the device writes them, and rows that nobody filled are never read: that is an error.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.int4_reference import unpack
from transfer import places
from transfer.exchange import ExchangeSlot
from transfer.host_tier import (
    Answered,
    Attention,
    ContextRead,
    Filled,
    HostMemoryError,
    HostTier,
    LayerRows,
    Passed,
    Reservation,
)
from transfer.reading import Reading
from transfer.tier_shape import TierShape

SECONDS_TO_WAIT_FOR_A_QUERY = 20.0
LOOK_S = 2e-5  # between two looks at a flag: the other side may need the interpreter, or the core
UNWRITTEN_CODE = 65_535
UNWRITTEN = {
    "bfloat16": (torch.bfloat16, float("nan")), "int8": (torch.int8, -128), "int4": (torch.uint8, 0xFF),
}  # fmt: skip


class Landed:
    """Copies that had landed before anyone asked."""

    def synchronize(self) -> None:
        pass


@dataclass(eq=False)
class Chunk:
    """Rows of one reservation, `layers[i]` each; `done[i]` once the device has filled them."""

    layers: list[LayerRows]
    num_tokens: int
    done: dict[int, Filled] = field(default_factory=dict)

    def read(self, layer: int) -> LayerRows:
        assert layer in self.done, f"reference tier: rows of layer {layer} are read before they were filled"
        self.done[layer].synchronize()
        return self.layers[layer]


@dataclass
class Piece:
    """Tokens `[begin, end)` of a chunk, in a context's order."""

    chunk: Chunk
    begin: int
    end: int


@dataclass
class ReferenceReservation:
    begin: int
    end: int
    has_centre: bool
    chunk: Chunk
    joined: Chunk | None

    def layer(self, layer: int) -> LayerRows:
        if self.joined is not None:
            self.joined.read(layer)  # the centre that these rows share stands there
        return self.chunk.layers[layer]


class ReferenceTier:
    """transfer.host_tier.HostTier. A reservation of `bulk_tokens` or more is split evenly into chunks of at most
    `max_chunk_tokens`, each with a centre of its own; a smaller one takes the last chunk's centre, if there is one.

    `capacity_tokens`: of all contexts together; HostMemoryError beyond.
    """

    def __init__(self, shape: TierShape, capacity_tokens: int, bulk_tokens: int, max_chunk_tokens: int) -> None:
        self.shape = shape
        self.capacity_tokens = capacity_tokens
        self.bulk_tokens = bulk_tokens
        self.max_chunk_tokens = max_chunk_tokens
        self.contexts: dict[int, list[Piece]] = {}
        self.readings: dict[int, Reading] = {}
        self.loans: list[ReferenceLoan] = []

    def open(self, context_id: int, reading: Reading) -> None:
        assert context_id not in self.contexts, f"reference tier: context {context_id} is open already"
        self.contexts[context_id] = []
        self.readings[context_id] = reading

    def fork(self, source_id: int, context_id: int, num_tokens: int, reading: Reading) -> None:
        source = self.contexts[source_id]
        assert num_tokens <= self.num_tokens(source_id), "reference tier: a fork of more tokens than there are"
        self.open(context_id, reading)
        self.contexts[context_id] = _first(source, num_tokens)

    def close(self, context_id: int) -> None:
        self.contexts.pop(context_id, None)
        self.readings.pop(context_id, None)

    def reserve(self, context_id: int, num_tokens: int) -> list[Reservation]:
        pieces = self.contexts[context_id]
        if num_tokens > self.capacity_tokens - self.used_tokens:
            raise HostMemoryError(
                f"host memory: asked {num_tokens:,} tokens, have {self.capacity_tokens - self.used_tokens:,}"
            )
        last = pieces[-1].chunk if pieces else None
        is_bulk = num_tokens >= self.bulk_tokens
        joined = None if is_bulk else last
        count = -(-num_tokens // self.max_chunk_tokens) if is_bulk else 1
        begin, reservations = self.num_tokens(context_id), []
        for index in range(count):
            size = num_tokens * (index + 1) // count - num_tokens * index // count
            chunk = Chunk([self._fresh(layer, size, joined) for layer in range(len(self.shape.layers))], size)
            reservations.append(ReferenceReservation(begin, begin + size, joined is not None, chunk, joined))
            pieces.append(Piece(chunk, 0, size))
            begin += size
        return list(reservations)

    def fill(self, reservation: Reservation, layers: Sequence[int], done: Filled) -> None:
        assert isinstance(reservation, ReferenceReservation), "reference tier: a reservation of another tier"
        for layer in layers:
            assert layer not in reservation.chunk.done, f"reference tier: layer {layer} is filled twice"
            reservation.chunk.done[layer] = done

    def rows(self, context_id: int, layer: int, num_tokens: int) -> list[LayerRows]:
        return [_cut_piece(piece, layer) for piece in _first(self.contexts[context_id], num_tokens)]

    def is_ready(self, read: ContextRead) -> bool:
        has = 0 if read.context_id not in self.contexts else self.num_tokens(read.context_id)
        return read.num_tokens <= has

    def attention(self, reads: Sequence[ContextRead]) -> "ReferenceAttention":
        for read in reads:
            if read.num_tokens > 0:
                assert read.context_id is not None, "reference tier: tokens are asked of a context"
                assert read.num_tokens <= self.num_tokens(read.context_id), "reference tier: more asked than there is"
        return ReferenceAttention(self, list(reads))

    def leave_core(self, leaves: bool) -> None:
        """It attends by one thread."""

    def answer(self, parts: Sequence[tuple[Attention, ExchangeSlot]]) -> Answered:
        began = time.perf_counter()
        for layer in range(len(self.shape.layers)):
            for attention, slot in parts:
                attention.run(layer, slot)
                if layer + 1 < len(self.shape.layers):
                    slot.advance(slot.rows)
        return Answered(0.0, time.perf_counter() - began)

    # --- what tests ask -----------------------------------------------------------------------------------------

    def num_tokens(self, context_id: int) -> int:
        return sum(piece.end - piece.begin for piece in self.contexts[context_id])

    @property
    def used_tokens(self) -> int:
        chunks = {piece.chunk for pieces in self.contexts.values() for piece in pieces}
        return sum(chunk.num_tokens for chunk in chunks)

    def stored(self, context_id: int, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a whole run, float64 `[kv_heads, tokens, dim]`, the centre given back."""
        return stored_rows(self, context_id, layer, self.num_tokens(context_id))

    def put(self, context_id: int, keys: Tensor, values: Tensor) -> None:
        """Offload rows `[layers, kv_heads, tokens, dim]` (rotated, not centred) by hand; bfloat16 tiers only."""
        assert self.shape.rows == "bfloat16", "reference tier: put writes bfloat16 rows alone"
        for reservation in self.reserve(context_id, keys.shape[2]):
            offset = reservation.begin - (self.num_tokens(context_id) - keys.shape[2])
            tokens = slice(offset, offset + reservation.end - reservation.begin)
            for layer in range(len(self.shape.layers)):
                rows = reservation.layer(layer)
                if not reservation.has_centre:
                    rows.centre.copy_(keys[layer, :, tokens].double().mean(1))
                rows.keys.copy_(keys[layer, :, tokens] - rows.centre[:, None])
                rows.values.copy_(values[layer, :, tokens])
            self.fill(reservation, range(len(self.shape.layers)), Landed())

    def _fresh(self, layer: int, tokens: int, joined: Chunk | None) -> LayerRows:
        shape = self.shape
        heads, dim = shape.num_kv_heads, shape.dim
        dtype, unwritten = UNWRITTEN[shape.rows]
        codes = torch.from_numpy(np.full((heads, shape.num_tables, tokens), UNWRITTEN_CODE, np.uint16))
        is_int8 = shape.rows == "int8"
        own = joined.layers[layer] if joined is not None else None
        return LayerRows(
            keys=_reachable(torch.full((heads, tokens, shape.row_width), unwritten, dtype=dtype)),
            values=_reachable(torch.full((heads, tokens, shape.row_width), unwritten, dtype=dtype)),
            codes=_reachable(codes) if shape.num_tables else None,
            centre=own.centre if own else _nans(heads, dim),
            key_scale=(own.key_scale if own else _nans(heads)) if is_int8 else None,
            value_scale=(own.value_scale if own else _nans(heads, dim)) if is_int8 else None,
        )


class ReferenceAttention:
    """transfer.host_tier.Attention: softmax over what each row asks for, float64 inside. What it reads it keeps."""

    def __init__(self, tier: ReferenceTier, reads: list[ContextRead]) -> None:
        self.tier = tier
        self.reads = reads
        self.pieces = [
            _first(tier.contexts[read.context_id], read.num_tokens) if read.context_id is not None else []
            for read in reads
        ]
        self.next_layer = 0

    def run(self, layer: int, slot: ExchangeSlot) -> None:
        assert layer == self.next_layer, f"reference tier: layer {layer} asked, {self.next_layer} comes next"
        assert slot.rows == len(self.reads), "reference tier: as many rows as asks"
        self.next_layer += 1
        self._wait(slot)
        kv_heads = self.tier.shape.num_kv_heads
        for row, read in enumerate(self.reads):
            covered = torch.zeros(len(slot.queries[row]), read.num_tokens, dtype=torch.bool)
            for head in slot.wanted[row].nonzero().flatten().tolist():
                covered[head] = ~excluded_tokens(slot, row, head * kv_heads // len(covered), read.num_tokens)
            slot.out[row], slot.lse[row] = 0.0, -torch.inf
            if self.pieces[row]:
                rows = joined_rows(self.tier.shape, [_cut_piece(piece, layer) for piece in self.pieces[row]])
                out, lse = attend_to(slot.queries[row], *rows, covered)
                slot.out[row], slot.lse[row] = out.float(), lse.float()
            if slot.covered is not None:
                slot.covered[row] = covered.sum(1)
        slot.give_answer()

    def give_up(self) -> None:
        pass

    def places(self, row: int) -> np.ndarray:
        layers, begin, columns = range(len(self.tier.shape.layers)), 0, []
        for piece in self.pieces[row]:
            end = begin + piece.end - piece.begin
            columns.append([_place(_cut_piece(piece, layer), begin, end) for layer in layers])
            begin = end
        return np.array(columns, np.int64).reshape(-1, len(layers), places.COLUMNS).transpose(1, 2, 0).copy()

    def lend(self) -> "ReferenceLoan":
        loan = ReferenceLoan(self.pieces)
        self.tier.loans.append(loan)
        return loan

    @staticmethod
    def _wait(slot: ExchangeSlot) -> None:
        deadline = time.monotonic() + SECONDS_TO_WAIT_FOR_A_QUERY
        while not bool((slot.flags[: slot.rows] == slot.stamp).all()):
            assert time.monotonic() < deadline, (
                f"reference tier: flags {slot.flags[: slot.rows].tolist()}, wanted stamp {slot.stamp} in all"
            )
            time.sleep(LOOK_S)


@dataclass
class ReferenceLoan:
    """transfer.host_tier.Loan, kept until nobody looks at it any more; how it ended."""

    pieces: list[list[Piece]]
    ended: Passed | None = None

    def end(self, done: Passed) -> None:
        assert self.ended is None, "reference tier: a loan ends once"
        self.ended = done


def _place(rows: LayerRows, begin: int, end: int) -> list[int]:
    keys, values, size = rows.keys, rows.values, rows.keys.element_size()
    scales = [0 if scale is None else scale.data_ptr() for scale in (rows.key_scale, rows.value_scale)]
    strides = [[tensor.stride(axis) * size for axis in (0, 1)] for tensor in (keys, values)]
    return [begin, end, keys.data_ptr(), *strides[0], values.data_ptr(), *strides[1], rows.centre.data_ptr(), *scales]


def stored_rows(tier: HostTier, context_id: int, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a run's first tokens, float64 `[kv_heads, tokens, dim]`, the centre given back."""
    return joined_rows(tier.shape, tier.rows(context_id, layer, num_tokens))


def joined_rows(shape: TierShape, pieces: Sequence[LayerRows]) -> tuple[Tensor, Tensor]:
    """As `stored_rows`, of what was read."""
    parts = [_restore(rows) for rows in pieces]
    none = torch.empty(shape.num_kv_heads, 0, shape.dim, dtype=torch.float64)
    return torch.cat([none, *(keys for keys, _ in parts)], 1), torch.cat([none, *(values for _, values in parts)], 1)


def excluded_tokens(slot: ExchangeSlot, row: int, kv_head: int, num_tokens: int) -> Tensor:
    """Bool `[num_tokens]` of a run, as the slot's bits say."""
    excluded = torch.zeros(num_tokens, dtype=torch.bool)
    if slot.excluded is not None:
        for word, bits in enumerate(slot.excluded[row, kv_head].tolist()):
            for bit in range(32):
                begin = 16 * (32 * word + bit)
                excluded[begin : begin + 16] = bits >> bit & 1 == 1
    return excluded


def attend(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One query `[heads, dim]` over `[kv_heads, tokens, dim]`: out float64 `[heads, dim]`, natural lse `[heads]`."""
    return attend_to(query, keys, values, torch.ones(len(query), keys.shape[1], dtype=torch.bool))


def attend_to(query: Tensor, keys: Tensor, values: Tensor, covered: Tensor) -> tuple[Tensor, Tensor]:
    """The same over the tokens that each head covers, bool `[heads, tokens]`."""
    kv_heads, tokens, dim = keys.shape
    if tokens == 0:
        return torch.zeros(query.shape, dtype=torch.float64), torch.full((len(query),), -torch.inf).double()
    grouped = query.double().view(kv_heads, -1, dim)
    logits = grouped @ keys.double().transpose(1, 2) / dim**0.5  # [kv_heads, group, tokens]
    logits = logits.masked_fill(~covered.view(kv_heads, -1, tokens), -torch.inf)
    lse = logits.logsumexp(-1)
    out = (logits - lse[..., None].clamp(min=torch.finfo(torch.float64).min)).exp() @ values.double()
    return out.view(-1, dim), lse.flatten()


def _reachable(tensor: Tensor) -> Tensor:
    """Pinned, where there is a device that could want it so."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _nans(*shape: int) -> Tensor:
    return _reachable(torch.full(shape, float("nan")))


def _first(pieces: list[Piece], num_tokens: int) -> list[Piece]:
    taken, left = [], num_tokens
    for piece in pieces:
        if left > 0:
            taken.append(Piece(piece.chunk, piece.begin, min(piece.end, piece.begin + left)))
            left -= piece.end - piece.begin
    return taken


def _cut_piece(piece: Piece, layer: int) -> LayerRows:
    return _cut(piece.chunk.read(layer), piece.begin, piece.end)


def _cut(rows: LayerRows, begin: int, end: int) -> LayerRows:
    return LayerRows(
        rows.keys[:, begin:end],
        rows.values[:, begin:end],
        None if rows.codes is None else rows.codes[..., begin:end],
        rows.centre,
        rows.key_scale,
        rows.value_scale,
    )


def _restore(rows: LayerRows) -> tuple[Tensor, Tensor]:
    dim = rows.centre.shape[-1]
    if rows.keys.dtype == torch.uint8:
        keys, values = (torch.from_numpy(unpack(one.numpy(), dim)) for one in (rows.keys, rows.values))
    else:
        keys, values = rows.keys.double(), rows.values.double()
    if rows.key_scale is not None and rows.value_scale is not None:
        keys, values = keys * rows.key_scale[:, None, None], values * rows.value_scale[:, None]
    return keys + rows.centre[:, None].double(), values
