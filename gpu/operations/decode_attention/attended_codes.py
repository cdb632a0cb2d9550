"""Share parts of decode attention kernels for rows of 8-bit codes: each warp takes runs of cells and waits for no
other.

Here instructions cost more than bytes. So codes go from pages to shared memory unchanged, a thread takes 16 bytes of a
row at once, and the numbers that it widens are already where tensor cores want their first operand. A query group's
heads are columns, of which 8 are enough. This works if the axes have the order of tensor cores' fragments. So rows,
columns and heads are renumbered below; sums do not depend on their order. Scales belong to tokens: they multiply logits
and weights.

Pages of which no head reads a cell are never touched. In other pages, cells that no head reads may be loaded and
ignored, since every code is a number. A warp keeps its own state until `merge_warps`.
"""

import triton
import triton.language as tl

from gpu.operations.kv.kv_rows import floats_of, widen

RUN_CELLS = 16  # consecutive cells that share a page; a warp takes a multiple of this at once
MIN_GROUP_COLUMNS = 8  # the smallest tile of a second operand

_RUN = tl.constexpr(RUN_CELLS)


@triton.jit
def order_query(rows, WARPS: tl.constexpr):
    """Return queries `[group, dim]` as the second operand of the logits' product, `[warps, dim, group]`.

    dim has the order of `_load_keys`.
    """
    GROUP: tl.constexpr = rows.shape[0]
    DIM: tl.constexpr = rows.shape[1]
    turned = tl.permute(tl.reshape(rows, [GROUP, DIM // 64, 4, 4, 4]), [0, 1, 3, 2, 4])
    turned = tl.trans(tl.reshape(turned, [1, GROUP, DIM]), 0, 2, 1)
    return tl.broadcast_to(turned, [WARPS, DIM, GROUP])


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
    """Load the codes of runs as numbers `[warps, cells, dim]`. begin: where the runs begin, int64 `[runs, warps]`.

    Four lanes take 64 columns of a row, 16 each. In every step of 16 columns of a product, 4 of a lane's columns are
    neighbours.
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
    keys = tl.reshape(widen(codes, DTYPE, KIND), [PARTS, RUNS, 2, WARPS, 8, 4, 4, 4])
    return tl.reshape(tl.permute(keys, [3, 1, 2, 4, 0, 6, 5, 7]), [WARPS, RUNS * _RUN, BLOCK_DIM])


@triton.jit
def _load_values(pages, begin, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Load the codes of values as numbers `[warps, dim, cells]`.

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
    values = tl.permute(widen(codes, DTYPE, KIND), [3, 2, 6, 4, 0, 5, 1])
    return tl.reshape(values, [WARPS, BLOCK_DIM, RUNS * _RUN])


@triton.jit
def attend_runs(
    query, key_pages, value_pages, pages, maxima, kv_head, first, loaded, cells, reads, is_head, top, mass, out,
    covered, scale_log2,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    MAXIMA: tl.constexpr, COUNTED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add the `cells` `[warps, cells]` that each head `reads` `[warps, cells, group]`.

    first: the first cells of runs, `[runs, warps]`. loaded: the same for a run that is loaded in place of one that no
    head reads.
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
    logits = tl.dot(keys, query, input_precision="ieee") * (key_scale * scale_log2)[:, :, None]
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
