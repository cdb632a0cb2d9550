"""Write a row of history after a step: exp(max - lse) of each block, the largest of a KV head's query heads.

A block that was not read keeps its value of the row before. A low value stays low until the block is looked at. A block
with a high value is chosen and read, which corrects the value. Invariant: lse covers only what was read exactly, near
and fetched. A sample's estimate of the rest never enters, since it would then decide what the next sample leaves out.
Bytes: the row before, read once, and the maxima outside skipped ranges.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.predicted.listing import Listed
from gpu.operations.arguments import check, runs_on_triton
from gpu.predictor.history import STEPS_PER_OCTAVE, TOP_CODE, attended_maxima, compress
from transfer.tier_shape import BLOCK_TOKENS

TILE = 1024

_BLOCK, _TOP, _STEPS = tl.constexpr(BLOCK_TOKENS), tl.constexpr(TOP_CODE), tl.constexpr(STEPS_PER_OCTAVE)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What the rows read of blocks in slots.

    maxima: float32 `[rows * kv_heads, group, slots]`, the largest logit of each block, natural. listed: the blocks.
    lse: float32 `[rows, heads]`.
    """

    maxima: Tensor
    listed: Listed
    lse: Tensor


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The rows of a step, and the rings whose histories they write.

    rings: int32 `[rows]`, -1: none. cells: int64 `[rows]`, of the step's tokens. skips: int32 `[3, rows]`, in cells, as
    in `StepRows`; a skipped range begins with the offloaded run, or is empty.
    """

    rings: Tensor
    cells: Tensor
    skips: Tensor


def note_step_reference(
    history: Tensor, maxima: Tensor, near_lse: Tensor, fetched: Fetched | None, own: HistoryRows, first_block: int,
    kv_heads: int,
) -> Tensor:  # fmt: skip
    """Compute `note_step` in plain torch."""
    rings, cells = own.rings, own.cells
    group, blocks = maxima.shape[1] // kv_heads, history.shape[2]
    lse = near_lse if fetched is None else torch.logaddexp(near_lse, fetched.lse)
    for row in (rings >= 0).nonzero().flatten().tolist():
        cell = int(cells[row])
        width = min(cell // BLOCK_TOKENS + 1 - first_block, blocks)
        for kv_head in range(kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            tops = maxima[row, heads, first_block : first_block + width].clone()
            if fetched is not None:
                item = row * kv_heads + kv_head
                count = int(fetched.listed.tokens[item]) // BLOCK_TOKENS
                tops[:, fetched.listed.ids[item, :count].long()] = fetched.maxima[item, :, :count]
            attended = attended_maxima(tops, lse[row, heads]).amax(0)
            rows = history[int(rings[row]) * kv_heads + kv_head]
            last = rows[(cell - 1) % len(rows), : len(attended)]
            is_read = (tops > -torch.inf).any(0)
            rows[cell % len(rows), : len(attended)] = torch.where(is_read, compress(attended, history.dtype), last)
    return lse


@triton.jit
def code_of(attended):
    """Compress in the same way as `gpu.predictor.history.compress`."""
    code = _TOP + _STEPS * tl.log2(tl.maximum(attended, 1e-30))
    return (tl.minimum(tl.maximum(code, 0.0), 255.0) + 0.5).to(tl.int32).to(tl.uint8)


@triton.jit
def _exact_lse(near_lse, fetched_lse, head, FETCHED: tl.constexpr):
    """Return the lse over what a head read exactly."""
    lse = tl.load(near_lse + head)
    if FETCHED:
        other = tl.load(fetched_lse + head)
        top = tl.maximum(lse, other)
        base = tl.where(top == float("-inf"), 0.0, top)
        lse = tl.where(top == float("-inf"), top, base + tl.log(tl.exp(lse - base) + tl.exp(other - base)))
    return lse


@triton.jit
def _note_kernel(
    history, maxima, near_lse, fetched_lse, lse, fetched, listed, tokens, rings, cells, skips, first_block, blocks,
    known, num_rows, place_stride, row_stride, steps, slots,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, FETCHED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row, kv_head = item // KV_HEADS, item % KV_HEADS
    ring = tl.load(rings + row)
    if ring < 0:
        return
    if tl.program_id(1) == 0:
        for member in tl.static_range(GROUP):
            head = item * GROUP + member
            tl.store(lse + head, _exact_lse(near_lse, fetched_lse, head, FETCHED))
    cell = tl.load(cells + row)
    width = tl.minimum((cell // _BLOCK).to(tl.int32) + 1 - first_block, blocks)
    begin = tl.program_id(1) * TILE
    if begin >= width:
        return
    place = ring.to(tl.int64) * KV_HEADS + kv_head
    to = history + place * place_stride + (cell % steps) * row_stride
    block = begin + tl.arange(0, TILE)
    last = history + place * place_stride + ((cell + steps - 1) % steps) * row_stride
    kept = tl.load(last + block, mask=block < width, other=0)
    at = first_block + block
    is_known = (block < width) & ((at + 1) * _BLOCK > tl.load(skips + num_rows + row))
    best, highest = tl.zeros([TILE], tl.float32), tl.full([TILE], float("-inf"), tl.float32)
    for member in tl.static_range(GROUP):
        head = item * GROUP + member
        own_lse = _exact_lse(near_lse, fetched_lse, head, FETCHED)
        top = tl.load(maxima + head.to(tl.int64) * known + at, mask=is_known, other=float("-inf"))
        best = tl.maximum(best, tl.where(top > float("-inf"), tl.exp(top - own_lse), 0.0))
        highest = tl.maximum(highest, top)
    tl.store(to + block, tl.where(highest > float("-inf"), code_of(best), kept), mask=block < width)
    if FETCHED:
        tl.debug_barrier()  # the stores below overwrite some of these
        slot = tl.arange(0, SLOTS)
        is_listed = slot < tl.load(tokens + item) // _BLOCK
        own = tl.load(listed + item.to(tl.int64) * slots + slot, mask=is_listed, other=-1)
        best = tl.zeros([SLOTS], tl.float32)
        for member in tl.static_range(GROUP):
            own_lse = _exact_lse(near_lse, fetched_lse, item * GROUP + member, FETCHED)
            of_slots = fetched + (item.to(tl.int64) * GROUP + member) * slots + slot
            top = tl.load(of_slots, mask=is_listed, other=float("-inf"))
            best = tl.maximum(best, tl.where(top > float("-inf"), tl.exp(top - own_lse), 0.0))
        tl.store(to + own, code_of(best), mask=is_listed & (own >= begin) & (own < begin + TILE))


def note_step(
    history: Tensor, maxima: Tensor, near_lse: Tensor, fetched: Fetched | None, own: HistoryRows, first_block: int,
    kv_heads: int,
) -> Tensor:  # fmt: skip
    """Write each row's newest history row in one layer's histories, uint8 `[places, rows, blocks]`.

    Returns float32 `[rows, heads]`, the lse over what was read exactly, valid for rows with a ring; what the host
    samples never enters.

    maxima: float32 `[rows, heads, known]`, largest natural logits by block of cells; -inf: not read, as in skipped
    ranges, so the value before is kept. The run begins with block `first_block` of them. near_lse: float32 `[rows,
    heads]`, of the cells that maxima cover. fetched: what was read in slots, or None. Raises ValueError for another
    shape or dtype.
    """
    rings, cells, skips = own.rings, own.cells, own.skips
    op, (rows, heads, known), device = "note_step", maxima.shape, maxima.device
    places, steps, blocks = history.shape
    check(op, "history", history, (places, steps, blocks), torch.uint8, device)
    check(op, "maxima", maxima, (rows, heads, known), torch.float32, device)
    check(op, "near_lse", near_lse, (rows, heads), torch.float32, device)
    check(op, "rings", rings, (rows,), torch.int32, device)
    check(op, "cells", cells, (rows,), torch.int64, device)
    check(op, "skips", skips, (3, rows), torch.int32, device)
    slots, group, beside = 1, heads // kv_heads, (near_lse, rings, rings)
    if fetched is not None:
        slots, beside = fetched.listed.ids.shape[1], (fetched.maxima, fetched.listed.ids, fetched.listed.tokens)
        check(op, "fetched.maxima", fetched.maxima, (rows * kv_heads, group, slots), torch.float32, device)
        check(op, "fetched.lse", fetched.lse, (rows, heads), torch.float32, device)
    if not runs_on_triton(history):
        return note_step_reference(history, maxima, near_lse, fetched, own, first_block, kv_heads)
    fetched_lse, lse = near_lse if fetched is None else fetched.lse, torch.empty(rows, heads, device=device)
    _note_kernel[(rows * kv_heads, triton.cdiv(blocks, TILE))](
        history, maxima.contiguous(), near_lse.contiguous(), fetched_lse.contiguous(), lse, *beside, rings, cells,
        skips.contiguous(), first_block, blocks, known, rows, history.stride(0), history.stride(1), steps, slots,
        KV_HEADS=kv_heads, GROUP=group, SLOTS=triton.next_power_of_2(slots), FETCHED=fetched is not None, TILE=TILE,
        num_warps=4,
    )  # fmt: skip
    return lse
