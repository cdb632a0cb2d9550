"""Fetch blocks of rows from host memory into their slots, or look at their keys there: one gather for many blocks.

The device reads pinned memory by address, so a block is a few kilobytes over the link, and no copy is ordered for it.
Invariants: centres and scales are applied, so a slot holds what pages would, stored in the same way. The caller holds a
loan of the rows until the device has passed. A block that is left out has no slot and no bit. Bytes over the link: the
blocks, once.

There are few programs, for two reasons. A single warp of them keeps a matrix product off its SM, since a block of the
product takes 98 % of the registers. And a program that waits for the link stays for long. 16 programs leave 116 of 132
SMs to other work, and reach 90 % of the link's rate. Each program goes through all flags, lists its share of them,
dealt out in turn, and fetches some at once by loads of 16 bytes. So addresses and strides in `lies` are multiples of
16.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.predicted.held_blocks import EMPTY, Blocks
from gpu.methods.predicted.listing import FETCHED, LATE, LOOKED, NUM_COUNTS
from gpu.methods.predicted.noting import HistoryRows, code_of
from gpu.operations.arguments import check, check_dtype, runs_on_triton
from gpu.operations.kv.kv_rows import (
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
from gpu.predictor.history import attended_maxima, compress
from transfer import places
from transfer.places import COLUMNS
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS

PROGRAMS = 16  # each on its own SM, if there are enough
WARPS, BLOCKS_AT_ONCE = 8, 4  # of a program: 32 KB in flight, which takes 114 registers per thread
LOOKS_AT_ONCE = 8  # blocks of a program, of which only keys are read
CHUNK = 2048  # slots, or looks, whose flags a program reads at once

_FETCHED, _LOOKED, _LATE = tl.constexpr(FETCHED), tl.constexpr(LOOKED), tl.constexpr(LATE)
_BLOCK, _WORD, _PLAIN = tl.constexpr(BLOCK_TOKENS), tl.constexpr(WORD_BITS), tl.constexpr(PLAIN)
_END, _KEYS, _VALUES = tl.constexpr(places.RUN_END), tl.constexpr(places.KEYS), tl.constexpr(places.VALUES)
_CENTRE, _KEY_SCALE = tl.constexpr(places.CENTRE), tl.constexpr(places.KEY_SCALE)
_VALUE_SCALE, _COLUMNS = tl.constexpr(places.VALUE_SCALE), tl.constexpr(COLUMNS)


@dataclass(frozen=True, slots=True)
class Lateness:
    """Says whether late blocks are left out: those whose fetch has not begun when no part of a step is open any more.

    open_parts: int32 `[1]`, parts of a step that are being computed. bits: int32 `[places, words]` of the layer, see
    `Blocks`. counts: int64 `[NUM_COUNTS]`; each late block adds to LATE and subtracts from FETCHED.
    """

    open_parts: Tensor
    bits: Tensor
    counts: Tensor


def read_block(lies: Tensor, block: int, kv_head: int, dim: int, is_int8: bool) -> tuple[Tensor, Tensor]:
    """Return the keys and values of one block of a run, float32 `[BLOCK_TOKENS, dim]`, restored. Runs on the CPU.

    lies: int64 `[COLUMNS, pieces]`.
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
    """Return a copy of so many bytes at an address of host memory."""
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.from_numpy(np.frombuffer(memory, np.uint8).copy())


def fetch_blocks_reference(
    ids: Tensor, fresh: Tensor, lies: Tensor, keys: Tensor, values: Tensor, kv_heads: int, is_int8: bool,
    late: Lateness | None,
) -> None:  # fmt: skip
    """Compute `fetch_blocks` in plain torch."""
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
    blocks: Blocks, query: Tensor, lse: Tensor, own: HistoryRows, every: int, scale: float, is_int8: bool,
    counts: Tensor,
) -> None:  # fmt: skip
    """Compute `look_at_blocks` in plain torch."""
    history, bits, lies, rings, cells, skips = blocks.history, blocks.bits, blocks.lies, own.rings, own.cells, own.skips
    kv_heads = len(history) // len(lies)
    group, dim = query.shape[1] // kv_heads, query.shape[2]
    for row in (rings >= 0).nonzero().flatten().tolist():
        cell, limit = int(cells[row]), int(skips[1, row] - skips[0, row]) // BLOCK_TOKENS
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
def _list_own_items(mine, is_listed, item, before):
    """Deal the listed items of a chunk out to the programs in turn, and append this program's share to `mine`.

    before: the number of items in earlier chunks. Returns the number of items so far.
    """
    flag = is_listed.to(tl.int32)
    rank = before + tl.cumsum(flag, 0) - flag
    num_programs = tl.num_programs(0)
    tl.store(mine + rank // num_programs, item, mask=is_listed & (rank % num_programs == tl.program_id(0)))
    return before + tl.sum(flag, 0)


@triton.jit
def _count_own_items(listed):
    """Return how many of the listed items are this program's."""
    return (listed - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)


@triton.jit
def _pieces_of(lies, token, PIECES: tl.constexpr):
    """Return the index of the piece that holds each token, in its run's table, `[items]`; -1: no piece does."""
    piece = tl.arange(0, PIECES)[None, :]
    begin, end = tl.load(lies[:, None] + piece), tl.load(lies[:, None] + _END * PIECES + piece)
    inside = (begin <= token[:, None]) & (token[:, None] < end)
    return tl.max(tl.where(inside, piece, -1), 1)


@triton.jit
def _number_at(lies, piece, is_there, COLUMN: tl.constexpr, PIECES: tl.constexpr):
    """Return one column of the table for each piece, `[items]`."""
    return tl.load(lies + COLUMN * PIECES + piece, mask=is_there, other=0)


@triton.jit
def _first_row(lies, piece, is_there, token, kv_head, AT: tl.constexpr, PIECES: tl.constexpr):
    """Return the address of each token's row, and the bytes to the next row, `[items]`."""
    address = _number_at(lies, piece, is_there, AT, PIECES)
    address += kv_head * _number_at(lies, piece, is_there, AT + 1, PIECES)
    row_bytes = _number_at(lies, piece, is_there, AT + 2, PIECES)
    return address + (token - _number_at(lies, piece, is_there, 0, PIECES)) * row_bytes, row_bytes


@triton.jit
def _rows_at(address, row_bytes, is_there, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr):
    """Load stored rows `[items, BLOCK_TOKENS, WIDE]` from these addresses on; 0 behind DIM."""
    row = address[:, None] + tl.arange(0, _BLOCK)[None, :] * row_bytes[:, None]  # [items, tokens]
    column = tl.arange(0, WIDE)[None, None, :]
    inside = is_there[:, None, None] & (column < DIM)
    if INT8:
        at = tl.multiple_of(row.to(tl.pointer_type(tl.int8))[:, :, None], [1, 1, 16]) + column
        stored = tl.load(at, mask=inside, other=0)
    else:
        at = tl.multiple_of(row.to(tl.pointer_type(tl.bfloat16))[:, :, None], [1, 1, 16]) + column
        stored = tl.load(at, mask=inside, other=0.0)
    return stored


@triton.jit
def _floats_at(address, is_there, DIM: tl.constexpr, WIDE: tl.constexpr):
    """Load floats `[items, WIDE]` from these addresses on; 0 behind DIM."""
    column = tl.arange(0, WIDE)[None, :]
    at = tl.multiple_of(address.to(tl.pointer_type(tl.float32))[:, None], [1, 16]) + column
    return tl.load(at, mask=is_there[:, None] & (column < DIM), other=0.0)


@triton.jit
def _centre_and_scale(
    lies, piece, is_there, kv_head, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr
):
    """Return the keys' centre, float32 `[items, WIDE]`, and scale, `[items]`, which is 1 for rows without scales."""
    centre = _number_at(lies, piece, is_there, _CENTRE, PIECES) + 4 * DIM * kv_head
    scale = tl.full([is_there.shape[0]], 1.0, tl.float32)
    if INT8:
        at = _number_at(lies, piece, is_there, _KEY_SCALE, PIECES) + 4 * kv_head
        scale = tl.load(at.to(tl.pointer_type(tl.float32)), mask=is_there, other=0.0)
    return _floats_at(centre, is_there, DIM, WIDE), scale


@triton.jit
def _find_blocks(mine, item, count, ids, lies, slots, KV_HEADS: tl.constexpr, PIECES: tl.constexpr):
    """Return a program's slots, their blocks, and the pieces that hold these, -1: none; all `[items]`."""
    page = tl.load(mine + item, mask=item < count, other=0).to(tl.int64)
    block = tl.load(ids + page, mask=item < count, other=0)
    table = lies + page // slots // KV_HEADS * (_COLUMNS * PIECES)
    return page, block, _pieces_of(table, block.to(tl.int64) * _BLOCK, PIECES)


@triton.jit
def _fetch_kernel(
    ids, fresh, lies, keys, values, open_parts, bits, counts, lists, all_slots, slots, words,
    KV_HEADS: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, INT8: tl.constexpr,
    KIND: tl.constexpr, LEAVES: tl.constexpr, CHUNK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Fetch blocks from host memory.

    lists: int32 `[programs, cdiv(all_slots, programs)]`, written here: each program's slots, which its other threads
    read.
    """
    mine = lists + tl.program_id(0) * tl.cdiv(all_slots, tl.num_programs(0))
    listed = 0
    for begin in range(0, all_slots, CHUNK):
        slot = begin + tl.arange(0, CHUNK)
        is_fresh = tl.load(fresh + slot, mask=slot < all_slots, other=0) != 0
        listed = _list_own_items(mine, is_fresh, slot, listed)
    tl.debug_barrier()
    count = _count_own_items(listed)
    item = tl.arange(0, ITEMS)
    page, block, piece = _find_blocks(mine, item, count, ids, lies, slots, KV_HEADS, PIECES)
    for begin in range(0, count, ITEMS):
        place, is_there = page // slots, begin + item < count
        if LEAVES:  # noqa: SIM102 - known when it is compiled
            # An atomic read of the present number, the same for all threads: separate loads could differ.
            if tl.atomic_add(open_parts, 0, sem="relaxed") <= 0:
                bit = tl.full([ITEMS], 1, tl.int32) << (block % _WORD)
                tl.atomic_xor(bits + place * words + block // _WORD, bit, mask=is_there)
                tl.store(ids + page, tl.full([ITEMS], -1, tl.int32), mask=is_there)
                left = tl.sum(is_there.to(tl.int64), 0)
                tl.atomic_add(counts + _LATE, left)
                tl.atomic_add(counts + _FETCHED, -left)
                is_there = is_there & (item < 0)
        kv_head, token = place % KV_HEADS, block.to(tl.int64) * _BLOCK
        table = lies + place // KV_HEADS * (_COLUMNS * PIECES)
        is_there = is_there & (piece >= 0)
        address, row_bytes = _first_row(table, piece, is_there, token, kv_head, _KEYS, PIECES)
        key = _rows_at(address, row_bytes, is_there, DIM, WIDE, INT8)
        address, row_bytes = _first_row(table, piece, is_there, token, kv_head, _VALUES, PIECES)
        value = _rows_at(address, row_bytes, is_there, DIM, WIDE, INT8)
        centre, scale = _centre_and_scale(table, piece, is_there, kv_head, PIECES, DIM, WIDE, INT8)
        following = begin + ITEMS + item  # the next items are found while these are in flight
        next_page, next_block, next_piece = _find_blocks(mine, following, count, ids, lies, slots, KV_HEADS, PIECES)
        restored = key.to(tl.float32) * scale[:, None, None] + centre[:, None, :]
        _store_blocks(keys, page, restored, is_there, DIM, WIDE, KIND)
        if INT8:
            scales = _number_at(table, piece, is_there, _VALUE_SCALE, PIECES) + 4 * DIM * kv_head
            own = value.to(tl.float32) * _floats_at(scales, is_there, DIM, WIDE)[:, None, :]
            _store_blocks(values, page, own, is_there, DIM, WIDE, KIND)
        else:
            _store_blocks(values, page, value, is_there, DIM, WIDE, KIND)
        page, block, piece = next_page, next_block, next_piece


@triton.jit
def _store_blocks(pages, page, rows, is_there, DIM: tl.constexpr, WIDE: tl.constexpr, KIND: tl.constexpr):
    """Store restored rows of blocks, `[items, BLOCK_TOKENS, WIDE]`, to pages of one KV head."""
    WIDTH: tl.constexpr = DIM if KIND == _PLAIN else DIM + 4
    row, column = tl.arange(0, _BLOCK), tl.arange(0, WIDE)[None, None, :]
    to = pages + page[:, None, None] * (_BLOCK * WIDTH) + row[None, :, None] * DIM + column
    inside = is_there[:, None, None] & (column < DIM)
    if KIND == _PLAIN:
        tl.store(to, rows.to(pages.dtype.element_ty), mask=inside)
    else:
        number = rows.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(number), 2), tl.sum(number * 0.0, 2), KIND)
        tl.store(to, encode_rows(number, scale[:, :, None], KIND), mask=inside)
        at = floats_of(pages) + page[:, None] * (_BLOCK * WIDTH // 4) + _BLOCK * DIM // 4 + row[None, :]
        tl.store(at, scale, mask=is_there[:, None])


@triton.jit
def _look_kernel(
    history, query, lse, bits, lies, rings, cells, skips, counts, lists, num_rows, place_stride, row_stride,
    query_stride, steps, words, every, most, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    INT8: tl.constexpr, CHUNK: tl.constexpr, ITEMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Look at the keys of blocks in host memory.

    most: the most looks of a KV head in a step. lists: of all looks, as in `_fetch_kernel`.
    """
    every_row = tl.arange(0, ROWS)
    if tl.max(tl.load(rings + every_row, mask=every_row < num_rows, other=-1), 0) < 0:
        return
    all_looks = num_rows * KV_HEADS * most
    mine = lists + tl.program_id(0) * tl.cdiv(all_looks, tl.num_programs(0))
    listed = 0
    for begin in range(0, all_looks, CHUNK):
        look = begin + tl.arange(0, CHUNK)
        row, kv_head, is_there = look // most // KV_HEADS, look // most % KV_HEADS, look < all_looks
        ring = tl.load(rings + row, mask=is_there, other=-1)
        is_there = is_there & (ring >= 0)
        cell = tl.load(cells + row, mask=is_there, other=0)
        block = (cell % every).to(tl.int32) + look % most * every
        end = tl.load(skips + num_rows + row, mask=is_there, other=0)
        limit = (end - tl.load(skips + row, mask=is_there, other=0)) // _BLOCK
        is_there = is_there & (block < limit)
        place = ring.to(tl.int64) * KV_HEADS + kv_head
        held = tl.load(bits + place * words + block // _WORD, mask=is_there, other=0) >> (block % _WORD)
        listed = _list_own_items(mine, is_there & ((held & 1) == 0), look, listed)
    tl.debug_barrier()
    count = _count_own_items(listed)
    for begin in range(0, count, ITEMS):
        item = begin + tl.arange(0, ITEMS)
        is_there = item < count
        look = tl.load(mine + item, mask=is_there, other=0)
        row, kv_head = look // most // KV_HEADS, (look // most % KV_HEADS).to(tl.int64)
        ring, cell = tl.load(rings + row, mask=is_there, other=0).to(tl.int64), tl.load(cells + row)
        block = (cell % every).to(tl.int32) + look % most * every
        table, token = lies + ring * (_COLUMNS * PIECES), block.to(tl.int64) * _BLOCK
        piece = _pieces_of(table, token, PIECES)
        is_there = is_there & (piece >= 0)
        address, row_bytes = _first_row(table, piece, is_there, token, kv_head, _KEYS, PIECES)
        stored = _rows_at(address, row_bytes, is_there, DIM, WIDE, INT8)
        centre, key_scale = _centre_and_scale(table, piece, is_there, kv_head, PIECES, DIM, WIDE, INT8)
        key = stored.to(tl.float32) * key_scale[:, None, None] + centre[:, None, :]
        column = tl.arange(0, WIDE)[None, :]
        best = tl.zeros([ITEMS], tl.float32)
        for member in tl.static_range(GROUP):
            head = kv_head * GROUP + member
            at = query + (row.to(tl.int64) * query_stride + head * DIM)[:, None] + column
            own = tl.load(at, mask=column < DIM, other=0.0).to(tl.float32)
            top = tl.max(tl.sum(key * own[:, None, :], 2), 1) * scale
            best = tl.maximum(best, tl.exp(top - tl.load(lse + row * (KV_HEADS * GROUP) + head)))
        to = history + (ring * KV_HEADS + kv_head) * place_stride + (cell % steps) * row_stride + block
        tl.store(to, code_of(best), mask=is_there)
        tl.atomic_add(counts + _LOOKED, tl.sum(is_there.to(tl.int64), 0))


def fetch_blocks(
    ids: Tensor, fresh: Tensor, lies: Tensor, keys: Tensor, values: Tensor, kv_heads: int, is_int8: bool,
    late: Lateness | None,
) -> None:  # fmt: skip
    """Fetch the blocks of one layer's slots that are `fresh`, uint8 `[places, slots]`.

    For the other arrays see `Blocks`.

    is_int8: whether host rows are int8, else bf16. late: whether late blocks may be left out; None: all are waited for.
    Raises ValueError for another shape, dtype or device. Addresses are trusted, and blocks must lie in their rings'
    runs.
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
    lists = torch.empty(PROGRAMS, triton.cdiv(ids.numel(), PROGRAMS), dtype=torch.int32, device=device)
    _fetch_kernel[(PROGRAMS,)](
        ids, fresh, lies, keys, values, *lateness, lists, ids.numel(), slots, 1 if late is None else late.bits.shape[1],
        KV_HEADS=kv_heads, PIECES=pieces, DIM=dim, WIDE=triton.next_power_of_2(dim),
        INT8=is_int8, KIND=kind_of(keys), LEAVES=late is not None, CHUNK=CHUNK, ITEMS=BLOCKS_AT_ONCE,
        num_warps=WARPS,
    )  # fmt: skip


def look_at_blocks(
    blocks: Blocks, query: Tensor, lse: Tensor, own: HistoryRows, every: int, scale: float, is_int8: bool,
    counts: Tensor,
) -> None:  # fmt: skip
    """Record in one layer's histories what the rows' queries would attend to in blocks that are only in host memory.

    One of `every` blocks of the skipped range is looked at in a step, in turn, by its keys in host memory. Blocks in
    slots are left out: they are read anyway. blocks: of the layer; history, bits and `lies` are used. query: `[rows,
    heads, dim]`, after RoPE. lse: float32 `[rows, heads]`, of what was read exactly. counts: int64 `[NUM_COUNTS]`, to
    whose LOOKED this adds. Raises ValueError for another shape or dtype.
    """
    history, bits, lies, rings, cells, skips = blocks.history, blocks.bits, blocks.lies, own.rings, own.cells, own.skips
    op, (rows, heads, dim), device = "look_at_blocks", query.shape, query.device
    num_rings, _, pieces = lies.shape
    kv_heads = len(history) // num_rings
    check(op, "history", history, tuple(history.shape), torch.uint8, device)
    check(op, "lse", lse, (rows, heads), torch.float32, device)
    check(op, "bits", bits, (len(history), bits.shape[1]), torch.int32, device)
    check(op, "lies", lies, (num_rings, COLUMNS, pieces), torch.int64, device)
    check(op, "rings", rings, (rows,), torch.int32, device)
    check(op, "cells", cells, (rows,), torch.int64, device)
    check(op, "skips", skips, (3, rows), torch.int32, device)
    check(op, "counts", counts, (NUM_COUNTS,), torch.int64, device)
    if not runs_on_triton(history):
        look_at_blocks_reference(blocks, query, lse, own, every, scale, is_int8, counts)
        return
    most = triton.cdiv(history.shape[2], every)
    lists = torch.empty(PROGRAMS, triton.cdiv(rows * kv_heads * most, PROGRAMS), dtype=torch.int32, device=device)
    _look_kernel[(PROGRAMS,)](
        history, query, lse.contiguous(), bits, lies, rings, cells, skips, counts, lists, rows, history.stride(0),
        history.stride(1), query.stride(0), history.shape[1], bits.shape[1], every, most, scale,
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, PIECES=pieces, DIM=dim, WIDE=triton.next_power_of_2(dim),
        INT8=is_int8, CHUNK=CHUNK, ITEMS=LOOKS_AT_ONCE, ROWS=triton.next_power_of_2(rows), num_warps=WARPS,
    )  # fmt: skip
