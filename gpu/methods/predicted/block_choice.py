"""Choose the blocks with the best scores for each place, and find which of them are not in slots yet.

Invariants: among equal scores the first blocks are chosen, so a choice follows from the scores alone. A chosen block
that is in a slot stays there, and a new one takes a slot whose block is not chosen. Bits change together with ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.predicted.held_blocks import EMPTY
from gpu.methods.predicted.listing import FETCHED, NUM_COUNTS
from gpu.operations.arguments import check, runs_on_triton
from transfer.tier_shape import WORD_BITS

_WORD, _FETCHED = tl.constexpr(WORD_BITS), tl.constexpr(FETCHED)


def choose_blocks_reference(
    scores: Tensor, limits: Tensor, ids: Tensor, bits: Tensor, is_in: Tensor, counts: Tensor
) -> Tensor:
    """Compute `choose_blocks` in plain torch."""
    fresh = torch.zeros_like(ids, dtype=torch.uint8)
    for place in is_in.nonzero().flatten().tolist():
        own, wished = ids[place], scores[place, : int(limits[place])]
        best = wished.argsort(descending=True, stable=True)[: ids.shape[1]]
        asked = best[wished[best] > -torch.inf].sort().values.int()
        coming = asked[~torch.isin(asked, own)]
        slots = (~torch.isin(own, asked)).nonzero().flatten()
        own[slots] = EMPTY
        own[slots[: len(coming)]] = coming
        fresh[place, slots[: len(coming)]] = 1
        bits[place] = pack_bits(asked, bits.shape[1])
    counts[FETCHED] += fresh.sum()
    return fresh


def pack_bits(blocks: Tensor, words: int) -> Tensor:
    """Return int32 `[words]` in which the bits of these blocks are set."""
    flags = torch.zeros(words * WORD_BITS, dtype=torch.int64, device=blocks.device)
    flags[blocks.long()] = 1
    sums = (flags.view(words, WORD_BITS) << torch.arange(WORD_BITS, device=blocks.device)).sum(1)
    return torch.where(sums >= 2**31, sums - 2**32, sums).int()


@triton.jit
def _ranks(flags):
    """Return for each flag how many flags before it are set."""
    ones = flags.to(tl.int32)
    return tl.cumsum(ones, 0) - ones


@triton.jit
def _choose_blocks_kernel(
    scores, limits, ids, bits, is_in, fresh, counts, coming, blocks, slots, words,
    BLOCKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose the blocks of one place.

    coming: int32 `[places, slots]`, written here: the new blocks, in order. Other threads than those that write it read
    it, and so it is with the bits of chosen blocks.
    """
    WORDS: tl.constexpr = BLOCKS // _WORD
    place = tl.program_id(0).to(tl.int64)
    slot, word, block = tl.arange(0, SLOTS), tl.arange(0, WORDS), tl.arange(0, BLOCKS)
    inside, is_word = slot < slots, word < words
    ids, fresh, coming, bits = ids + place * slots, fresh + place * slots, coming + place * slots, bits + place * words
    if tl.load(is_in + place) == 0:
        tl.store(fresh + slot, tl.zeros([SLOTS], tl.uint8), mask=inside)
        return
    is_there = block < tl.minimum(tl.load(limits + place), blocks)
    score = tl.load(scores + place * blocks + block, mask=is_there, other=float("-inf")) + 0.0  # one zero
    code = score.to(tl.int32, bitcast=True)
    order = (code ^ tl.where(code < 0, -1, -2147483648)).to(tl.uint32, bitcast=True)  # in the order of scores
    least, one = tl.zeros([], tl.uint32), tl.full([], 1, tl.uint32)  # least: largest that enough blocks reach
    for digit in range(32):
        tried = least | (one << (31 - digit))
        least = tl.where(tl.sum((order >= tried).to(tl.int32), 0) >= slots, tried, least)
    is_above, is_alike = order > least, order == least
    left = slots - tl.sum(is_above.to(tl.int32), 0)
    is_chosen = (is_above | (is_alike & (_ranks(is_alike) < left))) & (score > float("-inf"))
    chosen = tl.sum(tl.reshape(is_chosen.to(tl.int32), [WORDS, _WORD]) << tl.arange(0, _WORD)[None, :], 1)

    held = tl.load(bits + block // _WORD, mask=block // _WORD < words, other=0) >> (block % _WORD)
    is_new = is_chosen & ((held & 1) == 0)
    tl.store(coming + _ranks(is_new), block, mask=is_new)
    tl.debug_barrier()  # all threads have read the old bits
    tl.store(bits + word, chosen, mask=is_word)
    tl.debug_barrier()
    own = tl.load(ids + slot, mask=inside, other=-1)
    kept = tl.load(bits + own // _WORD, mask=own >= 0, other=0, volatile=True) >> (own % _WORD)
    is_free = inside & (((own >= 0) & ((kept & 1) != 0)) == 0)
    rank = _ranks(is_free)
    is_fresh = is_free & (rank < tl.sum(is_new.to(tl.int32), 0))
    come = tl.load(coming + rank, mask=is_fresh, other=-1, volatile=True)
    tl.store(ids + slot, tl.where(is_free, come, own), mask=inside)
    tl.store(fresh + slot, is_fresh.to(tl.uint8), mask=inside)
    tl.atomic_add(counts + _FETCHED, tl.sum(is_fresh.to(tl.int32), 0).to(tl.int64))


def choose_blocks(
    scores: Tensor, limits: Tensor, ids: Tensor, bits: Tensor, is_in: Tensor, counts: Tensor
) -> Tensor:  # fmt: skip
    """Replace each place's blocks by those with the best scores.

    Returns uint8 `[places, slots]`: slots that need a fetch.

    scores: float32 `[places, blocks]`, -inf: never chosen. limits: int32 `[places]`; only blocks below the limit are
    chosen. ids, bits: see `Blocks`; changed. is_in: bool `[places]`; other places stay as they are. counts: int64
    `[NUM_COUNTS]`, to whose FETCHED this adds. Raises ValueError for another shape or dtype.
    """
    op, (places, slots), device, blocks = "choose_blocks", ids.shape, ids.device, scores.shape[-1]
    check(op, "scores", scores, (places, blocks), torch.float32, device)
    check(op, "limits", limits, (places,), torch.int32, device)
    check(op, "ids", ids, (places, slots), torch.int32, device)
    check(op, "bits", bits, (places, bits.shape[1]), torch.int32, device)
    check(op, "is_in", is_in, (places,), torch.bool, device)
    check(op, "counts", counts, (NUM_COUNTS,), torch.int64, device)
    if bits.shape[1] * WORD_BITS < blocks:
        raise ValueError(f"{op}: bits of {bits.shape[1] * WORD_BITS} blocks; wanted of {blocks} or more")
    if not runs_on_triton(ids):
        return choose_blocks_reference(scores, limits, ids, bits, is_in, counts)
    fresh, coming = torch.empty(places, slots, dtype=torch.uint8, device=device), torch.empty_like(ids)
    size = max(triton.next_power_of_2(bits.shape[1]) * WORD_BITS, WORD_BITS)
    _choose_blocks_kernel[(places,)](
        scores, limits, ids, bits, is_in, fresh, counts, coming, blocks, slots, bits.shape[1],
        BLOCKS=size, SLOTS=triton.next_power_of_2(slots), num_warps=min(max(size // 512, 1), 16),
    )  # fmt: skip
    return fresh
