"""Share parts of decode attention kernels: attend with a query group to blocks of a paged context.

Cells that no head reads, and pages that hold nothing else, are never touched. Logsumexps have base 2 until a reduction
makes them natural. A head's DIM is padded to BLOCK_DIM, a power of two, but only on chip.
"""

import triton
import triton.language as tl

from gpu.operations.decode_attention.attended_codes import (
    MIN_GROUP_COLUMNS,
    RUN_CELLS,
    attend_runs,
    cells_of,
    merge_warps,
    new_states,
    order_query,
    runs_of,
)
from gpu.operations.decode_attention.split_rows import MAX_SPLIT_TOKENS
from gpu.operations.kv.kv_rows import PLAIN

MAXIMA_CELLS = RUN_CELLS  # cells of a block whose largest logit is reported
MIN_GROUP_ROWS = 16  # the smallest tile that tensor cores take as a first operand

_MAXIMA_CELLS, _PLAIN = tl.constexpr(MAXIMA_CELLS), tl.constexpr(PLAIN)
_MAX_SPLIT_TOKENS = tl.constexpr(MAX_SPLIT_TOKENS)


def group_rows(group: int, kind: int, integers: bool) -> int:
    """Return the number of query heads per KV head, padded to what the kernels compute with.

    integers: what `multiplies_integers` returns; a head has two columns then.
    """
    least = MIN_GROUP_ROWS if kind == PLAIN else MIN_GROUP_COLUMNS // (1 + integers)
    return max(least, triton.next_power_of_2(group))


@triton.jit
def blocks_of_split(context, filling, num_splits, BLOCK_TOKENS: tl.constexpr):
    """Return how many blocks a split of a context has, at least one.

    A context has `filling` splits, or more if these were too long. num_splits: the most, for which there are programs.
    """
    splits = tl.minimum(tl.maximum(filling, tl.cdiv(context, _MAX_SPLIT_TOKENS)), num_splits)
    return tl.maximum(tl.cdiv(tl.cdiv(context, BLOCK_TOKENS), splits), 1)


@triton.jit
def _new_state(BLOCK_GROUP: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Return the state before any cell: the highest logit, mass, output, and the number of cells that were read."""
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    out = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    return top, mass, out, tl.zeros([BLOCK_GROUP], tl.int32)


@triton.jit
def _attend_block(
    rows, key_pages, value_pages, pages, maxima, kv_head, cell, loaded, reads, is_head, top, mass, out, covered,
    scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BOUNDED: tl.constexpr, MAXIMA: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Add the cells `[tokens]` that each head `reads` `[group, tokens]`.

    BOUNDED: a head may read none of them, and `loaded` `[tokens]` names cells that may be loaded in their place;
    otherwise `loaded` says which of the cells may be loaded.
    """
    PADDED: tl.constexpr = BLOCK_DIM != DIM
    column = tl.arange(0, BLOCK_DIM)
    is_column = (column < DIM)[None, :]
    if BOUNDED:
        page = tl.load(pages + loaded // PAGE_TOKENS).to(tl.int64)
        row = (page * KV_HEADS + kv_head) * PAGE_TOKENS + loaded % PAGE_TOKENS
        address = row[:, None] * DIM + column[None, :]
        if PADDED:  # noqa: SIM108
            key = tl.load(key_pages + address, mask=is_column, other=0.0)
        else:
            key = tl.load(key_pages + address)
    else:
        page = tl.load(pages + cell // PAGE_TOKENS, mask=loaded, other=0).to(tl.int64)
        row = (page * KV_HEADS + kv_head) * PAGE_TOKENS + cell % PAGE_TOKENS
        address = row[:, None] * DIM + column[None, :]
        is_there = loaded[:, None]
        if PADDED:
            is_there = is_there & is_column
        key = tl.load(key_pages + address, mask=is_there, other=0.0)
    logits = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale_log2
    logits = tl.where(reads, logits, float("-inf"))
    if MAXIMA:
        LN2: tl.constexpr = 0.6931471805599453
        blocks: tl.constexpr = BLOCK_TOKENS // _MAXIMA_CELLS
        largest = tl.max(tl.reshape(logits, [BLOCK_GROUP, blocks, _MAXIMA_CELLS]), 2)
        place = tl.max(tl.reshape(cell, [blocks, _MAXIMA_CELLS]), 1) // _MAXIMA_CELLS
        seen = (largest > float("-inf")) & is_head[:, None]
        tl.atomic_max(maxima[:, None] + place[None, :], largest * LN2, mask=seen)
    if COUNTED:
        covered += tl.sum((reads & is_head[:, None]).to(tl.int32), 1)
    higher = tl.maximum(top, tl.max(logits, 1))
    base = higher
    if BOUNDED:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - base[:, None])
    rescale = tl.exp2(top - base)
    mass = mass * rescale + tl.sum(weights, 1)
    if not BOUNDED:
        value = tl.load(value_pages + address, mask=is_there, other=0.0)
    elif PADDED:
        value = tl.load(value_pages + address, mask=is_column, other=0.0)
    else:
        value = tl.load(value_pages + address)
    out = out * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, mass, out, covered


@triton.jit
def attend_blocks(
    rows, key_pages, value_pages, pages, maxima, kv_head, first, last, context, is_head, scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, MAXIMA: tl.constexpr,
    COUNTED: tl.constexpr, KIND: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `[first, last)` of a context; every head reads all of their cells."""
    if KIND == _PLAIN:
        query = rows
        top, mass, out, covered = _new_state(BLOCK_GROUP, BLOCK_DIM)
    else:
        query, head_scale = order_query(rows, WARPS, INTEGERS)
        head_scale *= scale_log2
        top, mass, out, covered = new_states(WARPS, BLOCK_GROUP, BLOCK_DIM)
    for block in range(first, last):
        if KIND == _PLAIN:
            cell = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
            inside = cell < context
            top, mass, out, covered = _attend_block(
                query, key_pages, value_pages, pages, maxima, kv_head, cell, inside, inside[None, :], is_head, top,
                mass, out, covered, scale_log2,
                KV_HEADS, DIM, BLOCK_DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, False, MAXIMA, COUNTED,
            )  # fmt: skip
        else:
            run = runs_of(block, BLOCK_TOKENS, WARPS)
            cells = cells_of(run)
            top, mass, out, covered = attend_runs(
                query, key_pages, value_pages, pages, maxima, kv_head, run, tl.minimum(run, context - 1), cells,
                (cells < context)[:, :, None], is_head, top, mass, out, covered, head_scale,
                KV_HEADS, DIM, BLOCK_DIM, PAGE_TOKENS, MAXIMA, COUNTED, KIND,
            )  # fmt: skip
    if KIND != _PLAIN:
        top, mass, out, covered = merge_warps(top, mass, out, covered)
    return top, mass, out, covered


@triton.jit
def attend_spans(
    rows, key_pages, value_pages, pages, maxima, kv_head, first, last, front, back, below, begin, end, is_head,
    scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr, MAXIMA: tl.constexpr,
    COUNTED: tl.constexpr, KIND: tl.constexpr, INTEGERS: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `[first, last)` of a run of cells: `[0, front)`, and from `back` on.

    Of these a head reads the cells below its `below` and those in `[its begin, its end)`; all three are 0 where
    `is_head` is false. No load has a mask: in place of a cell that no head reads, one that a head does read is loaded
    and ignored (for codes, a run of cells). Heads whose spans do not meet take turns, so that cells in between are not
    touched. It is rare that some cells are read twice.
    """
    if KIND == _PLAIN:
        query = rows
        top, mass, out, covered = _new_state(BLOCK_GROUP, BLOCK_DIM)
    else:
        query, head_scale = order_query(rows, WARPS, INTEGERS)
        head_scale *= scale_log2
        top, mass, out, covered = new_states(WARPS, BLOCK_GROUP, BLOCK_DIM)
    NEVER: tl.constexpr = 1 << 30
    skipped = back - front
    meet = tl.max(tl.where(begin < end, begin, 0), 0) <= tl.min(tl.where(begin < end, end, NEVER), 0)
    for turn in range(tl.where(meet, 1, BLOCK_GROUP)):
        is_on = tl.arange(0, BLOCK_GROUP) < tl.where(meet, BLOCK_GROUP, turn + 1)
        is_on = is_on & (tl.arange(0, BLOCK_GROUP) >= turn)
        own_below, own_end = tl.where(is_on, below, 0), tl.where(is_on, end, 0)
        low_end, span_end = tl.max(own_below, 0), tl.max(tl.where(begin < own_end, own_end, 0), 0)
        span_begin = tl.min(tl.where(begin < own_end, begin, NEVER), 0)
        known = tl.where(span_begin < span_end, span_begin, 0)
        start = tl.where(low_end > 0, 0, tl.maximum(tl.maximum(known, back) - skipped, 0) // BLOCK_TOKENS)
        stop = tl.cdiv(tl.where(span_end > back, span_end - skipped, tl.minimum(low_end, front)), BLOCK_TOKENS)
        for block in range(tl.maximum(first, start), tl.minimum(last, stop)):
            if KIND == _PLAIN:
                place = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
                cell = tl.where(place < front, place, place + skipped)
                one = cell[None, :]
                reads = (one < own_below[:, None]) | ((one >= begin[:, None]) & (one < own_end[:, None]))
                inside = (cell < low_end) | ((cell >= span_begin) & (cell < span_end))
                top, mass, out, covered = _attend_block(
                    query, key_pages, value_pages, pages, maxima, kv_head, cell, tl.where(inside, cell, known), reads,
                    is_head, top, mass, out, covered, scale_log2,
                    KV_HEADS, DIM, BLOCK_DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, True, MAXIMA, COUNTED,
                )  # fmt: skip
            else:
                place = runs_of(block, BLOCK_TOKENS, WARPS)
                run = tl.where(place < front, place, place + skipped)
                cells = cells_of(run)
                one = cells[:, :, None]
                reads = (one < own_below[None, None, :]) | (
                    (one >= begin[None, None, :]) & (one < own_end[None, None, :])
                )
                inside = (run < low_end) | ((run + _MAXIMA_CELLS > span_begin) & (run < span_end))
                top, mass, out, covered = attend_runs(
                    query, key_pages, value_pages, pages, maxima, kv_head, run, tl.where(inside, run, known), cells,
                    reads, is_head, top, mass, out, covered, head_scale,
                    KV_HEADS, DIM, BLOCK_DIM, PAGE_TOKENS, MAXIMA, COUNTED, KIND,
                )  # fmt: skip
    if KIND != _PLAIN:
        top, mass, out, covered = merge_warps(top, mass, out, covered)
    return top, mass, out, covered


@triton.jit
def store_partial(
    split_out, split_lse, split_covered, row, top, mass, out, covered, is_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Store each head's partial at `row` `[group]`. A partial without mass stores no output."""
    has_mass = mass != 0.0
    divisor = tl.where(has_mass, mass, 1.0)
    tl.store(split_lse + row, tl.where(has_mass, top + tl.log2(divisor), float("-inf")), mask=is_head)
    column = tl.arange(0, BLOCK_DIM)[None, :]
    tl.store(split_out + row[:, None] * DIM + column, out / divisor[:, None],
             mask=(is_head & has_mass)[:, None] & (column < DIM))  # fmt: skip
    if COUNTED:
        tl.store(split_covered + row, covered, mask=is_head)
