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
    ids, bits, wanted, is_in, fresh, counts, marks, coming, slots, words,
    SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """marks: int32 `[places, words]`, coming: int32 `[places, slots]`, written here: the bits of what is wanted, and
    what of it is new, in its order. Both are read by other threads than wrote them."""
    place = tl.program_id(0).to(tl.int64)
    slot, word = tl.arange(0, SLOTS), tl.arange(0, WORDS)
    inside = slot < slots
    ids, fresh, coming, wanted = (
        ids + place * slots,
        fresh + place * slots,
        coming + place * slots,
        wanted + place * slots,
    )
    bits, marks = bits + place * words, marks + place * words
    if tl.load(is_in + place) == 0:
        tl.store(fresh + slot, tl.zeros([SLOTS], tl.uint8), mask=inside)
        return
    own = tl.load(ids + slot, mask=inside, other=-1)
    asked = tl.load(wanted + slot, mask=inside, other=-1)
    tl.store(marks + word, tl.zeros([WORDS], tl.int32), mask=word < words)
    one = tl.full([SLOTS], 1, tl.int32)
    is_asked, is_held = asked >= 0, own >= 0
    held = tl.load(bits + asked // _WORD, mask=is_asked, other=0) >> (asked % _WORD)
    is_new = is_asked & ((held & 1) == 0)
    new_rank = tl.cumsum(is_new.to(tl.int32), 0) - is_new.to(tl.int32)
    tl.store(coming + new_rank, asked, mask=is_new)
    tl.debug_barrier()
    tl.atomic_or(marks + asked // _WORD, one << (asked % _WORD), mask=is_asked)
    tl.debug_barrier()
    kept = tl.load(marks + own // _WORD, mask=is_held, other=0, volatile=True) >> (own % _WORD)
    is_free = inside & ((is_held & ((kept & 1) != 0)) == 0)
    free_rank = tl.cumsum(is_free.to(tl.int32), 0) - is_free.to(tl.int32)
    is_fresh = is_free & (free_rank < tl.sum(is_new.to(tl.int32), 0))
    come = tl.load(coming + free_rank, mask=is_fresh, other=-1, volatile=True)
    tl.store(ids + slot, tl.where(is_free, come, own), mask=inside)
    tl.store(fresh + slot, is_fresh.to(tl.uint8), mask=inside)
    leaves = is_free & is_held
    tl.atomic_xor(bits + own // _WORD, one << (own % _WORD), mask=leaves)
    tl.atomic_xor(bits + come // _WORD, one << (come % _WORD), mask=is_fresh)
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
    marks, coming = torch.empty_like(bits), torch.empty_like(ids)
    _replace_kernel[(places,)](
        ids, bits, wanted, is_in, fresh, counts, marks, coming, slots, bits.shape[1],
        SLOTS=triton.next_power_of_2(slots), WORDS=triton.next_power_of_2(bits.shape[1]), num_warps=4,
    )  # fmt: skip
    return fresh
