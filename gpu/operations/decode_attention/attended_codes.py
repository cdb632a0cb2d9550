"""Share parts of decode attention kernels for rows of 8-bit codes: each warp takes runs of cells and waits for no
other.

Here instructions cost more than bytes. So codes go from pages to shared memory unchanged, a thread takes 16 bytes of a
row at once, and the numbers that it widens are already where tensor cores want their first operand. A query group's
heads are columns, of which 8 are enough. This works if the axes have the order of tensor cores' fragments. So rows,
columns and heads are renumbered below; sums do not depend on their order. Scales belong to tokens: they multiply logits
and weights.

int8 codes are not widened at all for queries of 16 bits: queries and weights become integers of 16 bits with scales of
their own, each of them two columns of 8 bits, so that tensor cores multiply integers. Such a product is exact. The
rounding of a query or weight is at most 1 / 63,000 of the largest of its head (and, of weights, of the warp's cells).
In bfloat16 queries would not be rounded, and each weight to 1 / 512 of itself.

Pages of which no head reads a cell are never touched. In other pages, cells that no head reads may be loaded and
ignored, since every code is a number. A warp keeps its own state until `merge_warps`.
"""

import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.kv.kv_rows import INT8, floats_of, widen

RUN_CELLS = 16  # consecutive cells that share a page; a warp takes a multiple of this at once
MIN_GROUP_COLUMNS = 8  # the smallest tile of a second operand
MOST_INTEGER_GROUP = 16
LARGEST_INTEGER = 127 * 256  # the largest that two columns of 8 bits can hold on both sides of 0
SMALLEST_INTEGER_TOP = 1e-30  # what is smaller is rounded as this is, so that the inverse of a scale is finite

# dim: block_tokens, num_warps, num_stages, programs per multiprocessor of kernels that multiply integers. A warp takes
# 32 cells, a whole tile.
INTEGER_CONFIGS = {64: (32, 1, 3, 8), 96: (32, 1, 3, 8), 128: (32, 1, 3, 8), 256: (32, 1, 3, 8)}

_RUN, _LARGEST_INTEGER = tl.constexpr(RUN_CELLS), tl.constexpr(LARGEST_INTEGER)
_SMALLEST_INTEGER_TOP = tl.constexpr(SMALLEST_INTEGER_TOP)


def multiplies_integers(query: Tensor, group: int, kind: int) -> bool:
    """Return whether products are of integers: codes are int8, and queries have 16 bits, one of these dims, and not
    more heads a KV head than a warp has registers for.
    """
    fits = query.shape[-1] in INTEGER_CONFIGS and group <= MOST_INTEGER_GROUP
    return kind == INT8 and query.element_size() == 2 and fits


@triton.jit
def _part_of(numbers, scale, is_first):
    """Round numbers to integers of 16 bits and return one of their two parts, int8: the number is scale * (256 * first
    + second). scale, is_first: broadcast to the numbers.
    """
    steps = tl.floor(numbers * (1.0 / scale) + 0.5).to(tl.int32)
    first = (steps + 128) >> 8
    return tl.where(is_first, first, steps - (first << 8)).to(tl.int8)


@triton.jit
def _from_columns(product):
    """Return the numbers, float32 `[warps, length, group]`, of an int32 product with such columns."""
    WARPS: tl.constexpr = product.shape[0]
    LENGTH: tl.constexpr = product.shape[1]
    GROUP: tl.constexpr = product.shape[2] // 2
    parts = tl.reshape(product, [WARPS, LENGTH, GROUP, 2])
    factor = tl.where(tl.arange(0, 2) == 0, 256, 1)
    return tl.sum(parts * factor[None, None, None, :], 3).to(tl.float32)


@triton.jit
def _scale_for(largest):
    """Return the scale of integers of 16 bits from the largest magnitude; NaN if that is not finite."""
    scale = tl.maximum(largest, _SMALLEST_INTEGER_TOP) * (1.0 / _LARGEST_INTEGER)
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def order_query(rows, WARPS: tl.constexpr, INTEGERS: tl.constexpr):
    """Return queries `[group, dim]` for the logits' product, `[warps, group, dim]`, and each head's scale `[group]`.

    dim has the order of `_load_keys`. INTEGERS: as int8, a head's two parts in rows of their own.
    """
    HEADS: tl.constexpr = rows.shape[0]
    DIM: tl.constexpr = rows.shape[1]
    scale = tl.full([HEADS], 1.0, tl.float32)
    if INTEGERS:
        numbers = rows.to(tl.float32)
        sizes = tl.where(numbers == numbers, tl.abs(numbers), float("inf"))
        scale = _scale_for(tl.max(sizes, 1))
        pairs = tl.broadcast_to(numbers[:, None, :], [HEADS, 2, DIM])
        parts = _part_of(pairs, scale[:, None, None], (tl.arange(0, 2) == 0)[None, :, None])
        rows = tl.reshape(parts, [2 * HEADS, DIM])
    GROUP: tl.constexpr = rows.shape[0]
    turned = tl.permute(tl.reshape(rows, [GROUP, DIM // 64, 4, 4, 4]), [0, 1, 3, 2, 4])
    return tl.broadcast_to(tl.reshape(turned, [1, GROUP, DIM]), [WARPS, GROUP, DIM]), scale


@triton.jit
def new_states(WARPS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Return each warp's state before any cell: the highest logit, mass, output, and the number of cells that were
    read.
    """
    top = tl.full([WARPS, GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([WARPS, GROUP], tl.float32)
    out = tl.zeros([WARPS, DIM, GROUP], tl.float32)
    return top, mass, out, tl.zeros([WARPS, GROUP], tl.int32)


@triton.jit
def runs_of(block, BLOCK_TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Return the first cell of each of this block's runs, `[runs, warps]`."""
    RUNS: tl.constexpr = BLOCK_TOKENS // (WARPS * _RUN)
    run = tl.arange(0, WARPS)[None, :] * RUNS + tl.arange(0, RUNS)[:, None]
    return block * BLOCK_TOKENS + run * _RUN


@triton.jit
def cells_of(first):
    """Return all cells of these runs, `[warps, cells]`. first: the runs' first cells, `[runs, warps]`."""
    RUNS: tl.constexpr = first.shape[0]
    WARPS: tl.constexpr = first.shape[1]
    cells = tl.trans(first)[:, :, None] + tl.arange(0, _RUN)[None, None, :]
    return tl.reshape(cells, [WARPS, RUNS * _RUN])


@triton.jit
def _load_keys(pages, begin, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Load the codes of runs as numbers of DTYPE, `[warps, cells, dim]`.

    begin: where the runs begin, int64 `[runs, warps]`. Four lanes take 64 columns of a row, 16 each. In every step of
    16 columns of a product, 4 of a lane's columns are neighbours.
    """
    RUNS: tl.constexpr = begin.shape[0]
    WARPS: tl.constexpr = begin.shape[1]
    PARTS: tl.constexpr = BLOCK_DIM // 64
    half = (tl.arange(0, 2) * 8)[None, None, :, None, None, None]
    row = half + tl.arange(0, 8)[None, None, None, None, :, None]
    column = (tl.arange(0, PARTS) * 64)[:, None, None, None, None, None]
    column = column + tl.arange(0, 64)[None, None, None, None, None, :]
    place = begin[None, :, None, :, None, None] + (row * DIM + column)
    if BLOCK_DIM == DIM:  # noqa: SIM108
        codes = tl.load(pages + place)
    else:
        codes = tl.load(pages + place, mask=column < DIM, other=0)
    keys = codes if tl.int8 == DTYPE else widen(codes, DTYPE, KIND)
    keys = tl.reshape(keys, [PARTS, RUNS, 2, WARPS, 8, 4, 4, 4])
    return tl.reshape(tl.permute(keys, [3, 1, 2, 4, 0, 6, 5, 7]), [WARPS, RUNS * _RUN, BLOCK_DIM])


@triton.jit
def _load_values(pages, begin, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Load the codes of values as numbers of DTYPE, `[warps, dim, cells]`.

    Eight lanes take a row of 128 columns, 16 each, and four take every fourth cell, so a lane has neighbours in both
    axes. `merge_warps` restores the order of dim.
    """
    RUNS: tl.constexpr = begin.shape[0]
    WARPS: tl.constexpr = begin.shape[1]
    PIECE: tl.constexpr = BLOCK_DIM // 8 if BLOCK_DIM < 128 else 16
    PARTS: tl.constexpr = BLOCK_DIM // (8 * PIECE)
    row = (tl.arange(0, 4) * 4)[None, None, None, None, None, :, None]
    row = row + tl.arange(0, 4)[None, :, None, None, None, None, None]
    column = (tl.arange(0, PARTS) * (8 * PIECE))[None, None, :, None, None, None, None]
    column = column + (tl.arange(0, 8) * PIECE)[None, None, None, None, :, None, None]
    column = column + tl.arange(0, PIECE)[None, None, None, None, None, None, :]
    place = begin[:, None, None, :, None, None, None] + (row * DIM + column)
    if BLOCK_DIM == DIM:  # noqa: SIM108
        codes = tl.load(pages + place)
    else:
        codes = tl.load(pages + place, mask=column < DIM, other=0)
    values = codes if tl.int8 == DTYPE else widen(codes, DTYPE, KIND)
    return tl.reshape(tl.permute(values, [3, 2, 6, 4, 0, 5, 1]), [WARPS, BLOCK_DIM, RUNS * _RUN])


@triton.jit
def attend_runs(
    query, key_pages, value_pages, pages, maxima, kv_head, first, loaded, cells, reads, is_head, top, mass, out,
    covered, head_scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    MAXIMA: tl.constexpr, COUNTED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add the `cells` `[warps, cells]` that each head `reads` `[warps, cells, group]`.

    query: of `order_query`. first: the first cells of runs, `[runs, warps]`. loaded: the same for a run that is loaded
    in place of one that no head reads. head_scale: what a head's products with keys are multiplied by, `[group]`.
    """
    RUNS: tl.constexpr = first.shape[0]
    WARPS: tl.constexpr = first.shape[1]
    CELLS: tl.constexpr = RUNS * _RUN
    WIDTH: tl.constexpr = PAGE_TOKENS * (DIM + 4)
    page = tl.load(pages + loaded // PAGE_TOKENS).to(tl.int64)
    origin, offset = (page * KV_HEADS + kv_head) * WIDTH, loaded % PAGE_TOKENS // _RUN * _RUN
    begin = origin + offset * DIM
    keys = _load_keys(key_pages, begin, DIM, BLOCK_DIM, query.dtype, KIND)
    word = tl.reshape(cells_of(origin // 4 + PAGE_TOKENS * DIM // 4 + offset), [WARPS, CELLS])
    key_scale = tl.load(floats_of(key_pages) + word)
    value_scale = tl.load(floats_of(value_pages) + word)
    if query.dtype == tl.int8:
        products = _from_columns(tl.dot(keys, tl.trans(query, 0, 2, 1)))
    else:
        products = tl.dot(keys, tl.trans(query, 0, 2, 1), input_precision="ieee")
    logits = products * (key_scale[:, :, None] * head_scale[None, None, :])
    logits = tl.where(reads, logits, float("-inf"))
    if MAXIMA:
        LN2: tl.constexpr = 0.6931471805599453
        largest = tl.max(tl.reshape(logits, [WARPS, RUNS, _RUN, logits.shape[2]]), 2)
        seen = (largest > float("-inf")) & is_head[None, None, :]
        place = tl.trans(first) // _RUN
        tl.atomic_max(maxima[None, None, :] + place[:, :, None], largest * LN2, mask=seen)
    if COUNTED:
        covered += tl.sum((reads & is_head[None, None, :]).to(tl.int32), 1)
    higher = tl.maximum(top, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(logits - base[:, None, :])
    rescale = tl.exp2(top - base)
    mass = mass * rescale + tl.sum(weights, 1)
    weights = tl.where(reads, weights * value_scale[:, :, None], 0.0)
    values = _load_values(value_pages, begin, DIM, BLOCK_DIM, query.dtype, KIND)
    if query.dtype == tl.int8:
        scale = _scale_for(tl.max(weights, 1)) + tl.sum(weights * 0.0, 1)
        pairs = tl.broadcast_to(weights[:, :, :, None], [WARPS, CELLS, weights.shape[2], 2])
        parts = _part_of(pairs, scale[:, None, :, None], (tl.arange(0, 2) == 0)[None, None, None, :])
        sums = _from_columns(tl.dot(values, tl.reshape(parts, [WARPS, CELLS, 2 * weights.shape[2]])))
        out = out * rescale[:, None, :] + sums * scale[:, None, :]
    else:
        out = out * rescale[:, None, :] + tl.dot(values, weights.to(query.dtype), input_precision="ieee")
    return higher, mass, out, covered


@triton.jit
def merge_warps(top, mass, out, covered):
    """Merge the states of all warps into one: `[group]`, and out `[group, dim]` with dim in its usual order."""
    DIM: tl.constexpr = out.shape[1]
    GROUP: tl.constexpr = out.shape[2]
    PIECE: tl.constexpr = DIM // 8 if DIM < 128 else 16
    highest = tl.max(top, 0)
    share = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
    merged = tl.sum(out * share[:, None, :], 0)
    ordered = tl.permute(tl.reshape(merged, [DIM // (8 * PIECE), PIECE, 8, GROUP]), [3, 0, 2, 1])
    return highest, tl.sum(mass * share, 0), tl.reshape(ordered, [GROUP, DIM]), tl.sum(covered, 0)
