"""Attend exactly to the chosen tokens, and merge that with the estimate into one partial per row.

Rows that are not in their slots yet come over the link: a program loads them from host memory, stores them to the
slots, and goes on with them. Bytes over the link: fresh rows, once per KV head. Rows in resident pages are read there,
and nothing is stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.indexed import MASS_UNIT, READ_SLOTS, SPLIT_TOKENS
from gpu.methods.indexed.host_rows import find_piece, read_rows, restored_rows, row_address
from gpu.methods.indexed.page_rows import Pages, page_arguments, page_rows, read_pages
from gpu.methods.indexed.ring import EMPTY, Index, Layout, Work
from gpu.methods.indexed.scoring import RingStep, group_shape, place_of
from gpu.operations.arguments import runs_on_triton
from transfer import places
from transfer.partial import Partial
from transfer.places import COLUMNS

OFFLOADED, READ, FETCHED, TOKENS, HEADS, MASS = range(6)  # of counts, in the order of `indexed.COUNTERS`
NUM_COUNTS = 6
TILE = 64  # slots that are attended to at once

_SPLIT, _READS = tl.constexpr(SPLIT_TOKENS), tl.constexpr(READ_SLOTS)
_KEYS, _VALUES = tl.constexpr(places.KEYS), tl.constexpr(places.VALUES)
_COLUMNS, _MASS_UNIT = tl.constexpr(COLUMNS), tl.constexpr(MASS_UNIT)
_OFFLOADED, _READ, _FETCHED = tl.constexpr(OFFLOADED), tl.constexpr(READ), tl.constexpr(FETCHED)
_TOKENS, _HEADS, _MASS = tl.constexpr(TOKENS), tl.constexpr(HEADS), tl.constexpr(MASS)


def attend_chosen_reference(
    query: Tensor, index: Index, work: Work, step: RingStep, layout: Layout, counts: Tensor, pages: Pages | None
) -> None:
    """Compute `attend_chosen` in plain torch."""
    group, dim = group_shape(query, layout.kv_heads)
    for place, row, count in step.list_places(layout.kv_heads):
        ring, kv_head = divmod(place, layout.kv_heads)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        ids = index.ids[place]
        own = (ids != EMPTY).nonzero().flatten()
        slot = -1 if step.page_slots is None else int(step.page_slots[ring])
        if pages is not None and slot >= 0:
            keys, values = (read_pages(rows, pages, slot, ids[own].long(), kv_head)
                            for rows in (pages.keys, pages.values))  # fmt: skip
        else:
            _fetch_reference(index, work, ring, kv_head, layout)
            counts[FETCHED] += work.fresh[place].sum()
            keys, values = index.keys[place, own].float(), index.values[place, own].float()
        logits = query[row, heads].float() @ keys.T * dim**-0.5
        lse = logits.logsumexp(-1) if len(own) else torch.full((group,), -torch.inf)
        work.read_lse[place] = -torch.inf
        work.read_lse[place, 0] = lse
        weights = (logits - lse[:, None]).exp()
        work.read_out[place, 0] = weights @ values
        counts[OFFLOADED] += count
        counts[READ] += len(own)


def _fetch_reference(index: Index, work: Work, ring: int, kv_head: int, layout: Layout) -> None:
    """Copy a place's fresh rows to their slots."""
    place = ring * layout.kv_heads + kv_head
    fresh = work.fresh[place].nonzero().flatten()
    if len(fresh):
        keys, values = read_rows(index, ring, kv_head, index.ids[place, fresh].long(), layout.rows)
        index.keys[place, fresh] = keys.to(index.keys.dtype)
        index.values[place, fresh] = values.to(index.values.dtype)


def join_parts_reference(work: Work, rings: Tensor, wanted: Tensor, step: RingStep, layout: Layout,
                         shape: tuple[int, int, int], counts: Tensor) -> Partial:  # fmt: skip
    """Compute `join_parts` in plain torch."""
    rows, heads, dim = shape
    found = Partial.empty(rows, heads, dim, work.rest_out.device)
    group = work.rest_mass.shape[2]
    for row, ring in enumerate(rings.tolist()):
        for head in range(heads) if ring >= 0 else ():
            place, member = ring * (heads // group) + head // group, head % group
            num_tokens = int(step.num_tokens[place])
            if not num_tokens or not wanted[row, head]:
                continue
            mass = work.rest_mass[place, :, member].sum()
            counts[HEADS] += 1
            counts[MASS] += int(mass * MASS_UNIT)
            counts[TOKENS] += num_tokens
            rest_lse = mass.log() + work.total_lse[place, member]
            lses = torch.cat([work.read_lse[place, :, member], rest_lse[None]])
            rest = work.rest_out[place, :, member].sum(0) @ layout.rotation.T / mass.clamp_min(1e-38)
            outs = torch.cat([work.read_out[place, :, member], rest[None]])
            lse = lses.logsumexp(0)
            weights = (lses - lse).exp()
            used = weights > 0
            found.out[row, head] = (weights[used, None] * outs[used]).sum(0)
            found.lse[row, head] = lse
    return found


@triton.jit
def _attend_kernel(
    query, ids, fresh, keys, values, lies, piece_centres, piece_key_scales, piece_value_scales, rows, rings,
    num_tokens, page_slots, key_pages, value_pages, page_table, read_out, read_lse, counts, row_stride, slots, reads,
    max_pages, first_cell,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Attend to READ_SLOTS slots of one place."""
    row, ring, place = place_of(rows, rings, KV_HEADS)
    kv_head, part = place % KV_HEADS, tl.program_id(1)
    count = tl.load(num_tokens + place)
    if (row < 0) | (count <= 0):
        return
    member, column = tl.arange(0, SIZE), tl.arange(0, WIDE)[None, :]
    own_query = query + row.to(tl.int64) * row_stride + (kv_head * GROUP + member)[:, None] * DIM + column
    own = tl.load(own_query, mask=(member < GROUP)[:, None] & (column < DIM), other=0.0)
    most = tl.full([SIZE], float("-inf"), tl.float32)
    mass, out = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE, WIDE], tl.float32)
    num_read, num_fetched = 0, 0
    table = lies + ring * (_COLUMNS * PIECES)
    page_slot = -1
    if PAGED:
        page_slot = tl.load(page_slots + ring)
    for first in range(part * _READS, part * _READS + _READS, TILE):
        slot = first + tl.arange(0, TILE)
        inside = slot < slots
        token = tl.load(ids + place * slots + slot, mask=inside, other=-1)
        is_there = token >= 0
        lies_in_host = tl.zeros([TILE], tl.int32) + page_slot < 0
        is_fetched = is_there & lies_in_host
        is_fresh = is_fetched & (tl.load(fresh + place * slots + slot, mask=inside, other=0) != 0)
        cell = (place * slots + slot)[:, None] * DIM + column
        is_known = (is_fetched & (is_fresh == 0))[:, None] & (column < DIM)
        key = tl.load(keys + cell, mask=is_known, other=0.0)
        value = tl.load(values + cell, mask=is_known, other=0.0)
        coming = tl.sum(is_fresh.to(tl.int32), 0)
        if coming > 0:
            piece = find_piece(table, tl.where(is_fresh, token, 0), PIECES)
            head = (ring * PIECES + piece) * KV_HEADS + kv_head
            is_new = is_fresh[:, None] & (column < DIM)
            at = row_address(table, piece, token, kv_head, is_fresh, _KEYS, PIECES)
            scale = piece_key_scales + head
            new_key = restored_rows(at, is_fresh, scale, scale, DIM, WIDE, ROWS, False)
            new_key += tl.load(piece_centres + head[:, None] * DIM + column, mask=is_new, other=0.0)
            at = row_address(table, piece, token, kv_head, is_fresh, _VALUES, PIECES)
            new_value = restored_rows(at, is_fresh, scale, piece_value_scales + head * DIM, DIM, WIDE, ROWS, True)
            key = tl.where(is_fresh[:, None], new_key.to(key.dtype), key)
            value = tl.where(is_fresh[:, None], new_value.to(value.dtype), value)
            tl.store(keys + cell, key, mask=is_new)
            tl.store(values + cell, value, mask=is_new)
        if PAGED:  # noqa: SIM102 (a constant, which leaves the rest out)
            if page_slot >= 0:
                pages, cells = page_table + page_slot.to(tl.int64) * max_pages, first_cell + token
                key = page_rows(
                    key_pages, pages, cells, is_there, kv_head, KV_HEADS, PAGE_TOKENS, DIM, WIDE, KIND
                ).to(key.dtype)  # fmt: skip
                value = page_rows(
                    value_pages, pages, cells, is_there, kv_head, KV_HEADS, PAGE_TOKENS, DIM, WIDE, KIND
                ).to(value.dtype)  # fmt: skip
        logit = tl.dot(own, tl.trans(key), input_precision="ieee") / tl.sqrt(DIM * 1.0)
        logit = tl.where(is_there[None, :], logit, float("-inf"))
        higher = tl.maximum(most, tl.max(logit, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(logit - base[:, None])
        kept = tl.exp(most - base)
        mass = mass * kept + tl.sum(weight, 1)
        out = out * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        most = higher
        num_read += tl.sum(is_there.to(tl.int32), 0)
        num_fetched += coming
    to = (place * reads + part) * GROUP + member
    is_some = mass > 0
    own_out = tl.where(is_some[:, None], out / tl.where(is_some, mass, 1.0)[:, None], 0.0)
    lse = tl.where(is_some, most + tl.log(tl.where(is_some, mass, 1.0)), float("-inf"))
    tl.store(read_out + to[:, None] * DIM + column, own_out, mask=(member < GROUP)[:, None] & (column < DIM))
    tl.store(read_lse + to, lse, mask=member < GROUP)
    tl.atomic_add(counts + _READ, num_read.to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + _FETCHED, num_fetched.to(tl.int64), sem="relaxed")
    if part == 0:
        tl.atomic_add(counts + _OFFLOADED, count.to(tl.int64), sem="relaxed")


@triton.jit
def _join_kernel(
    rings, wanted, num_tokens, rotation, total_lse, rest_out, rest_mass, read_out, read_lse, out, lse, counts, splits,
    reads,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr,
    READS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Merge what one query head of one row read exactly with its estimate, which is rotated back first."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ring, column = tl.load(rings + row), tl.arange(0, WIDE)
    to = row * HEADS + head
    place = ring.to(tl.int64) * (HEADS // GROUP) + head // GROUP
    count = 0
    if ring >= 0:
        count = tl.load(num_tokens + place)
    if count <= 0:
        tl.store(out + to * DIM + column, tl.zeros([WIDE], tl.float32), mask=column < DIM)
        tl.store(lse + to, float("-inf"))
        return
    member = head % GROUP
    split, part = tl.arange(0, SPLITS), tl.arange(0, READS)
    is_split, is_part = split * _SPLIT < count, part < reads
    at = (place * splits + split) * GROUP + member
    mass = tl.sum(tl.load(rest_mass + at, mask=is_split, other=0.0), 0)
    total = tl.load(total_lse + place * GROUP + member)
    inside = is_split[:, None] & (column < DIM)[None, :]
    rest = tl.sum(tl.load(rest_out + at[:, None] * DIM + column[None, :], mask=inside, other=0.0), 0)
    at = (place * reads + part) * GROUP + member
    own_lse = tl.load(read_lse + at, mask=is_part, other=float("-inf"))
    most = tl.maximum(tl.max(own_lse, 0), tl.where(mass > 0, total, float("-inf")))
    weight = tl.exp(own_lse - most)
    of_rest = tl.where(mass > 0, tl.exp(tl.minimum(total - most, 0.0)), 0.0)
    sums = tl.sum(weight, 0) + mass * of_rest
    rest *= of_rest
    is_wanted = tl.load(wanted + to) != 0
    for first in range(0, DIM, PART):
        dim = first + tl.arange(0, PART)
        is_turned = (dim < DIM)[:, None] & (column < DIM)[None, :]
        turned = tl.load(rotation + dim[:, None] * DIM + column[None, :], mask=is_turned, other=0.0)
        is_read = is_part[:, None] & (dim < DIM)[None, :]
        read = tl.load(read_out + at[:, None] * DIM + dim[None, :], mask=is_read, other=0.0)
        answer = (tl.sum(read * weight[:, None], 0) + tl.sum(turned * rest[None, :], 1)) / sums
        tl.store(out + to * DIM + dim, tl.where(is_wanted, answer, 0.0), mask=dim < DIM)
    tl.store(lse + to, tl.where(is_wanted, most + tl.log(sums), float("-inf")))
    tl.atomic_add(counts + _HEADS, is_wanted.to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + _MASS, tl.where(is_wanted, mass * _MASS_UNIT, 0.0).to(tl.int64), sem="relaxed")
    tl.atomic_add(counts + _TOKENS, tl.where(is_wanted, count, 0).to(tl.int64), sem="relaxed")


def attend_chosen(
    query: Tensor, index: Index, work: Work, step: RingStep, layout: Layout, counts: Tensor, pages: Pages | None = None
) -> None:
    """Attend to the chosen tokens of one layer. Fills `work.read_out` and `read_lse`.

    Fresh tokens are fetched to their slots. If `step.page_slots` says that the ring's tokens are in resident pages, all
    are read there. counts: int64 `[NUM_COUNTS]`, to whose OFFLOADED, READ and FETCHED this adds. pages: of the layer;
    None: no ring has any.
    """
    if not runs_on_triton(index.codes):
        attend_chosen_reference(query, index, work, step, layout, counts, pages)
        return
    at, numbers, paged = page_arguments(pages, step.page_slots, (step.rows, index.keys, index.values, index.ids))
    group, dim = group_shape(query, layout.kv_heads)
    slots = index.ids.shape[1]
    reads = work.read_lse.shape[1]
    _attend_kernel[(step.num_entries * layout.kv_heads, reads)](
        query, index.ids, work.fresh, index.keys, index.values, index.lies, index.piece_centres,
        index.piece_key_scales, index.piece_value_scales, step.rows, step.rings, step.num_tokens, *at,
        work.read_out, work.read_lse, counts, query.stride(0), slots, reads, *numbers,
        KV_HEADS=layout.kv_heads, GROUP=group, SIZE=max(16, triton.next_power_of_2(group)),
        PIECES=index.lies.shape[2], DIM=dim, WIDE=triton.next_power_of_2(dim), ROWS=layout.rows,
        TILE=TILE // 2 if index.keys.itemsize * dim > 256 else TILE, num_warps=4, num_stages=1, **paged,
    )  # fmt: skip


def join_parts(work: Work, rings: Tensor, wanted: Tensor, step: RingStep, layout: Layout,
               shape: tuple[int, int, int], counts: Tensor) -> Partial:  # fmt: skip
    """Return the partial over all offloaded tokens of rows with a ring; an empty partial for other rows.

    rings: int32 `[rows]`, -1: none. wanted: uint8 `[rows, heads]`, 0: the head reads nothing by index. shape: rows,
    heads and dim. counts: int64 `[NUM_COUNTS]`, to whose TOKENS, HEADS and MASS this adds.
    """
    if not runs_on_triton(work.logits):
        return join_parts_reference(work, rings, wanted, step, layout, shape, counts)
    rows, heads, dim = shape
    device = work.logits.device
    found = Partial(torch.empty(shape, device=device), torch.empty(rows, heads, device=device))
    splits, group = work.rest_mass.shape[1:]
    reads = work.read_lse.shape[1]
    _join_kernel[(rows, heads)](
        rings, wanted, step.num_tokens, layout.rotation, work.total_lse, work.rest_out, work.rest_mass, work.read_out,
        work.read_lse, found.out, found.lse, counts, splits, reads,
        HEADS=heads, GROUP=group, DIM=dim, WIDE=triton.next_power_of_2(dim), SPLITS=triton.next_power_of_2(splits),
        READS=triton.next_power_of_2(reads), PART=32, num_warps=4,
    )  # fmt: skip
    return found
