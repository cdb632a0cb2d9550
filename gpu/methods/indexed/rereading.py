"""Read all of a KV head's offloaded tokens exactly if the bound of its answer's error is above epsilon.

The rows come over the link within the step, or from resident pages; programs of other KV heads end at once. Bytes: all
rows of the KV heads above epsilon.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed import SPLIT_TOKENS
from gpu.methods.indexed.host_rows import find_piece, read_rows, restored_rows, row_address
from gpu.methods.indexed.page_rows import Pages, page_arguments, page_rows, read_pages
from gpu.methods.indexed.reporting import Report
from gpu.methods.indexed.ring import Index, Layout, Work
from gpu.methods.indexed.scoring import RingStep, group_shape, place_of
from gpu.operations.arguments import runs_on_triton
from transfer import places
from transfer.partial import Partial
from transfer.places import COLUMNS

TILE = 32  # tokens that are read at once

_SPLIT, _COLUMNS = tl.constexpr(SPLIT_TOKENS), tl.constexpr(COLUMNS)
_KEYS, _VALUES = tl.constexpr(places.KEYS), tl.constexpr(places.VALUES)


def read_again_reference(query: Tensor, found: Partial, index: Index, report: Report, step: RingStep,
                         layout: Layout, pages: Pages | None) -> None:  # fmt: skip
    """Compute `read_again` in plain torch."""
    group, dim = group_shape(query, layout.kv_heads)
    for place, row, count in step.list_places(layout.kv_heads):
        if not report.exceeds[place]:
            continue
        ring, kv_head = divmod(place, layout.kv_heads)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        slot = -1 if step.page_slots is None else int(step.page_slots[ring])
        if pages is not None and slot >= 0:
            tokens = torch.arange(count, device=query.device)
            keys, values = (read_pages(rows, pages, slot, tokens, kv_head) for rows in (pages.keys, pages.values))
        else:
            keys, values = read_rows(index, ring, kv_head, torch.arange(count), layout.rows)
        logits = query[row, heads].float() @ keys.T * dim**-0.5
        found.out[row, heads], found.lse[row, heads] = logits.softmax(-1) @ values, logits.logsumexp(-1)


@triton.jit
def _read_again_kernel(
    query, exceeds, lies, piece_centres, piece_key_scales, piece_value_scales, rows, rings, num_tokens, page_slots,
    key_pages, value_pages, page_table, split_out, split_lse, row_stride, splits, max_pages, first_cell,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one place."""
    row, ring, place = place_of(rows, rings, KV_HEADS)
    kv_head, split = place % KV_HEADS, tl.program_id(1)
    count, begin = tl.load(num_tokens + place), split * _SPLIT
    if (row < 0) | (begin >= count):
        return
    if tl.load(exceeds + place) == 0:
        return
    member, column = tl.arange(0, SIZE), tl.arange(0, WIDE)[None, :]
    own_query = query + row.to(tl.int64) * row_stride + (kv_head * GROUP + member)[:, None] * DIM + column
    own = tl.load(own_query, mask=(member < GROUP)[:, None] & (column < DIM), other=0.0)
    most = tl.full([SIZE], float("-inf"), tl.float32)
    mass, out = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE, WIDE], tl.float32)
    table = lies + ring * (_COLUMNS * PIECES)
    page_slot = -1
    if PAGED:
        page_slot = tl.load(page_slots + ring)
    for first in range(begin, tl.minimum(begin + _SPLIT, count), TILE):
        token = first + tl.arange(0, TILE)
        is_there = token < count
        lies_in_host = is_there & (tl.zeros([TILE], tl.int32) + page_slot < 0)
        piece = find_piece(table, tl.where(lies_in_host, token, 0), PIECES)
        head = (ring * PIECES + piece) * KV_HEADS + kv_head
        scale = piece_key_scales + head
        at = row_address(table, piece, token, kv_head, lies_in_host, _KEYS, PIECES)
        key = restored_rows(at, lies_in_host, scale, scale, DIM, WIDE, ROWS, False)
        is_number = lies_in_host[:, None] & (column < DIM)
        key += tl.load(piece_centres + head[:, None] * DIM + column, mask=is_number, other=0.0)
        at = row_address(table, piece, token, kv_head, lies_in_host, _VALUES, PIECES)
        value = restored_rows(at, lies_in_host, scale, piece_value_scales + head * DIM, DIM, WIDE, ROWS, True)
        if PAGED:  # noqa: SIM102 (a constant, which leaves the rest out)
            if page_slot >= 0:
                pages, cells = page_table + page_slot.to(tl.int64) * max_pages, first_cell + token
                key = page_rows(
                    key_pages, pages, cells, is_there, kv_head, KV_HEADS, PAGE_TOKENS, DIM, WIDE, KIND
                ).to(tl.float32)  # fmt: skip
                value = page_rows(
                    value_pages, pages, cells, is_there, kv_head, KV_HEADS, PAGE_TOKENS, DIM, WIDE, KIND
                ).to(tl.float32)  # fmt: skip
        logit = tl.dot(own, tl.trans(key.to(own.dtype)), input_precision="ieee") / tl.sqrt(DIM * 1.0)
        logit = tl.where(is_there[None, :], logit, float("-inf"))
        higher = tl.maximum(most, tl.max(logit, 1))
        weight, kept = tl.exp(logit - higher[:, None]), tl.exp(most - higher)
        mass = mass * kept + tl.sum(weight, 1)
        out = out * kept[:, None] + tl.dot(weight.to(own.dtype), value.to(own.dtype), input_precision="ieee")
        most = higher
    to = (place * splits + split) * GROUP + member
    is_number = (member < GROUP)[:, None] & (column < DIM)
    tl.store(split_out + to[:, None] * DIM + column, out / mass[:, None], mask=is_number)
    tl.store(split_lse + to, most + tl.log(mass), mask=member < GROUP)


@triton.jit
def _replace_kernel(
    exceeds, rows, rings, num_tokens, split_out, split_lse, out, lse, splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Replace the partial of one query head by the one that was read exactly."""
    row, _, place = place_of(rows, rings, KV_HEADS)
    row, kv_head, count = row.to(tl.int64), place % KV_HEADS, tl.load(num_tokens + place)
    member = tl.program_id(1)
    if (row < 0) | (count <= 0):
        return
    if tl.load(exceeds + place) == 0:
        return
    split, column = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    is_split = split * _SPLIT < count
    at = (place * splits + split) * GROUP + member
    own = tl.load(split_lse + at, mask=is_split, other=float("-inf"))
    most = tl.max(own, 0)
    weight = tl.exp(own - most)
    sums = tl.sum(weight, 0)
    inside = is_split[:, None] & (column < DIM)[None, :]
    read = tl.load(split_out + at[:, None] * DIM + column[None, :], mask=inside, other=0.0)
    to = (row * KV_HEADS + kv_head) * GROUP + member
    tl.store(out + to * DIM + column, tl.sum(read * weight[:, None], 0) / sums, mask=column < DIM)
    tl.store(lse + to, most + tl.log(sums))


def read_again(query: Tensor, found: Partial, index: Index, work: Work, report: Report, step: RingStep,
               layout: Layout, pages: Pages | None = None) -> None:  # fmt: skip
    """Replace the partials of KV heads with `report.exceeds` by exact ones over all their tokens.

    found: what `join_parts` returned. index: of the layer. work: its estimate is no longer needed, and is overwritten.
    pages: of the layer, see `attend_chosen`.
    """
    if not runs_on_triton(index.codes):
        read_again_reference(query, found, index, report, step, layout, pages)
        return
    group, dim = group_shape(query, layout.kv_heads)
    programs, splits = step.num_entries * layout.kv_heads, work.split_lse.shape[1]
    at, numbers, paged = page_arguments(pages, step.page_slots, (step.rows, index.keys, index.values, index.ids))
    shape = {"KV_HEADS": layout.kv_heads, "GROUP": group, "DIM": dim, "WIDE": triton.next_power_of_2(dim)}
    _read_again_kernel[(programs, splits)](
        query, report.exceeds, index.lies, index.piece_centres, index.piece_key_scales, index.piece_value_scales,
        step.rows, step.rings, step.num_tokens, *at, work.rest_out, work.split_lse, query.stride(0), splits, *numbers,
        SIZE=max(16, triton.next_power_of_2(group)), PIECES=index.lies.shape[2], ROWS=layout.rows, TILE=TILE,
        num_warps=4, num_stages=1, **shape, **paged,
    )  # fmt: skip
    _replace_kernel[(programs, group)](
        report.exceeds, step.rows, step.rings, step.num_tokens, work.rest_out, work.split_lse, found.out, found.lse,
        splits, SPLITS=triton.next_power_of_2(splits), num_warps=4, **shape,
    )  # fmt: skip
