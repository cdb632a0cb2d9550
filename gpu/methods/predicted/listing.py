"""List the blocks in slots that each row's KV heads read in this step, as a page table.

Invariant: a block is listed if and only if it is in a slot and lies in the row's skipped range of this step. So nothing
is read twice: a block that was reloaded to pages after its fetch is read there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.predicted.held_blocks import EMPTY
from gpu.operations.arguments import check, runs_on_triton
from transfer.tier_shape import BLOCK_TOKENS

SKIP, READ, FETCHED, LOOKED, LATE, WHOLE = range(6)  # columns of counts: tokens per KV head, and blocks
NUM_COUNTS = 6

_BLOCK, _SKIP, _READ = tl.constexpr(BLOCK_TOKENS), tl.constexpr(SKIP), tl.constexpr(READ)


@dataclass(frozen=True, slots=True)
class Listed:
    """The blocks that rows read in one layer.

    pages: int32 `[rows * kv_heads, slots]`, indices of the layer's `keys` and `values`. ids: the blocks in these pages,
    of the same shape. tokens: int32 `[rows * kv_heads]`, how many tokens of them are valid. rows: int32 `[rows *
    kv_heads]`, the row of `pages` to read, -1: none. excluded: int32 `[rows, kv_heads, words]`, the bits of blocks in
    slots, for a host request.
    """

    pages: Tensor
    ids: Tensor
    tokens: Tensor
    rows: Tensor
    excluded: Tensor


def list_blocks_reference(
    ids: Tensor, bits: Tensor, rings: Tensor, skips: Tensor, kv_heads: int, counts: Tensor
) -> Listed:
    """Compute `list_blocks` in plain torch."""
    slots, device = ids.shape[1], ids.device
    has_ring = (rings >= 0).repeat_interleave(kv_heads)
    place = (rings.clamp(min=0)[:, None] * kv_heads + torch.arange(kv_heads, device=device)).flatten()
    limit = ((skips[1] - skips[0]) // BLOCK_TOKENS).repeat_interleave(kv_heads)
    own = ids[place]
    is_read = (own != EMPTY) & (own < limit[:, None]) & has_ring[:, None]
    order = (~is_read).long().argsort(dim=1, stable=True)
    count = is_read.sum(1, dtype=torch.int32)
    counts[SKIP] += BLOCK_TOKENS * limit[has_ring].sum()
    counts[READ] += BLOCK_TOKENS * count.sum()
    excluded = torch.where(has_ring[:, None], bits[place], 0)
    return Listed(
        pages=(place[:, None] * slots + order).int(),
        ids=own.gather(1, order),
        tokens=BLOCK_TOKENS * count,
        rows=torch.where(has_ring, torch.arange(len(place), device=device), -1).int(),
        excluded=excluded.view(len(rings), kv_heads, -1),
    )


@triton.jit
def _list_kernel(
    ids, bits, rings, skips, pages, listed, tokens, rows, excluded, counts, num_rows, slots, words,
    KV_HEADS: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    row, kv_head = item // KV_HEADS, item % KV_HEADS
    ring = tl.load(rings + row)
    slot, word = tl.arange(0, SLOTS), tl.arange(0, WORDS)
    if ring < 0:
        tl.store(excluded + item.to(tl.int64) * words + word, tl.zeros([WORDS], tl.int32), mask=word < words)
        tl.store(rows + item, -1)
        tl.store(tokens + item, 0)
        return
    place = ring.to(tl.int64) * KV_HEADS + kv_head
    limit = (tl.load(skips + num_rows + row) - tl.load(skips + row)) // _BLOCK
    own = tl.load(ids + place * slots + slot, mask=slot < slots, other=-1)
    is_read = (own >= 0) & (own < limit)
    flag = is_read.to(tl.int32)
    to = item.to(tl.int64) * slots + tl.cumsum(flag, 0) - flag
    tl.store(pages + to, (place * slots).to(tl.int32) + slot, mask=is_read)
    tl.store(listed + to, own, mask=is_read)
    count = tl.sum(flag, 0)
    tl.store(tokens + item, count * _BLOCK)
    tl.store(rows + item, item)
    own_bits = tl.load(bits + place * words + word, mask=word < words, other=0)
    tl.store(excluded + item.to(tl.int64) * words + word, own_bits, mask=word < words)
    tl.atomic_add(counts + _SKIP, (limit * _BLOCK).to(tl.int64))
    tl.atomic_add(counts + _READ, (count * _BLOCK).to(tl.int64))


def list_blocks(ids: Tensor, bits: Tensor, rings: Tensor, skips: Tensor, kv_heads: int, counts: Tensor) -> Listed:
    """List the blocks that rows read in one layer.

    ids, bits: see `Blocks`. rings: int32 `[rows]`, -1: none. skips: int32 `[3, rows]`, in cells, as in `StepRows`.
    counts: int64 `[NUM_COUNTS]`, to whose SKIP and READ this adds. Raises ValueError for another shape or dtype.
    """
    op, (places, slots), rows, device = "list_blocks", ids.shape, len(rings), ids.device
    words = bits.shape[1]
    check(op, "ids", ids, (places, slots), torch.int32, device)
    check(op, "bits", bits, (places, words), torch.int32, device)
    check(op, "rings", rings, (rows,), torch.int32, device)
    check(op, "skips", skips, (3, rows), torch.int32, device)
    check(op, "counts", counts, (NUM_COUNTS,), torch.int64, device)
    if not runs_on_triton(ids):
        return list_blocks_reference(ids, bits, rings, skips, kv_heads, counts)
    items = rows * kv_heads
    listed = Listed(
        pages=torch.empty(items, slots, dtype=torch.int32, device=device),
        ids=torch.empty(items, slots, dtype=torch.int32, device=device),
        tokens=torch.empty(items, dtype=torch.int32, device=device),
        rows=torch.empty(items, dtype=torch.int32, device=device),
        excluded=torch.empty(rows, kv_heads, words, dtype=torch.int32, device=device),
    )
    _list_kernel[(items,)](
        ids, bits, rings, skips, listed.pages, listed.ids, listed.tokens, listed.rows, listed.excluded, counts, rows,
        slots, words,
        KV_HEADS=kv_heads, SLOTS=triton.next_power_of_2(slots), WORDS=triton.next_power_of_2(words), num_warps=1,
    )  # fmt: skip
    return listed
