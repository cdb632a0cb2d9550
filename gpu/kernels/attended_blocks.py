"""What programs of decode attention have in common: a query group over blocks of a paged context, to a partial.

It refuses to know how a context is cut into pieces. Invariants: cells that no head reads, and pages that hold nothing
else, are never touched; logsumexps are of base 2 until a reduction makes them natural.
"""

import triton
import triton.language as tl

MAXIMA_CELLS = 16  # of a block whose largest logit is asked for
MIN_GROUP_ROWS = 16  # the smallest tile that tensor cores take

_MAXIMA_CELLS = tl.constexpr(MAXIMA_CELLS)


@triton.jit
def _attend_block(
    rows, key_pages, value_pages, pages, maxima, kv_head, cell, inside, reads, is_head, top, mass, out, covered,
    scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, MAXIMA: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Add the cells `[tokens]` that each head `reads` `[group, tokens]`; with MASKED only those `inside` are loaded,
    and with BOUNDED a head may read none of them.
    """
    column = tl.arange(0, DIM)
    if MASKED:
        page = tl.load(pages + cell // PAGE_TOKENS, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(pages + cell // PAGE_TOKENS).to(tl.int64)
    address = ((page * KV_HEADS + kv_head) * PAGE_TOKENS + cell % PAGE_TOKENS)[:, None] * DIM + column[None, :]
    if MASKED:  # noqa: SIM108
        key = tl.load(key_pages + address, mask=inside[:, None], other=0.0)
    else:
        key = tl.load(key_pages + address)
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
    if MASKED:
        value = tl.load(value_pages + address, mask=inside[:, None], other=0.0)
    else:
        value = tl.load(value_pages + address)
    out = out * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, mass, out, covered


@triton.jit
def attend_blocks(
    rows, key_pages, value_pages, pages, maxima, kv_head, first, last, context, is_head, scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MAXIMA: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Blocks `[first, last)` of a context, of which every head reads all."""
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    out = tl.zeros([BLOCK_GROUP, DIM], tl.float32)
    covered = tl.zeros([BLOCK_GROUP], tl.int32)
    for block in range(first, last):
        cell = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = cell < context
        top, mass, out, covered = _attend_block(
            rows, key_pages, value_pages, pages, maxima, kv_head, cell, inside, inside[None, :], is_head, top, mass,
            out, covered, scale_log2,
            KV_HEADS, DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, True, False, MAXIMA, COUNTED,
        )  # fmt: skip
    return top, mass, out, covered


@triton.jit
def attend_spans(
    rows, key_pages, value_pages, pages, maxima, kv_head, first, last, front, back, below, begin, end, is_head,
    scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, MAXIMA: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Blocks `[first, last)` of a run of cells: `[0, front)`, and from `back` on. A head reads of these those below its
    `below` and in `[its begin, its end)`; all three are 0 where `is_head` is not.

    Blocks of which one head, that which begins first, reads every cell go without masks of what is loaded.
    """
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    out = tl.zeros([BLOCK_GROUP, DIM], tl.float32)
    covered = tl.zeros([BLOCK_GROUP], tl.int32)
    skipped = back - front
    most = 1 << 30
    whole_begin = tl.min(tl.where(begin < end, begin, most), 0)
    whole_end = tl.max(tl.where(begin == whole_begin, end, 0), 0)
    whole_begin = tl.maximum(whole_begin, back) - skipped
    inner = tl.minimum(tl.maximum(tl.cdiv(whole_begin, BLOCK_TOKENS), first), last)
    inner_end = tl.minimum(tl.maximum(tl.maximum(whole_end - skipped, 0) // BLOCK_TOKENS, inner), last)
    for step in range(inner - first + last - inner_end):
        block = first + step
        block = tl.where(block < inner, block, block + inner_end - inner)
        place = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        cell = tl.where(place < front, place, place + skipped)
        one = cell[None, :]
        reads = (one < below[:, None]) | ((one >= begin[:, None]) & (one < end[:, None]))
        inside = tl.max(reads.to(tl.int32), 0) > 0
        top, mass, out, covered = _attend_block(
            rows, key_pages, value_pages, pages, maxima, kv_head, cell, inside, reads, is_head, top, mass, out,
            covered, scale_log2,
            KV_HEADS, DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, True, True, MAXIMA, COUNTED,
        )  # fmt: skip
    for block in range(inner, inner_end):
        cell = block * BLOCK_TOKENS + skipped + tl.arange(0, BLOCK_TOKENS)
        one = cell[None, :]
        reads = (one < below[:, None]) | ((one >= begin[:, None]) & (one < end[:, None]))
        top, mass, out, covered = _attend_block(
            rows, key_pages, value_pages, pages, maxima, kv_head, cell, cell, reads, is_head, top, mass, out,
            covered, scale_log2,
            KV_HEADS, DIM, PAGE_TOKENS, BLOCK_GROUP, BLOCK_TOKENS, False, True, MAXIMA, COUNTED,
        )  # fmt: skip
    return top, mass, out, covered


@triton.jit
def store_partial(
    split_out, split_lse, split_covered, row, top, mass, out, covered, is_head,
    DIM: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """`row` `[group]`: where each head's partial goes. One without mass stores no output."""
    has_mass = mass != 0.0
    divisor = tl.where(has_mass, mass, 1.0)
    tl.store(split_lse + row, tl.where(has_mass, top + tl.log2(divisor), float("-inf")), mask=is_head)
    tl.store(split_out + row[:, None] * DIM + tl.arange(0, DIM)[None, :], out / divisor[:, None],
             mask=(is_head & has_mass)[:, None])  # fmt: skip
    if COUNTED:
        tl.store(split_covered + row, covered, mask=is_head)
