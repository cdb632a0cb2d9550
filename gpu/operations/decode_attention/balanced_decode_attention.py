"""Compute paged decode attention whose heads read different spans, cut into equal pieces over the device.

Every (request, KV head) has a span of blocks for near and one for far: what the heads of its query group read together.
The launch fixes the number of programs. The device counts the blocks, and each program takes an equal number of
consecutive ones, of whatever spans they are. So a CUDA graph serves all bounds and contexts, and no program waits for a
longer one. Program p's partial of span s is stored at place p + s, so no two share a place. Bytes moved: those of
`paged_decode_attention`; bounds and contexts, read once per program, are small beside that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.decode_attention.attended_blocks import MAXIMA_CELLS, attend_spans, group_rows, store_partial
from gpu.operations.decode_attention.attended_codes import INTEGER_CONFIGS, multiplies_integers
from gpu.operations.decode_attention.decode_launch import Given, PagedReads, Workspace
from gpu.operations.decode_attention.split_rows import PROGRAMS_PER_SM, num_pieces, num_places
from gpu.operations.kv.kv_rows import kind_of

PAIRS_AT_ONCE = 64  # pairs (request, KV head) whose blocks a program counts together
PIECES_AT_ONCE, REDUCE_WARPS = 128, 8  # the most partials that are merged together, and the most warps
PIECES_A_WARP = 8

# (itemsize of a stored element, dim): block_tokens, num_warps, num_stages, registers of a thread (so that an SM holds
# all programs that it is given). Every row fits 99 KiB of shared memory.
CONFIGS = {
    (1, 64): (64, 2, 3, 168),
    (1, 96): (64, 2, 3, 168),
    (1, 128): (64, 2, 3, 168),
    (1, 256): (64, 4, 3, 168),
    (1, 512): (64, 4, 1, 255),
    (2, 64): (64, 4, 2, 128),
    (2, 96): (64, 4, 2, 128),
    (2, 128): (64, 4, 2, 128),
    (2, 256): (32, 4, 2, 128),
    (2, 512): (16, 4, 2, 255),
    (4, 64): (32, 4, 2, 128),
    (4, 96): (32, 4, 2, 128),
    (4, 128): (32, 4, 2, 128),
    (4, 256): (16, 4, 2, 128),
    (4, 512): (16, 4, 1, 255),
}
INTEGER_REGISTERS = 255

_MAXIMA_CELLS = tl.constexpr(MAXIMA_CELLS)


def num_merged_together(pieces: int, pairs: int) -> int:
    """Return how many partials of a span are merged together: about twice its number if all spans are equally long."""
    return min(PIECES_AT_ONCE, max(PIECES_A_WARP, triton.next_power_of_2(2 * pieces // pairs + 1)))


@triton.jit
def _count_blocks(
    skip_begin, skip_end, cut, is_head, context, each, AXIS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Count the blocks of near and of far for query groups, whose heads are along axis `AXIS`.

    context: of each group; each: the same, broadcast over heads. Near is `[0, front)` and the cells from `back` on, far
    the cells from `far` on; all three are multiples of MAXIMA_CELLS.
    """
    front = tl.cdiv(tl.max(tl.where(is_head, skip_begin, 0), AXIS), _MAXIMA_CELLS) * _MAXIMA_CELLS
    back = tl.min(tl.where(is_head, cut, each), AXIS) // _MAXIMA_CELLS * _MAXIMA_CELLS
    back = tl.maximum(back, front)
    num_near = tl.cdiv(front + tl.maximum(context - back, 0), BLOCK_TOKENS)
    far, num_far = back * 0, back * 0
    if FAR:
        has_far = is_head & (skip_end < cut)
        far = tl.min(tl.where(has_far, skip_end, each), AXIS) // _MAXIMA_CELLS * _MAXIMA_CELLS
        num_far = tl.cdiv(tl.maximum(tl.max(tl.where(has_far, cut, 0), AXIS) - far, 0), BLOCK_TOKENS)
    return front, back, num_near, far, num_far


@triton.jit
def _count_blocks_of(
    pair, pairs, slots, context_lens, bounds, plane_stride, row_stride, head_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, NARROW: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Count the blocks of near and of far for each pair (request, KV head); 0 for numbers that are not
    below `pairs`.
    """
    request = pair // KV_HEADS
    is_pair = pair < pairs
    member = tl.arange(0, NARROW)[None, :]
    is_head = is_pair[:, None] & (member < GROUP)
    slot = tl.load(slots + request, mask=is_pair, other=-1)
    context = tl.load(context_lens + request, mask=is_pair, other=0)
    context = tl.where(slot >= 0, context, 0)
    place = bounds + (request * row_stride)[:, None] + ((pair % KV_HEADS)[:, None] * GROUP + member) * head_stride
    each = context[:, None]
    skip_begin = tl.minimum(tl.load(place, mask=is_head, other=0), each)
    skip_end = tl.minimum(tl.load(place + plane_stride, mask=is_head, other=0), each)
    cut = tl.minimum(tl.load(place + 2 * plane_stride, mask=is_head, other=0), each)
    _, _, num_near, _, num_far = _count_blocks(skip_begin, skip_end, cut, is_head, context, each, 1, BLOCK_TOKENS, FAR)
    return num_near, num_far


@triton.jit
def _balanced_kernel(
    query, key_pages, value_pages, page_table, slots, context_lens, bounds, maxima,
    piece_out, piece_lse, piece_covered, ends, scale_log2, query_stride, max_pages, pairs,
    plane_stride, row_stride, head_stride, maxima_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr,
    NARROW: tl.constexpr, FAR: tl.constexpr, MAXIMA: tl.constexpr, COUNTED: tl.constexpr, KIND: tl.constexpr,
    INTEGERS: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 2 if FAR else 1
    program = tl.program_id(0)
    total = 0
    for begin in range(0, pairs, PAIRS):
        num_near, num_far = _count_blocks_of(
            begin + tl.arange(0, PAIRS), pairs, slots, context_lens, bounds, plane_stride, row_stride, head_stride,
            GROUP, KV_HEADS, BLOCK_TOKENS, NARROW, FAR,
        )  # fmt: skip
        total += tl.sum(num_near + num_far, 0)
    piece_blocks = tl.cdiv(total, tl.num_programs(0))
    first = program * piece_blocks
    last = tl.minimum(first + piece_blocks, total)
    if (first >= last) & (program > 0):
        return

    span, start, passed = 0, 0, 0  # the span that holds block `first`, and that span's first block
    for begin in range(0, pairs, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        num_near, num_far = _count_blocks_of(
            pair, pairs, slots, context_lens, bounds, plane_stride, row_stride, head_stride,
            GROUP, KV_HEADS, BLOCK_TOKENS, NARROW, FAR,
        )  # fmt: skip
        end = passed + tl.cumsum(num_near + num_far, 0)
        is_before = (pair < pairs) & (end <= first)
        span += PARTS * tl.sum(is_before.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(is_before, end, 0), 0))
        passed += tl.sum(num_near + num_far, 0)
        if program == 0:  # the reduction needs them, too
            tl.store(ends + PARTS * pair, end - num_far, mask=pair < pairs)
            if FAR:
                tl.store(ends + PARTS * pair + 1, end, mask=pair < pairs)

    member = tl.arange(0, BLOCK_GROUP)
    is_head = member < GROUP
    while first < last:
        pair = span // PARTS
        request, kv_head = (pair // KV_HEADS).to(tl.int64), pair % KV_HEADS
        head = kv_head * GROUP + member
        slot = tl.load(slots + request)
        context = tl.where(slot >= 0, tl.load(context_lens + request), 0)
        each = tl.zeros([BLOCK_GROUP], tl.int32) + context
        place = bounds + request * row_stride + head * head_stride
        skip_begin = tl.minimum(tl.load(place, mask=is_head, other=0), context)
        skip_end = tl.minimum(tl.load(place + plane_stride, mask=is_head, other=0), context)
        cut = tl.minimum(tl.load(place + 2 * plane_stride, mask=is_head, other=0), context)
        front, back, num_near, far, num_far = _count_blocks(
            skip_begin, skip_end, cut, is_head, context, each, 0, BLOCK_TOKENS, FAR
        )  # fmt: skip
        end = start + num_near
        below, from_cell, to_cell = skip_begin, cut, tl.where(is_head, context, 0)
        if FAR:
            is_far = span % PARTS == 1
            end = start + tl.where(is_far, num_far, num_near)
            front = tl.where(is_far, 0, front)
            back = tl.where(is_far, far, back)
            below = tl.where(is_far, 0, skip_begin)
            from_cell = tl.where(is_far, skip_end, cut)
            to_cell = tl.where(is_far, cut, to_cell)
        stop = tl.minimum(end, last)
        if first < stop:
            column = tl.arange(0, BLOCK_DIM)[None, :]
            rows = tl.load(query + request * query_stride + head[:, None] * DIM + column,
                           mask=is_head[:, None] & (column < DIM), other=0.0)  # fmt: skip
            pages = page_table + slot.to(tl.int64) * max_pages
            highest = maxima + (request * (KV_HEADS * GROUP) + head) * maxima_stride
            top, mass, out, covered = attend_spans(
                rows, key_pages, value_pages, pages, highest, kv_head, first - start, stop - start, front, back,
                below, from_cell, to_cell, is_head, scale_log2,
                KV_HEADS, DIM, BLOCK_DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, WARPS, MAXIMA, COUNTED, KIND,
        INTEGERS,
            )  # fmt: skip
            row = (program + span).to(tl.int64) * GROUP + member
            store_partial(
                piece_out, piece_lse, piece_covered, row, top, mass, out, covered, is_head, DIM, BLOCK_DIM, COUNTED
            )  # fmt: skip
        first = tl.maximum(first, stop)
        start = end
        span += 1


@triton.jit
def _merge_pieces_kernel(
    piece_out, piece_lse, piece_covered, out, lse, covered, ends, spans, pieces,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    request, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span = (request * (HEADS // GROUP) + head // GROUP) * PARTS + part
    begin = tl.load(ends + span - 1, mask=span > 0, other=0)
    end = tl.load(ends + span)
    piece_blocks = tl.maximum(tl.cdiv(tl.load(ends + spans - 1), pieces), 1)
    first = begin // piece_blocks
    last = tl.where(begin < end, tl.cdiv(end, piece_blocks), first)
    column = tl.arange(0, BLOCK_DIM)
    top, mass = float("-inf"), 0.0
    merged = tl.zeros([BLOCK_DIM], tl.float32)
    count = 0
    for at in range(first, last, PIECES):
        piece = at + tl.arange(0, PIECES)
        row = (piece + span).to(tl.int64) * GROUP + head % GROUP
        lse2 = tl.load(piece_lse + row, mask=piece < last, other=float("-inf"))
        rows = tl.load(piece_out + row[:, None] * DIM + column[None, :],
                       mask=(piece < last)[:, None] & (column < DIM)[None, :], other=0.0)  # fmt: skip
        higher = tl.maximum(top, tl.max(lse2, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse2 - base)
        rescale = tl.exp2(top - base)
        mass = mass * rescale + tl.sum(weights, 0)
        merged = merged * rescale + tl.sum(tl.where((weights == 0.0)[:, None], 0.0, rows * weights[:, None]), 0)
        top = higher
        if COUNTED:
            count += tl.sum(tl.load(piece_covered + row, mask=piece < last, other=0), 0)
    LN2: tl.constexpr = 0.6931471805599453
    divisor = tl.where(mass != 0.0, mass, 1.0)
    to = (part * tl.num_programs(0) + request).to(tl.int64) * HEADS + head
    tl.store(out + to * DIM + column, merged / divisor, mask=column < DIM)
    tl.store(lse + to, tl.where(mass != 0.0, (top + tl.log2(divisor)) * LN2, float("-inf")))
    if COUNTED:
        tl.store(covered + to, count)


def launch_balanced(
    reads: PagedReads, bounds: Tensor, maxima: Tensor | None, workspace: Workspace, given: Given
) -> None:
    """Launch with bounds, for checked arguments.

    workspace: of at least `num_places` query groups; its contents are ignored.
    """
    query, key_pages, value_pages, page_table, slots, context_lens, scale = reads
    out, lse, covered = given
    piece_out, piece_lse, num_sms = workspace.out, workspace.lse, workspace.num_sms
    parts, requests, heads, dim = out.shape
    kv_heads, page_tokens = key_pages.shape[1:3]
    group, pairs = heads // kv_heads, requests * kv_heads
    block_dim, kind = triton.next_power_of_2(dim), kind_of(key_pages)
    integers = multiplies_integers(query, group, kind)
    block_tokens, num_warps, num_stages, registers = CONFIGS[key_pages.element_size(), dim]
    programs = PROGRAMS_PER_SM
    if integers:
        block_tokens, num_warps, num_stages, programs = INTEGER_CONFIGS[dim]
        registers = INTEGER_REGISTERS
    pieces = num_pieces(num_sms, programs)
    is_counted = covered is not None
    ends = torch.empty(pairs * parts, dtype=torch.int32, device=query.device)
    counts = ends  # a placeholder that the kernel does not read
    if is_counted:
        places = num_places(requests, kv_heads, parts, num_sms, programs)
        counts = torch.empty(places * group, dtype=torch.int32, device=query.device)
    _balanced_kernel[(pieces,)](
        query, key_pages, value_pages, page_table, slots, context_lens, bounds, lse if maxima is None else maxima,
        piece_out, piece_lse, counts, ends, scale * 1.4426950408889634, query.stride(0), page_table.stride(0), pairs,
        *bounds.stride(), 0 if maxima is None else maxima.shape[-1],
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=block_dim, PAGE_TOKENS=page_tokens,
        BLOCK_GROUP=group_rows(group, kind, integers), BLOCK_TOKENS=block_tokens, WARPS=num_warps,
        PAIRS=PAIRS_AT_ONCE, NARROW=triton.next_power_of_2(group),
        FAR=parts == 2, MAXIMA=maxima is not None, COUNTED=is_counted, KIND=kind, INTEGERS=integers,
        num_warps=num_warps, num_stages=num_stages, maxnreg=registers,
    )  # fmt: skip
    at_once = num_merged_together(pieces, pairs)
    _merge_pieces_kernel[(requests, heads, parts)](
        piece_out, piece_lse, counts, out, lse, ends if covered is None else covered, ends, pairs * parts, pieces,
        GROUP=group, HEADS=heads, DIM=dim, BLOCK_DIM=block_dim, PIECES=at_once, PARTS=parts, COUNTED=is_counted,
        num_warps=min(REDUCE_WARPS, at_once // PIECES_A_WARP),
    )  # fmt: skip
