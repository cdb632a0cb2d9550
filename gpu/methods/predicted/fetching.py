"""Blocks of rows from host memory into their slots, and their keys looked at where they lie: one gather for many.

It refuses to know which blocks are wanted. The device reads pinned memory by address, so a block is a few kilobytes
over the link and no copy is ordered for it. Invariants: centre and scale are given back, so a slot holds what the pages
would, stored as there; whoever calls holds a loan of the rows until the device has passed; a block that is left out
stands in no slot and in no bit. Bytes over the link: of the blocks, once.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, check_dtype, runs_on_triton
from gpu.kernels.kv_rows import (
    PLAIN,
    check_pages,
    codes_of,
    dim_of,
    encode_rows,
    floats_of,
    has_codes,
    kind_of,
    make_codes,
    scale_of,
    scales_of,
)
from gpu.methods.predicted.blocks import EMPTY
from gpu.methods.predicted.listing import FETCHED, LATE, LOOKED, NUM_COUNTS
from gpu.methods.predicted.noting import code_of
from gpu.predictor.history import attended_maxima, compress
from transfer import places
from transfer.places import COLUMNS
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS

_FETCHED, _LOOKED, _LATE = tl.constexpr(FETCHED), tl.constexpr(LOOKED), tl.constexpr(LATE)
_BLOCK, _WORD, _PLAIN = tl.constexpr(BLOCK_TOKENS), tl.constexpr(WORD_BITS), tl.constexpr(PLAIN)
_END, _KEYS, _VALUES = tl.constexpr(places.RUN_END), tl.constexpr(places.KEYS), tl.constexpr(places.VALUES)
_CENTRE, _KEY_SCALE = tl.constexpr(places.CENTRE), tl.constexpr(places.KEY_SCALE)
_VALUE_SCALE, _COLUMNS = tl.constexpr(places.VALUE_SCALE), tl.constexpr(COLUMNS)


@dataclass(frozen=True, slots=True)
class Lateness:
    """Blocks that are not begun when no step is open any more are left out. open_parts: int32 `[1]`, of a step, that
    are computed now; bits: int32 `[places, words]` of the layer, see `Blocks`; counts: int64 `[NUM_COUNTS]`, LATE is
    added to, and FETCHED taken from.
    """

    open_parts: Tensor
    bits: Tensor
    counts: Tensor


def read_block(lies: Tensor, block: int, kv_head: int, dim: int, is_int8: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of one block of a run, float32 `[BLOCK_TOKENS, dim]`, restored; lies: int64 `[COLUMNS, pieces]`.
    On the CPU.
    """
    token = block * BLOCK_TOKENS
    inside = (lies[places.RUN_BEGIN] <= token) & (token < lies[places.RUN_END])
    piece = lies[:, int(inside.int().argmax())].tolist()
    assert int(inside.sum()) == 1, f"fetch: block {block} lies in {int(inside.sum())} pieces"
    rows = []
    for at in (places.KEYS, places.VALUES):
        address, head_bytes, row_bytes = piece[at : at + 3]
        address += kv_head * head_bytes + (token - piece[places.RUN_BEGIN]) * row_bytes
        dtype = torch.int8 if is_int8 else torch.bfloat16
        own = _at(address, BLOCK_TOKENS * row_bytes).view(dtype).view(BLOCK_TOKENS, -1)
        rows.append(own[:, :dim].float())
    keys, values = rows
    if is_int8:
        keys = keys * _at(piece[places.KEY_SCALE] + 4 * kv_head, 4).view(torch.float32)
        values = values * _at(piece[places.VALUE_SCALE] + 4 * dim * kv_head, 4 * dim).view(torch.float32)
    return keys + _at(piece[places.CENTRE] + 4 * dim * kv_head, 4 * dim).view(torch.float32), values


def _at(address: int, num_bytes: int) -> Tensor:
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.frombuffer(memory, np.uint8).copy())


def fetch_blocks_reference(
    ids: Tensor, fresh: Tensor, lies: Tensor, keys: Tensor, values: Tensor, kv_heads: int, is_int8: bool,
    late: Lateness | None,
) -> None:  # fmt: skip
    """Plain torch on the CPU; see `fetch_blocks`."""
    slots = ids.shape[1]
    if late is not None and int(late.open_parts) <= 0:
        for place, slot in fresh.nonzero().tolist():
            block = int(ids[place, slot])
            late.bits[place, block // WORD_BITS] ^= torch.tensor(1 << block % WORD_BITS).int()
            ids[place, slot] = EMPTY
            late.counts[LATE] += 1
            late.counts[FETCHED] -= 1
        return
    for place, slot in fresh.nonzero().tolist():
        ring, kv_head = divmod(place, kv_heads)
        own = read_block(lies[ring], int(ids[place, slot]), kv_head, dim_of(keys), is_int8)
        for into, rows in zip((keys, values), own, strict=True):
            page = into[place * slots + slot, 0]
            if has_codes(page):
                codes, scales = make_codes(rows, page.dtype)
                codes_of(page).copy_(codes), scales_of(page).copy_(scales)
            else:
                page.copy_(rows)


def look_at_blocks_reference(
    history: Tensor, query: Tensor, lse: Tensor, bits: Tensor, lies: Tensor, rings: Tensor, cells: Tensor,
    holes: Tensor, every: int, scale: float, is_int8: bool, counts: Tensor,
) -> None:  # fmt: skip
    """Plain torch on the CPU; see `look_at_blocks`."""
    kv_heads = len(history) // len(lies)
    group, dim = query.shape[1] // kv_heads, query.shape[2]
    for row in (rings >= 0).nonzero().flatten().tolist():
        cell, limit = int(cells[row]), int(holes[1, row] - holes[0, row]) // BLOCK_TOKENS
        for kv_head in range(kv_heads):
            place, heads = int(rings[row]) * kv_heads + kv_head, slice(kv_head * group, (kv_head + 1) * group)
            for block in range(cell % every, limit, every):
                if int(bits[place, block // WORD_BITS]) >> (block % WORD_BITS) & 1:
                    continue
                keys, _ = read_block(lies[int(rings[row])], block, kv_head, dim, is_int8)
                logits = query[row, heads].float() @ keys.T * scale  # [group, tokens]
                attended = attended_maxima(logits.amax(1, keepdim=True), lse[row, heads]).amax(0)
                history[place, cell % history.shape[1], block] = compress(attended, history.dtype)[0]
                counts[LOOKED] += 1


@triton.jit
def _piece_of(lies, token, PIECES: tl.constexpr):
    """Where the piece with a token of the run stands in a table, -1: nowhere."""
    piece = tl.arange(0, PIECES)
    inside = (tl.load(lies + piece) <= token) & (token < tl.load(lies + _END * PIECES + piece))
    return tl.max(tl.where(inside, piece, -1), 0)


@triton.jit
def _rows_at(
    lies, piece, token, kv_head,
    AT: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Stored rows `[BLOCK_TOKENS, WIDE]`, float32, of tokens from `token` on; 0 behind DIM."""
    address = tl.load(lies + AT * PIECES + piece)
    address += kv_head * tl.load(lies + (AT + 1) * PIECES + piece)
    row = token - tl.load(lies + piece) + tl.arange(0, _BLOCK)
    rows = address + row * tl.load(lies + (AT + 2) * PIECES + piece)
    column = tl.arange(0, WIDE)[None, :]
    if INT8:
        stored = tl.load(rows.to(tl.pointer_type(tl.int8))[:, None] + column, mask=column < DIM, other=0)
    else:
        stored = tl.load(rows.to(tl.pointer_type(tl.bfloat16))[:, None] + column, mask=column < DIM, other=0.0)
    return stored.to(tl.float32)


@triton.jit
def _keys_at(
    lies, piece, token, kv_head, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr
):
    """Restored keys."""
    key = _rows_at(lies, piece, token, kv_head, _KEYS, PIECES, DIM, WIDE, INT8)
    if INT8:
        scale = tl.load(lies + _KEY_SCALE * PIECES + piece).to(tl.pointer_type(tl.float32))
        key *= tl.load(scale + kv_head)
    centre = tl.load(lies + _CENTRE * PIECES + piece).to(tl.pointer_type(tl.float32))
    column = tl.arange(0, WIDE)
    return key + tl.load(centre + kv_head * DIM + column, mask=column < DIM, other=0.0)[None, :]


@triton.jit
def _fetch_kernel(
    ids, fresh, lies, keys, values, open_parts, bits, counts, slots, words,
    KV_HEADS: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr,
    KIND: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    place, slot = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if tl.load(fresh + place * slots + slot) == 0:
        return
    if LEAVES:  # noqa: SIM102 - known when it is compiled
        if tl.load(open_parts, volatile=True) <= 0:  # as it is now, not as some program found it
            block = tl.load(ids + place * slots + slot)
            tl.atomic_xor(bits + place * words + block // _WORD, tl.full([], 1, tl.int32) << (block % _WORD))
            tl.store(ids + place * slots + slot, -1)
            tl.atomic_add(counts + _LATE, tl.full([], 1, tl.int64))
            tl.atomic_add(counts + _FETCHED, tl.full([], -1, tl.int64))
            return
    kv_head = place % KV_HEADS
    lies += place // KV_HEADS * (_COLUMNS * PIECES)
    token = tl.load(ids + place * slots + slot).to(tl.int64) * _BLOCK
    piece = _piece_of(lies, token, PIECES)
    if piece < 0:
        return
    key = _keys_at(lies, piece, token, kv_head, PIECES, DIM, WIDE, INT8)
    value = _rows_at(lies, piece, token, kv_head, _VALUES, PIECES, DIM, WIDE, INT8)
    column = tl.arange(0, WIDE)
    if INT8:
        scale = tl.load(lies + _VALUE_SCALE * PIECES + piece).to(tl.pointer_type(tl.float32))
        value *= tl.load(scale + kv_head * DIM + column, mask=column < DIM, other=0.0)[None, :]
    page = place * slots + slot
    _store_block(keys, page, key, column, DIM, KIND)
    _store_block(values, page, value, column, DIM, KIND)


@triton.jit
def _store_block(pages, page, rows, column, DIM: tl.constexpr, KIND: tl.constexpr):
    """Restored rows of a block, 0 behind DIM, to a page of one KV head."""
    WIDTH: tl.constexpr = DIM if KIND == _PLAIN else DIM + 4
    row = tl.arange(0, _BLOCK)
    to = pages + page * (_BLOCK * WIDTH) + row[:, None] * DIM + column[None, :]
    inside = (column < DIM)[None, :]
    if KIND == _PLAIN:
        tl.store(to, rows.to(pages.dtype.element_ty), mask=inside)
    else:
        scale = scale_of(tl.max(tl.abs(rows), 1), tl.sum(rows * 0.0, 1), KIND)
        tl.store(to, encode_rows(rows, scale[:, None], KIND), mask=inside)
        tl.store(floats_of(pages) + page * (_BLOCK * WIDTH // 4) + _BLOCK * DIM // 4 + row, scale)


@triton.jit
def _look_kernel(
    history, query, lse, bits, lies, rings, cells, holes, counts, num_rows, place_stride, row_stride, query_stride,
    steps, words, every, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(1)
    row, kv_head = item // KV_HEADS, (item % KV_HEADS).to(tl.int64)
    ring = tl.load(rings + row)
    if ring < 0:
        return
    cell = tl.load(cells + row)
    block = (cell % every).to(tl.int32) + tl.program_id(0) * every
    if block >= (tl.load(holes + num_rows + row) - tl.load(holes + row)) // _BLOCK:
        return
    place = ring.to(tl.int64) * KV_HEADS + kv_head
    if (tl.load(bits + place * words + block // _WORD) >> (block % _WORD)) & 1 != 0:
        return
    lies += ring.to(tl.int64) * (_COLUMNS * PIECES)
    token = block.to(tl.int64) * _BLOCK
    piece = _piece_of(lies, token, PIECES)
    if piece < 0:
        return
    key = _keys_at(lies, piece, token, kv_head, PIECES, DIM, WIDE, INT8)
    column = tl.arange(0, WIDE)
    best = 0.0
    for member in tl.static_range(GROUP):
        head = kv_head * GROUP + member
        at = query + row.to(tl.int64) * query_stride + head * DIM + column
        own = tl.load(at, mask=column < DIM, other=0.0).to(tl.float32)
        top = tl.max(tl.sum(key * own[None, :], 1), 0) * scale
        best = tl.maximum(best, tl.exp(top - tl.load(lse + row * (KV_HEADS * GROUP) + head)))
    tl.store(history + place * place_stride + (cell % steps) * row_stride + block, code_of(best))
    tl.atomic_add(counts + _LOOKED, tl.full([], 1, tl.int64))


def fetch_blocks(
    ids: Tensor, fresh: Tensor, lies: Tensor, keys: Tensor, values: Tensor, kv_heads: int, is_int8: bool,
    late: Lateness | None,
) -> None:  # fmt: skip
    """Bring the blocks of one layer's slots that are `fresh`, uint8 `[places, slots]`; see `Blocks` for the others.

    is_int8: how rows are stored, else bf16; late: which may be left out, or None: all are waited for. Raises ValueError
    for another shape, dtype or device; addresses are trusted, and blocks must be of the runs that they lie in.
    """
    op, (num_places, slots), device, dim = "fetch_blocks", ids.shape, ids.device, dim_of(keys)
    rings, _, pieces = lies.shape
    check(op, "ids", ids, (num_places, slots), torch.int32, device)
    check(op, "fresh", fresh, (num_places, slots), torch.uint8, device)
    check(op, "lies", lies, (rings, COLUMNS, pieces), torch.int64, device)
    check_pages(op, "keys", keys, (num_places * slots, 1, BLOCK_TOKENS, dim), keys.dtype, device)
    check(op, "values", values, tuple(keys.shape), keys.dtype, device)
    if late is not None:
        check(op, "open parts", late.open_parts, (1,), torch.int32, device)
        check(op, "bits", late.bits, (num_places, late.bits.shape[1]), torch.int32, device)
        check(op, "counts", late.counts, (NUM_COUNTS,), torch.int64, device)
    if not runs_on_triton(keys):
        fetch_blocks_reference(ids, fresh, lies, keys, values, kv_heads, is_int8, late)
        return
    if not has_codes(keys):
        check_dtype(op, keys)
    lateness = (ids, ids, ids) if late is None else (late.open_parts, late.bits, late.counts)
    _fetch_kernel[(slots, num_places)](
        ids, fresh, lies, keys, values, *lateness, slots, 1 if late is None else late.bits.shape[1],
        KV_HEADS=kv_heads, PIECES=pieces, DIM=dim, WIDE=triton.next_power_of_2(dim),
        INT8=is_int8, KIND=kind_of(keys), LEAVES=late is not None, num_warps=1,
    )  # fmt: skip


def look_at_blocks(
    history: Tensor, query: Tensor, lse: Tensor, bits: Tensor, lies: Tensor, rings: Tensor, cells: Tensor,
    holes: Tensor, every: int, scale: float, is_int8: bool, counts: Tensor,
) -> None:  # fmt: skip
    """Put into one layer's histories what the rows' queries would attend to of every so many blocks of their holes, in
    turn from step to step, by their keys where they lie; of blocks that stand in slots the history knows it.

    query: `[rows, heads, dim]`, rotated; lse: float32 `[rows, heads]`, of what was read exactly; rings, cells, holes:
    as in `note_step` and `list_blocks`; the others as in `Blocks`. counts: int64 `[NUM_COUNTS]`, LOOKED is added to.
    Raises ValueError for another shape or dtype.
    """
    op, (rows, heads, dim), device = "look_at_blocks", query.shape, query.device
    num_rings, _, pieces = lies.shape
    kv_heads = len(history) // num_rings
    check(op, "history", history, tuple(history.shape), torch.uint8, device)
    check(op, "lse", lse, (rows, heads), torch.float32, device)
    check(op, "bits", bits, (len(history), bits.shape[1]), torch.int32, device)
    check(op, "lies", lies, (num_rings, COLUMNS, pieces), torch.int64, device)
    check(op, "rings", rings, (rows,), torch.int32, device)
    check(op, "cells", cells, (rows,), torch.int64, device)
    check(op, "holes", holes, (3, rows), torch.int32, device)
    check(op, "counts", counts, (NUM_COUNTS,), torch.int64, device)
    if not runs_on_triton(history):
        look_at_blocks_reference(
            history, query, lse, bits, lies, rings, cells, holes, every, scale, is_int8, counts
        )  # fmt: skip
        return
    _look_kernel[(triton.cdiv(history.shape[2], every), rows * kv_heads)](
        history, query, lse.contiguous(), bits, lies, rings, cells, holes, counts, rows, history.stride(0),
        history.stride(1), query.stride(0), history.shape[1], bits.shape[1], every, scale,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, PIECES=pieces, DIM=dim, WIDE=triton.next_power_of_2(dim),
        INT8=is_int8, num_warps=1,
    )  # fmt: skip
