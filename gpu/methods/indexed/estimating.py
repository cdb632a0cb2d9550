"""Estimate attention to all tokens that were not chosen, from their scores and their values in few bits.

rest_mass = sum over these tokens of share(t)        rest_out = sum of share(t) * (centre(t) + rounded value(t))
rest_square = sum of (share(t) * scale of value(t))^2 * (error from rounding its value and its key: `reporting`)

share(t) is the token's estimated part of the whole softmax, so all sums are relative to `work.total_lse`. A sum over
many tokens averages out the rounding errors of single values. Values are rotated; `join_parts` rotates rest_out back.
Bytes: codes and scales of values, centres of blocks that have one, and scales of keys, once for all query heads of a KV
head; and two bytes per query head and token.
"""

import torch
import triton
import triton.language as tl

from gpu.methods.indexed import BLOCK_TOKENS, SPLIT_TOKENS
from gpu.methods.indexed.choosing import has_bits
from gpu.methods.indexed.codes import VALUE_LOSS, decode_reference
from gpu.methods.indexed.ring import Index, Layout, Work
from gpu.methods.indexed.scoring import LOG2E, RingStep, logits_of, page_of, place_of, shares_of
from gpu.methods.indexed.unpacking import exp2_of
from gpu.methods.indexed.words import ON_CARD, number_places, numbers_of, word_assembly
from gpu.operations.arguments import runs_on_triton
from transfer.tier_shape import WORD_BITS

TILE, WARPS = 64, 2  # tokens that are estimated at once, and the warps that do it
KEY_VARIANCE = 12.0  # a rounded number's variance is its step's square over this
MOST_VARIANCE = 4.0  # of a logit; with more, the estimate is a guess anyway

_KEY_VARIANCE, _MOST_VARIANCE = tl.constexpr(KEY_VARIANCE), tl.constexpr(MOST_VARIANCE)
_LOG2E = tl.constexpr(LOG2E)
_SPLIT, _WORD, _BLOCK = tl.constexpr(SPLIT_TOKENS), tl.constexpr(WORD_BITS), tl.constexpr(BLOCK_TOKENS)


def estimate_rest_reference(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Compute `estimate_rest` in plain torch."""
    for place, _, count in step.list_places(layout.kv_heads):
        shift = work.shift[place] - work.total_lse[place]
        shares = (work.logits[place, :count].T.float() + shift[:, None]).exp()
        is_chosen = has_bits(work.chosen[place], torch.arange(count, device=shares.device))
        rest = torch.where(is_chosen, 0.0, shares)
        codes, scales = (index.rows_of(one, place, count) for one in (index.value_codes, index.value_scales))
        values = decode_reference(codes, scales, layout.value_bits)
        centres = index.rows_of(index.value_centres, place, count).float()
        values += centres.repeat_interleave(BLOCK_TOKENS, 0)[:count]
        work.rest_out[place] = 0.0
        work.rest_mass[place] = 0.0
        work.rest_out[place, 0] = rest @ values
        work.rest_mass[place, 0] = rest.sum(-1)
        work.rest_square[place] = 0.0
        own = work.rotated[place].float().square().sum(-1) / KEY_VARIANCE
        steps = index.rows_of(index.scales, place, count).float().square()
        noise = VALUE_LOSS[layout.value_bits] + (own[:, None] * steps).clamp_max(MOST_VARIANCE).expm1()
        work.rest_square[place, 0] = ((rest * scales.float()).square() * noise).sum(-1)


@triton.jit
def _estimate_kernel(
    words, value_scales, value_centres, key_scales, table, rotated, rows, rings, num_tokens, shifts, logits, total_lse,
    chosen, rest_out, rest_mass, rest_square, tokens, splits, num_words, value_loss,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
    WIDTH: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr, TILE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Estimate the tokens of one split of one place that are not chosen.

    Codes stand for numbers around 0, as in the scores. What centres add is computed after the loop, if any block has
    one. All loads of the next tile are started while a tile is computed. Its codes are only brought into the first
    cache: if they were carried through the loop, their layout would be changed too late.
    """
    row, ring, place = place_of(rows, rings, KV_HEADS)
    split = tl.program_id(1)
    count, begin = tl.load(num_tokens + place), split * _SPLIT
    if (row < 0) | (begin >= count):
        return
    page = page_of(table, ring, split, place % KV_HEADS, splits, KV_HEADS)
    own_words, scales, steps = words + page * _SPLIT * W, value_scales + page * _SPLIT, key_scales + page * _SPLIT
    member, lane, word = tl.arange(0, SIZE), tl.arange(0, TILE), tl.arange(0, WIDTH)[None, :]
    is_head = member < GROUP
    less = tl.load(total_lse + place * GROUP + member, mask=is_head, other=0.0)
    less -= tl.load(shifts + place * GROUP + member, mask=is_head, other=0.0)
    column = tl.arange(0, WIDE)[None, :]
    is_query = is_head[:, None] & (column < DIM)
    query = tl.load(rotated + (place * GROUP + member)[:, None] * DIM + column, mask=is_query, other=0.0)
    key_noise = tl.sum(query.to(tl.float32) * query.to(tl.float32), 1) / _KEY_VARIANCE
    dim, is_dim, times = number_places(W, WIDTH, LOW, BITS)
    own_chosen, own_logits = chosen + place * num_words, logits + place * tokens * GROUP
    end = tl.minimum(begin + _SPLIT, count)
    out = tl.zeros([16 // BITS * WIDTH, SIZE], tl.float32)
    mass, weights = tl.zeros([TILE, SIZE], tl.float32), tl.zeros([TILE, SIZE], tl.float32)
    square, least = tl.zeros([TILE, SIZE], tl.float32), tl.zeros([TILE], tl.float32)
    is_there = begin + lane < count
    coming_logit = logits_of(own_logits, begin + lane, is_there, GROUP, SIZE)
    coming_bits = tl.load(own_chosen + (begin + lane) // _WORD, mask=is_there, other=0)
    coming_scale = tl.load(scales + lane, mask=is_there, other=0.0)
    coming_step = tl.load(steps + lane, mask=is_there, other=0.0)
    touched = lane * 0
    some = touched
    for at in range(begin, end, TILE):
        some ^= touched
        cell = at - begin + lane
        bits, logit = coming_bits >> ((at + lane) % _WORD), coming_logit
        scale, key_scale = coming_scale.to(tl.float32), coming_step.to(tl.float32)
        token, after = at + TILE + lane, tl.minimum(cell + TILE, _SPLIT - 1)
        is_there = token < end
        touched = tl.load((own_words + after * W).to(tl.pointer_type(tl.int32)))  # brings codes into the first cache
        coming_logit = logits_of(own_logits, token, is_there, GROUP, SIZE)
        coming_bits = tl.load(own_chosen + token // _WORD, mask=is_there, other=0)
        coming_scale = tl.load(scales + after, mask=is_there, other=0.0)
        coming_step = tl.load(steps + after, mask=is_there, other=0.0)
        packed = tl.load(own_words + cell[:, None] * W + word, mask=word < W, other=0)
        share = tl.where(((bits & 1) == 0)[:, None], shares_of(logit, less), 0.0)
        mass += share
        least = tl.minimum(least, scale)
        weight = share * tl.abs(scale)[:, None]
        variance = tl.minimum((key_scale * key_scale)[:, None] * key_noise[None, :], _MOST_VARIANCE)
        square += weight * weight * (exp2_of(variance * _LOG2E) + (value_loss - 1.0))
        weight = weight.to(tl.bfloat16)
        weights += weight.to(tl.float32)
        numbers = numbers_of(packed, WIDTH, LOW, TILE, BITS, ASSEMBLY)
        out = tl.dot(tl.trans(numbers), weight.to(numbers.dtype), out)
    STEPS: tl.constexpr = 128 if ON_CARD else 1  # 2 to the power of MANTISSA
    ones = (1 << (BITS - 1)) - 0.5 + (STEPS / times if ON_CARD else times * 0.0)
    out = out * (STEPS / times)[:, None] - tl.sum(weights, 0)[None, :] * ones[:, None]
    if tl.min(least, 0) < 0:
        for at in range(begin, end, _BLOCK):
            token = at + tl.arange(0, _BLOCK)
            bits = tl.load(own_chosen + token // _WORD, mask=token < end, other=-1)
            is_rest = ((bits >> (token % _WORD)) & 1) == 0
            share = tl.sum(shares_of(logits_of(own_logits, token, is_rest, GROUP, SIZE), less), 0)
            of_block = value_centres + (page * (_SPLIT // _BLOCK) + (at - begin) // _BLOCK) * DIM
            centre = tl.load(of_block + dim, mask=is_dim, other=0.0).to(tl.float32)
            out += centre[:, None] * share[None, :]
    to = (place * splits + split) * GROUP + member
    tl.store(rest_out + to[None, :] * DIM + dim[:, None], out, mask=is_head[None, :] & is_dim[:, None])
    tl.store(rest_mass + to, tl.sum(mass, 0), mask=is_head)
    kept = tl.where(tl.sum(some, 0) == 1, 1e-30, 0.0)  # so that the compiler keeps the loads for the cache
    tl.store(rest_square + to, tl.sum(square, 0) + kept, mask=is_head)


def estimate_rest(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Estimate what rows do not read exactly in one layer: fills `work.rest_out`, `rest_mass` and `rest_square`, by
    split.

    index: of the layer. work: `choose_tokens` has run.
    """
    if not runs_on_triton(index.codes):
        estimate_rest_reference(index, work, step, layout)
        return
    tokens, width = work.logits.shape[1], index.value_codes.shape[3]
    splits, group, dim = work.rest_out.shape[1:]
    size, bits = max(4, triton.next_power_of_2(group)), layout.value_bits
    _estimate_kernel[(step.num_entries * layout.kv_heads, splits)](
        index.value_codes.view(torch.int16), index.value_scales, index.value_centres, index.scales, index.table,
        work.rotated, step.rows, step.rings, step.num_tokens, work.shift, work.logits, work.total_lse, work.chosen,
        work.rest_out, work.rest_mass, work.rest_square, tokens, splits, work.chosen.shape[1], VALUE_LOSS[bits],
        KV_HEADS=layout.kv_heads, GROUP=group, SIZE=size, DIM=dim, W=width // 2,
        WIDTH=max(8, triton.next_power_of_2(width // 2)), LOW=8, BITS=bits, ASSEMBLY=word_assembly(bits), TILE=TILE,
        WIDE=triton.next_power_of_2(dim), num_warps=WARPS, num_stages=1,
    )  # fmt: skip
