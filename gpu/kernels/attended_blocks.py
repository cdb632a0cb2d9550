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
def attend_blocks(
    rows, key_pages, value_pages, pages, maxima, kv_head, first, last, num_front, back, context, below, begin, end,
    is_head, scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BOUNDED: tl.constexpr, MAXIMA: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Blocks `[first, last)`: of cells from 0 on, and from block `num_front` on of those from `back` on. A head reads
    cells below its `below` and in `[its begin, its end)`; without BOUNDED, all below `context`.
    """
    column = tl.arange(0, DIM)
    top = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_GROUP], tl.float32)
    out = tl.zeros([BLOCK_GROUP, DIM], tl.float32)
    covered = tl.zeros([BLOCK_GROUP], tl.int32)
    for block in range(first, last):
        if BOUNDED:
            start = tl.where(block < num_front, block * BLOCK_TOKENS, back + (block - num_front) * BLOCK_TOKENS)
        else:
            start = block * BLOCK_TOKENS
        token = start + tl.arange(0, BLOCK_TOKENS)
        inside = token < context
        if BOUNDED:
            one = token[None, :]
            reads = (one < below[:, None]) | ((one >= begin[:, None]) & (one < end[:, None]))
            reads = reads & is_head[:, None] & inside[None, :]
            inside = tl.max(reads.to(tl.int32), 0) > 0
        else:
            reads = inside[None, :]
        page = tl.load(pages + token // PAGE_TOKENS, mask=inside, other=0).to(tl.int64)
        address = ((page * KV_HEADS + kv_head) * PAGE_TOKENS + token % PAGE_TOKENS)[:, None] * DIM + column[None, :]
        key = tl.load(key_pages + address, mask=inside[:, None], other=0.0)
        logits = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale_log2
        logits = tl.where(reads, logits, float("-inf"))
        if MAXIMA:
            LN2: tl.constexpr = 0.6931471805599453
            blocks: tl.constexpr = BLOCK_TOKENS // _MAXIMA_CELLS
            largest = tl.max(tl.reshape(logits, [BLOCK_GROUP, blocks, _MAXIMA_CELLS]), 2)
            place = start // _MAXIMA_CELLS + tl.arange(0, blocks)
            seen = (largest > float("-inf")) & is_head[:, None]
            tl.atomic_max(maxima[:, None] + place[None, :], largest * LN2, mask=seen)
        if COUNTED:
            covered += tl.sum((reads & is_head[:, None]).to(tl.int32), 1)
        higher = tl.maximum(top, tl.max(logits, 1))
        base = higher
        if BOUNDED:  # a head may read nothing of a block
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        rescale = tl.exp2(top - base)
        mass = mass * rescale + tl.sum(weights, 1)
        value = tl.load(value_pages + address, mask=inside[:, None], other=0.0)
        out = out * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = higher
    return top, mass, out, covered


@triton.jit
def store_partial(split_out, split_lse, split_covered, row, top, mass, out, covered, is_head,
           DIM: tl.constexpr, COUNTED: tl.constexpr):  # fmt: skip
    has_mass = mass != 0.0
    divisor = tl.where(has_mass, mass, 1.0)
    tl.store(split_lse + row, tl.where(has_mass, top + tl.log2(divisor), float("-inf")), mask=is_head)
    tl.store(split_out + row[:, None] * DIM + tl.arange(0, DIM)[None, :], out / divisor[:, None],
             mask=(is_head & has_mass)[:, None])  # fmt: skip
    if COUNTED:
        tl.store(split_covered + row, covered, mask=is_head)
