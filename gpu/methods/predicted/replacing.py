"""The difference between the blocks that a place has and those that it should have: which slots are kept, which change.

It refuses to know what blocks hold. Invariants: a block that is wanted and there keeps its slot; a new one takes a slot
whose block is not wanted; bits change with ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, runs_on_triton
from gpu.methods.predicted.blocks import EMPTY
from gpu.methods.predicted.listing import FETCHED, NUM_COUNTS
from transfer.tier_shape import WORD_BITS

_WORD = tl.constexpr(WORD_BITS)


def replace_blocks_reference(ids: Tensor, bits: Tensor, wanted: Tensor, is_in: Tensor, counts: Tensor) -> Tensor:
    """Plain torch; see `replace_blocks`."""
    fresh = torch.zeros_like(ids, dtype=torch.uint8)
    for place in is_in.nonzero().flatten().tolist():
        own, asked = ids[place], wanted[place][wanted[place] != EMPTY]
        is_free = ~torch.isin(own, asked)
        coming = asked[~torch.isin(asked, own)]
        slots = is_free.nonzero().flatten()
        own[slots] = EMPTY
        own[slots[: len(coming)]] = coming
        fresh[place, slots[: len(coming)]] = 1
        bits[place] = pack_bits(own[own != EMPTY], bits.shape[1])
    counts[FETCHED] += fresh.sum()
    return fresh


def pack_bits(blocks: Tensor, words: int) -> Tensor:
    """int32 `[words]` with the bits of these blocks."""
    flags = torch.zeros(words * WORD_BITS, dtype=torch.int64, device=blocks.device)
    flags[blocks.long()] = 1
    sums = (flags.view(words, WORD_BITS) << torch.arange(WORD_BITS, device=blocks.device)).sum(1)
    return torch.where(sums >= 2**31, sums - 2**32, sums).int()


@triton.jit
def _replace_kernel(
    ids, bits, wanted, is_in, fresh, counts, slots, words,
    SLOTS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = slot < slots
    if tl.load(is_in + place) == 0:
        tl.store(fresh + place * slots + slot, tl.zeros([SLOTS], tl.uint8), mask=inside)
        return
    own = tl.load(ids + place * slots + slot, mask=inside, other=-1)
    asked = tl.load(wanted + place * slots + slot, mask=inside, other=-2)
    asked = tl.where(asked < 0, -2, asked)
    same = (own[:, None] == asked[None, :]).to(tl.int32)  # [own, asked]
    is_free = ((tl.sum(same, 1) == 0) & inside).to(tl.int32)
    is_new = ((tl.sum(same, 0) == 0) & (asked >= 0)).to(tl.int32)
    free_rank = tl.cumsum(is_free, 0) - is_free
    new_rank = tl.cumsum(is_new, 0) - is_new
    takes = (free_rank[:, None] == new_rank[None, :]) & (is_free[:, None] == 1) & (is_new[None, :] == 1)
    coming = tl.sum(tl.where(takes, asked[None, :] + 1, 0), 1) - 1
    is_fresh = coming >= 0
    tl.store(ids + place * slots + slot, tl.where(is_free == 1, coming, own), mask=inside)
    tl.store(fresh + place * slots + slot, is_fresh.to(tl.uint8), mask=inside)
    leaves = (is_free == 1) & (own >= 0)
    one = tl.full([SLOTS], 1, tl.int32)
    gone, come = tl.where(leaves, own, 0), tl.where(is_fresh, coming, 0)
    tl.atomic_xor(bits + place * words + gone // _WORD, one << (gone % _WORD), mask=leaves)
    tl.atomic_xor(bits + place * words + come // _WORD, one << (come % _WORD), mask=is_fresh)
    tl.atomic_add(counts + 2, tl.sum(is_fresh.to(tl.int32), 0).to(tl.int64))


def replace_blocks(ids: Tensor, bits: Tensor, wanted: Tensor, is_in: Tensor, counts: Tensor) -> Tensor:
    """Have the blocks of one layer's places be those that are wanted; uint8 `[places, slots]`: whose rows must come.

    ids, bits: see `Blocks`, changed; wanted: int32 `[places, slots]`, each block once, EMPTY: none; is_in: bool
    `[places]`, others stay as they are; counts: int64 `[NUM_COUNTS]`, FETCHED is added to. Raises ValueError for
    another shape or dtype.
    """
    op, (places, slots), device = "replace_blocks", ids.shape, ids.device
    check(op, "ids", ids, (places, slots), torch.int32, device)
    check(op, "bits", bits, (places, bits.shape[1]), torch.int32, device)
    check(op, "wanted", wanted, (places, slots), torch.int32, device)
    check(op, "is_in", is_in, (places,), torch.bool, device)
    check(op, "counts", counts, (NUM_COUNTS,), torch.int64, device)
    if not runs_on_triton(ids):
        return replace_blocks_reference(ids, bits, wanted, is_in, counts)
    fresh = torch.empty(places, slots, dtype=torch.uint8, device=device)
    _replace_kernel[(places,)](
        ids, bits, wanted, is_in, fresh, counts, slots, bits.shape[1],
        SLOTS=triton.next_power_of_2(slots), num_warps=8,
    )  # fmt: skip
    return fresh
