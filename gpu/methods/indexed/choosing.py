"""Choose the tokens that a KV head reads exactly, and give them slots.

A token is chosen if its score's bin is above the threshold: the lowest bin with no more tokens above it than the
budget. Scores of one bin differ by at most 3.5 %. All tokens of a bin are chosen or none is, so fewer than the budget
may be chosen. Which token gets which slot does not depend on the order in which programs run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed import BINS, SPLIT_TOKENS
from gpu.methods.indexed.ring import EMPTY, Index, Layout, Work
from gpu.methods.indexed.scoring import RingStep, place_of
from gpu.operations.arguments import runs_on_triton
from transfer.tier_shape import WORD_BITS

_SPLIT, _BINS, _WORD = tl.constexpr(SPLIT_TOKENS), tl.constexpr(BINS), tl.constexpr(WORD_BITS)


def find_threshold(histogram: Tensor, num_tokens: int, budget: int) -> int:
    """Return the bin above which tokens are chosen, -1: all are chosen. histogram: int `[BINS]`."""
    if num_tokens <= budget:
        return -1
    above = histogram.long().flip(0).cumsum(0).flip(0) - histogram
    return int((above > budget).sum())


def set_bits(tokens: Tensor, num_words: int) -> Tensor:
    """Return int32 `[num_words]` in which the bit of each of these tokens is set."""
    flags = torch.zeros(num_words * WORD_BITS, dtype=torch.int64, device=tokens.device)
    flags[tokens] = 1
    sums = (flags.view(-1, WORD_BITS) << torch.arange(WORD_BITS, device=tokens.device)).sum(1)
    return torch.where(sums >= 2**31, sums - 2**32, sums).int()


def has_bits(words: Tensor, tokens: Tensor) -> Tensor:
    """Return whether each token's bit is set, bool."""
    return (words[tokens // WORD_BITS] >> (tokens % WORD_BITS)) & 1 != 0


def choose_tokens_reference(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Compute `choose_tokens` in plain torch."""
    for place, _, count in step.list_places(layout.kv_heads):
        threshold = find_threshold(work.histogram[place], count, int(step.budgets[place]))
        chosen = (work.bins[place, :count] > threshold).nonzero().flatten()
        work.chosen[place] = set_bits(chosen, work.chosen.shape[1])


def give_slots_reference(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Compute `give_slots` in plain torch."""
    for place, _, count in step.list_places(layout.kv_heads):
        tokens = torch.arange(count, device=work.chosen.device)
        _give_slots(index, work, place, tokens[has_bits(work.chosen[place], tokens)])


def _give_slots(index: Index, work: Work, place: int, chosen: Tensor) -> None:
    """Give chosen tokens that have no slot the slots of tokens that are no longer chosen, in order."""
    ids = index.ids[place]
    known = ids.clamp_min(0).long()
    is_kept = (ids != EMPTY) & has_bits(work.chosen[place], known)
    is_held = torch.zeros(work.chosen.shape[1] * WORD_BITS, dtype=torch.bool, device=ids.device)
    is_held[known[is_kept]] = True
    coming = chosen[~is_held[chosen]]
    free = (~is_kept).nonzero().flatten()
    ids[free] = EMPTY
    ids[free[: len(coming)]] = coming.int()
    work.fresh[place] = 0
    work.fresh[place, free[: len(coming)]] = 1
    index.held[place] = work.chosen[place]


@triton.jit
def _threshold(histogram, place, count, budget):
    """Return the bin above which tokens are chosen; see `find_threshold`."""
    own = tl.load(histogram + place * _BINS + tl.arange(0, _BINS))
    above = tl.sum(own, 0) - tl.cumsum(own, 0)
    found = tl.sum((above > budget).to(tl.int32), 0)
    return tl.where(count <= budget, -1, found)


@triton.jit
def _choose_tokens_kernel(
    held, rows, rings, num_tokens, budgets, bins, histogram, chosen, coming, num_coming, tokens, splits, words,
    KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Choose tokens of one split of one place."""
    row, _, place = place_of(rows, rings, KV_HEADS)
    split = tl.program_id(1)
    count, begin = tl.load(num_tokens + place), split * _SPLIT
    if (row < 0) | (begin >= count):
        return
    token = begin + tl.arange(0, _SPLIT)
    own = tl.load(bins + place * tokens + token)
    held_bits = tl.load(held + place * words + token // _WORD)
    threshold = _threshold(histogram, place, count, tl.load(budgets + place))
    is_chosen = (token < count) & (own > threshold)

    word, bit = begin // _WORD + tl.arange(0, _SPLIT // _WORD), tl.arange(0, _WORD)[None, :]
    own_bits = tl.sum(tl.reshape(is_chosen.to(tl.int32), [_SPLIT // _WORD, _WORD]) << bit, 1)
    tl.store(chosen + place * words + word, own_bits)
    is_new = (is_chosen & (((held_bits >> (token % _WORD)) & 1) == 0)).to(tl.int32)
    rank = tl.cumsum(is_new, 0) - is_new
    tl.store(coming + place * tokens + begin + rank, token, mask=is_new != 0)
    tl.store(num_coming + place * splits + split, tl.sum(is_new, 0))


@triton.jit
def _slots_kernel(
    ids, held, rows, rings, num_tokens, chosen, coming, num_coming, coming_before, fresh, tokens, splits, words, slots,
    KV_HEADS: tl.constexpr, SPLITS: tl.constexpr, WORDS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Give slots to one place's chosen tokens: the n-th free slot to the n-th token that has none."""
    row, _, place = place_of(rows, rings, KV_HEADS)
    count = tl.load(num_tokens + place)
    if (row < 0) | (count <= 0):
        return
    split, slot, number = tl.arange(0, SPLITS), tl.arange(0, SLOTS), tl.arange(0, WORDS)
    inside = slot < slots
    own = tl.load(ids + place * slots + slot, mask=inside, other=-1)
    listed = tl.load(num_coming + place * splits + split, mask=split * _SPLIT < count, other=0)
    is_word = (number * _WORD < count) & (number < words)
    now = tl.load(chosen + place * words + number, mask=is_word, other=0)
    is_known = (own >= 0) & (own < count)
    bits = tl.load(chosen + place * words + own // _WORD, mask=is_known, other=0)
    before = coming_before + place * splits
    tl.store(before + split, tl.cumsum(listed, 0) - listed, mask=split < splits)
    is_free = inside & (((bits >> (own % _WORD)) & 1) == 0)
    rank = tl.cumsum(is_free.to(tl.int32), 0) - is_free.to(tl.int32)
    is_fresh = is_free & (rank < tl.sum(listed, 0))
    tl.debug_barrier()  # `before` is read as other threads have stored it
    where_from = tl.zeros([SLOTS], tl.int32)
    for level in tl.static_range(1, 20):
        if (SPLITS >> level) > 0:
            probe = where_from + (SPLITS >> level)
            begin = tl.load(before + probe, mask=is_fresh & (probe * _SPLIT < count), other=2147483647)
            where_from = tl.where(begin <= rank, probe, where_from)
    first = tl.load(before + where_from, mask=is_fresh, other=0)
    come = tl.load(coming + place * tokens + where_from * _SPLIT + rank - first, mask=is_fresh, other=-1)
    tl.store(ids + place * slots + slot, tl.where(is_free, come, own), mask=inside)
    tl.store(fresh + place * slots + slot, is_fresh.to(tl.uint8), mask=inside)
    tl.store(held + place * words + number, now, mask=number < words)


def choose_tokens(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Choose the tokens that rows read exactly in one layer, from `work.histogram`. index: of the layer.

    Fills `work.chosen`, and lists the chosen tokens that have no slot.
    """
    if not runs_on_triton(index.codes):
        choose_tokens_reference(index, work, step, layout)
        return
    tokens, splits = work.logits.shape[1], work.split_lse.shape[1]
    _choose_tokens_kernel[(step.num_entries * layout.kv_heads, splits)](
        index.held, step.rows, step.rings, step.num_tokens, step.budgets, work.bins, work.histogram, work.chosen,
        work.coming, work.num_coming, tokens, splits, work.chosen.shape[1],
        KV_HEADS=layout.kv_heads, num_warps=4,
    )  # fmt: skip


def give_slots(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Give slots to the chosen tokens of one layer: fills `index.ids`, and `work.fresh` for the new ones.

    index: of the layer. work: `choose_tokens` has run.
    """
    if not runs_on_triton(index.codes):
        give_slots_reference(index, work, step, layout)
        return
    tokens = work.logits.shape[1]
    splits, words, slots = work.split_lse.shape[1], work.chosen.shape[1], index.ids.shape[1]
    _slots_kernel[(step.num_entries * layout.kv_heads,)](
        index.ids, index.held, step.rows, step.rings, step.num_tokens, work.chosen, work.coming, work.num_coming,
        work.coming_before, work.fresh, tokens, splits, words, slots,
        KV_HEADS=layout.kv_heads, SPLITS=triton.next_power_of_2(splits), WORDS=triton.next_power_of_2(words),
        SLOTS=triton.next_power_of_2(slots), num_warps=32,
    )  # fmt: skip
