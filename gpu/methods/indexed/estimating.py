"""Estimate attention to all tokens that were not chosen, from their scores and their values in few bits.

rest_mass = sum over these tokens of share(t)        rest_out = sum of share(t) * (centre(t) + rounded value(t))
rest_square = sum of (share(t) * scale of value(t))^2 * (what rounding its value and its key errs: `reporting`)

share(t) is the token's estimated part of the whole softmax, so both are relative to `work.total_lse`. A sum over many
tokens averages out what rounding does to single values. Values are rotated; `join_parts` turns rest_out back. Bytes:
codes, scales and centres of values and scales of keys, once for all query heads of a KV head, and two bytes a query
head and token.
"""

import torch
import triton
import triton.language as tl

from gpu.methods.indexed import BLOCK_TOKENS, SPLIT_TOKENS
from gpu.methods.indexed.choosing import has_bits
from gpu.methods.indexed.codes import VALUE_LOSS, decode_reference
from gpu.methods.indexed.ring import Index, Layout, Work
from gpu.methods.indexed.scoring import RingStep, page_of, shares_of
from gpu.methods.indexed.unpacking import BFLOAT16, FOURFOLD, plane_of, unpack_assembly
from gpu.operations.arguments import runs_on_triton
from transfer.tier_shape import WORD_BITS

TILE = 64  # tokens that are estimated at once
KEY_VARIANCE = 12.0  # of a rounded number: its step's square over this
MOST_VARIANCE = 4.0  # of a logit; beyond that the estimate is a guess anyway

_KEY_VARIANCE, _MOST_VARIANCE = tl.constexpr(KEY_VARIANCE), tl.constexpr(MOST_VARIANCE)
_SPLIT, _WORD, _BLOCK = tl.constexpr(SPLIT_TOKENS), tl.constexpr(WORD_BITS), tl.constexpr(BLOCK_TOKENS)


def estimate_rest_reference(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Compute `estimate_rest` in plain torch."""
    for ring, row in enumerate(step.rows.tolist()):
        count = int(step.num_tokens[ring])
        if row < 0 or not count:
            continue
        for place in range(ring * layout.kv_heads, (ring + 1) * layout.kv_heads):
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
def _add_centres(sums, of_blocks, centres, block, is_block, PLANE: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
                 DIM: tl.constexpr):  # fmt: skip
    """Return sums `[SIZE, WIDTH]` with each block's mass `[blocks, SIZE]` times its centre added."""
    byte = tl.arange(0, WIDTH)[None, :]
    at = centres + block[:, None] * DIM + PLANE * W + byte
    centre = tl.load(at, mask=is_block[:, None] & (byte < W), other=0.0).to(tl.float32)
    return sums + tl.sum(of_blocks[:, :, None] * centre[:, None, :], 0)


@triton.jit
def _store_plane(rest_out, to, member, sums, offset, PLANE: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
                 DIM: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    byte = tl.arange(0, WIDTH)[None, :]
    at = rest_out + (to + member)[:, None] * DIM + PLANE * W + byte
    tl.store(at, sums - offset[:, None], mask=(member < GROUP)[:, None] & (byte < W))


@triton.jit
def _estimate_kernel(
    value_codes, value_scales, value_centres, key_scales, table, rotated, rows, num_tokens, shifts, logits, total_lse,
    chosen, rest_out, rest_mass, rest_square, tokens, splits, words, value_loss,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, ASSEMBLY: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Estimate what is not chosen of one split of one place. Codes stand for numbers around 0, as in the scores."""
    place, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ring = place // KV_HEADS
    count, begin = tl.load(num_tokens + ring), split * _SPLIT
    if (tl.load(rows + ring) < 0) | (begin >= count):
        return
    page = page_of(table, ring, split, place % KV_HEADS, splits, KV_HEADS)
    member, byte = tl.arange(0, SIZE), tl.arange(0, WIDTH)[None, :]
    less = tl.load(total_lse + place * GROUP + member, mask=member < GROUP, other=0.0)
    less -= tl.load(shifts + place * GROUP + member, mask=member < GROUP, other=0.0)
    mass, weights, square = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    column = tl.arange(0, WIDE)[None, :]
    is_query = (member < GROUP)[:, None] & (column < DIM)
    query = tl.load(rotated + (place * GROUP + member)[:, None] * DIM + column, mask=is_query, other=0.0)
    key_noise = tl.sum(query.to(tl.float32) * query.to(tl.float32), 1) / _KEY_VARIANCE
    first = tl.zeros([SIZE, WIDTH], tl.float32)
    second, third, fourth = first, first, first
    for at in range(begin, tl.minimum(begin + _SPLIT, count), TILE):
        token = at + tl.arange(0, TILE)
        is_there = token < count
        cell = page * _SPLIT + token - begin
        bits = tl.load(chosen + place * words + token // _WORD, mask=is_there, other=0)
        is_rest = is_there & (((bits >> (token % _WORD)) & 1) == 0)
        share = shares_of(logits, less, place, token, is_rest, tokens, GROUP, SIZE)
        of_blocks = tl.sum(tl.reshape(share, [TILE // _BLOCK, _BLOCK, SIZE]), 1)
        mass += tl.sum(of_blocks, 0)
        block = (at - begin) // _BLOCK + tl.arange(0, TILE // _BLOCK)
        is_block, centres = begin + block * _BLOCK < count, value_centres + page * (_SPLIT // _BLOCK) * DIM
        scale = tl.load(value_scales + cell, mask=is_there, other=0.0).to(tl.float32)
        weight = share * scale[:, None]
        key_scale = tl.load(key_scales + cell, mask=is_there, other=0.0).to(tl.float32)
        variance = tl.minimum((key_scale * key_scale)[:, None] * key_noise[None, :], _MOST_VARIANCE)
        square += tl.sum(weight * weight * (tl.exp(variance) - 1.0 + value_loss), 0)
        weight = weight.to(tl.bfloat16)
        weights += tl.sum(weight.to(tl.float32), 0)
        weight = tl.trans(weight)
        if not FOURFOLD:
            weight = weight.to(tl.float32)
        packed = tl.load(value_codes + cell[:, None] * W + byte, mask=is_there[:, None] & (byte < W), other=0)
        first = tl.dot(weight, plane_of(packed, 0, BITS, ASSEMBLY, False), first)
        first = _add_centres(first, of_blocks, centres, block, is_block, 0, W, WIDTH, DIM)
        second = tl.dot(weight, plane_of(packed, 1, BITS, ASSEMBLY, False), second)
        second = _add_centres(second, of_blocks, centres, block, is_block, 1, W, WIDTH, DIM)
        if BITS == 2:
            third = tl.dot(weight, plane_of(packed, 2, BITS, ASSEMBLY, False), third)
            third = _add_centres(third, of_blocks, centres, block, is_block, 2, W, WIDTH, DIM)
            fourth = tl.dot(weight, plane_of(packed, 3, BITS, ASSEMBLY, False), fourth)
            fourth = _add_centres(fourth, of_blocks, centres, block, is_block, 3, W, WIDTH, DIM)
    offset = weights * ((1 << (BITS - 1)) - 0.5 + (128 if FOURFOLD else 0))
    to = (place * splits + split) * GROUP
    _store_plane(rest_out, to, member, first, offset, 0, W, WIDTH, DIM, GROUP)
    _store_plane(rest_out, to, member, second, offset, 1, W, WIDTH, DIM, GROUP)
    if BITS == 2:
        _store_plane(rest_out, to, member, third, offset, 2, W, WIDTH, DIM, GROUP)
        _store_plane(rest_out, to, member, fourth, offset, 3, W, WIDTH, DIM, GROUP)
    tl.store(rest_mass + to + member, mass, mask=member < GROUP)
    tl.store(rest_square + to + member, square, mask=member < GROUP)


def estimate_rest(index: Index, work: Work, step: RingStep, layout: Layout) -> None:
    """Estimate what rows do not read exactly in one layer: `work.rest_out` and `rest_mass`, by split.

    index: of the layer; work: `choose_tokens` has passed.
    """
    if not runs_on_triton(index.codes):
        estimate_rest_reference(index, work, step, layout)
        return
    places, tokens, width = *work.logits.shape[:2], index.value_codes.shape[3]
    splits, group, dim = work.rest_out.shape[1:]
    assembly = unpack_assembly(layout.value_bits, BFLOAT16)
    _estimate_kernel[(places, splits)](
        index.value_codes, index.value_scales, index.value_centres, index.scales, index.table, work.rotated, step.rows,
        step.num_tokens, work.shift, work.logits, work.total_lse, work.chosen, work.rest_out, work.rest_mass,
        work.rest_square, tokens, splits, work.chosen.shape[1], VALUE_LOSS[layout.value_bits],
        KV_HEADS=layout.kv_heads, GROUP=group, SIZE=max(16, triton.next_power_of_2(group)), DIM=dim, W=width,
        WIDTH=max(16, triton.next_power_of_2(width)), BITS=layout.value_bits, TILE=TILE, ASSEMBLY=assembly,
        WIDE=triton.next_power_of_2(dim), num_warps=2,
    )  # fmt: skip
