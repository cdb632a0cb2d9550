"""Choose the key blocks a query block reads: the union of its sparse queries' choices, trimmed to the heaviest.

MOMO, section 3 (Block Mask Union and Top-k Trimming) and Algorithm 1, step 2. A block's weight is its mean mass over
the query block's sparse rows, exp(score - row lse); a row that did not choose it adds nothing. (The paper ranks by the
mean score of the rows that did choose it, which keeps less: lab/LAB.md.) The first key block is always read, and a
query block's own ones are read besides the list. Invariant: the list depends on its query block's rows alone. Its
blocks are different and lie before the query block, and the heavier ones come first.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.momo.query_sparse import SparseRows
from gpu.operations.arguments import check, check_contiguous, runs_on_triton

WARP_CANDIDATES = 128

# Masses are summed as integers, so that sums do not depend on the order. Up to 128 rows fit an int32.
_ONE = tl.constexpr(2.0**22)
_LOW_FIRST = tl.constexpr(2**31 - 1)  # flips a block, so that of equal weights the earlier block is the larger


@dataclass(frozen=True, slots=True)
class KeyLists:
    """The key blocks that each query block attends to.

    blocks: int32 `[query blocks, heads, most]`. counts: int32 `[query blocks, heads]`, how many of these are valid.
    """

    blocks: Tensor
    counts: Tensor


def unite_reference(rows: SparseRows, begin: int, rows_per_block: int, own_blocks: int, k_trim: int) -> KeyLists:
    """Compute `unite` in plain torch."""
    num_rows, heads, _ = rows.blocks.shape
    most, count = k_trim - own_blocks, num_rows // rows_per_block
    below = (begin + own_blocks * torch.arange(count, device=rows.lse.device))[:, None]  # a query block's own first
    blocks = rows.blocks.unflatten(0, (count, rows_per_block)).transpose(1, 2).flatten(2).long()
    mass = (rows.scores - rows.lse[..., None]).exp().unflatten(0, (count, rows_per_block)).transpose(1, 2).flatten(2)
    is_other = (blocks > 0) & (blocks < below[..., None])  # [query blocks, heads, candidates]
    all_blocks = max(most, int(below.max()))
    weight = torch.zeros(count, heads, all_blocks + 1, dtype=mass.dtype, device=mass.device)
    place = torch.where(is_other, blocks, all_blocks)
    weight.scatter_add_(2, place, mass)
    chosen = torch.zeros_like(weight, dtype=torch.bool).scatter_(2, place, True)[..., :-1]
    weight = weight[..., :-1].masked_fill(~chosen, -1.0)
    order = weight.sort(dim=-1, descending=True, stable=True).indices[..., : most - 1]
    first = torch.zeros(count, heads, 1, dtype=order.dtype, device=order.device)
    has_past = (below > 0).int()
    counts = chosen.sum(-1).clamp(max=most - 1).int() + has_past
    return KeyLists(torch.cat([first, order], -1).int(), counts)


@triton.jit(do_not_specialize=["begin", "most_blocks"])
def _unite_kernel(
    blocks, scores, lse, sums, lists, counts, begin, most_blocks, row_stride, head_stride,
    HEADS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    CANDIDATES: tl.constexpr = ROWS * K
    program = tl.program_id(0).to(tl.int64)
    query_block, head = program // HEADS, program % HEADS
    below = begin + query_block.to(tl.int32) * OWN
    candidate = tl.arange(0, CANDIDATES)
    row = query_block * ROWS + candidate // K
    block = tl.load(blocks + (row * HEADS + head) * K + candidate % K)
    score = tl.load(scores + row * row_stride + head * head_stride + candidate % K)
    mass = tl.exp(score - tl.load(lse + row * HEADS + head))
    is_other = (block > 0) & (block < below)
    place = sums + program * most_blocks + tl.maximum(block, 0)
    tl.store(place, 0, mask=is_other)
    tl.debug_barrier()
    tl.atomic_add(place, (mass * _ONE).to(tl.int32) + 1, mask=is_other, sem="relaxed")
    tl.debug_barrier()
    weight = tl.atomic_xchg(place, tl.full([CANDIDATES], -1, tl.int32), mask=is_other, sem="relaxed")
    is_first = is_other & (weight > 0)  # of a block's candidates, the first to come takes its weight
    key = tl.where(is_first, (weight.to(tl.int64) << 32) + (block ^ _LOW_FIRST), 0)
    key = tl.sort(key, descending=True)
    num_others = tl.minimum(tl.sum(is_first.to(tl.int32), 0), MOST - 1)
    to_list = lists + program * MOST
    tl.store(to_list, 0)
    tl.store(to_list + 1 + candidate, (key & 0xFFFFFFFF).to(tl.int32) ^ _LOW_FIRST, mask=candidate < num_others)
    tl.store(counts + program, num_others + (below > 0).to(tl.int32))


def unite(rows: SparseRows, begin: int, rows_per_block: int, own_blocks: int, k_trim: int) -> KeyLists:
    """Return the lists for query blocks of `rows_per_block` sparse rows each; rows must be whole query blocks.

    begin: the key block where the first query block begins. own_blocks: number of a query block's own key blocks, which
    are read besides the list and count in `k_trim`. Raises ValueError if rows are not whole query blocks, or are
    strided.
    """
    num_rows, heads, k = rows.blocks.shape
    if num_rows % rows_per_block:
        raise ValueError(f"unite: {num_rows} sparse rows; wanted a multiple of {rows_per_block}")
    if not runs_on_triton(rows.blocks):
        return unite_reference(rows, begin, rows_per_block, own_blocks, k_trim)
    count, most, candidates = num_rows // rows_per_block, k_trim - own_blocks, rows_per_block * k
    device = rows.blocks.device
    check("unite", "scores", rows.scores, (num_rows, heads, k), torch.float32, device)
    check_contiguous("unite", "blocks", rows.blocks)
    check_contiguous("unite", "lse", rows.lse)
    lists = torch.empty(count, heads, most, dtype=torch.int32, device=device)
    counts = torch.empty(count, heads, dtype=torch.int32, device=device)
    most_blocks = begin + count * own_blocks
    sums = torch.empty(count * heads, most_blocks, dtype=torch.int32, device=device)
    _unite_kernel[(count * heads,)](
        rows.blocks, rows.scores, rows.lse, sums, lists, counts, begin, most_blocks, rows.scores.stride(0),
        rows.scores.stride(1), HEADS=heads, K=k, ROWS=rows_per_block, OWN=own_blocks, MOST=most,
        num_warps=min(8, max(1, candidates // WARP_CANDIDATES)),
    )  # fmt: skip
    return KeyLists(lists, counts)
