"""Attend with every gamma-th query to its whole causal past, and find the key blocks that hold most of its attention.

MOMO, section 3 and Algorithm 1, step 1. A block's score (eq. 3) is the logsumexp of its scaled logits; the partial
block at the diagonal is scored, too. Invariants: a row's output, lse, scores and blocks do not depend on which other
rows are computed with it, bit for bit in the kernel; nothing behind the last query is ever read. On a GPU one program
holds a tile of rows, sparse queries times the heads of a group, and passes once over their keys. Floor: 4 * dim
operations for each (row, key at or before it), 1 / gamma of dense attention. A block whose largest logit is more than
126 octaves below its row's largest so far counts as 126 octaves below it. Of the paper's selections this is the exact
one. The tree took 2.4 times as long, and the estimated threshold kept less of the attention and lost more in tasks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, multiplies_on_tensor_cores

LEAST_ROWS = 16  # of a tile; tensor cores need as many
OCTAVES = 126  # float32 exponents below one

CONFIGS = {64: (64, 4, 3), 96: (64, 4, 2), 128: (64, 4, 3)}  # dim: rows, num_warps, num_stages

_OCTAVES = tl.constexpr(OCTAVES)


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The output of sparse queries.

    out: float32 `[rows, heads, dim]`. lse: float32 `[rows, heads]`. blocks, scores: int32 and float32, `[rows, heads,
    k]`. Both logarithms are natural. Blocks have no order, and -1 marks a free slot. lse and blocks are contiguous; out
    and scores are so along their last axis.
    """

    out: Tensor
    lse: Tensor
    blocks: Tensor
    scores: Tensor


def count_rows(tokens: int, gamma: int) -> int:
    """Return the number of sparse queries among `tokens` queries, of which the first is one."""
    return -(-tokens // gamma)


def _select_reference(scores: Tensor, num_blocks: Tensor, k: int) -> Tensor:
    """Return the blocks that rows keep, int32 `[rows, heads, k]`, -1 in free slots.

    Of equal scores the earlier block is kept.

    scores: `[rows, heads, blocks]`, any float. num_blocks: int64 `[rows]`, how many blocks in front a row sees.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    kept = torch.where(order < num_blocks[:, None, None], order, -1)
    return torch.nn.functional.pad(kept, (0, k - kept.shape[-1]), value=-1).int()


def query_sparse_reference(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, gamma: int, key_block: int, k: int, scale: float
) -> SparseRows:
    """Compute `query_sparse_attention` in plain torch."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    chosen, keys, values = query[::gamma].to(wide), keys.to(wide), values.to(wide)
    (rows, heads, dim), kv_heads = chosen.shape, keys.shape[0]
    position = begin + gamma * torch.arange(rows, device=query.device)
    context = begin + gamma * (rows - 1) + 1
    grouped = chosen.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    logits = (grouped @ keys[:, :context].transpose(1, 2) * scale).view(heads, rows, context)
    logits.masked_fill_(torch.arange(context, device=query.device) > position[:, None], -torch.inf)
    lse = logits.logsumexp(-1)  # [heads, rows]
    padded = torch.nn.functional.pad(logits, (0, -context % key_block), value=-torch.inf)
    scores = padded.unflatten(-1, (-1, key_block)).logsumexp(-1).transpose(0, 1)  # [rows, heads, blocks]
    blocks = _select_reference(scores, position // key_block + 1, k)
    weights = logits.sub_(lse[..., None]).exp_().view(kv_heads, -1, context)
    out = (weights @ values[:, :context]).view(heads, rows, dim).transpose(0, 1)
    kept = scores.gather(-1, blocks.clamp(min=0).long()).masked_fill_(blocks < 0, -torch.inf)
    return SparseRows(out, lse.transpose(0, 1).contiguous(), blocks.contiguous(), kept.contiguous())


@triton.jit
def _begin_selection(ROWS: tl.constexpr, K: tl.constexpr):
    """Return the initial state of a tile's selection: best, held `[rows, K]`; the lowest of best and its slot,
    `[rows]`.
    """
    best = tl.full([ROWS, K], float("-inf"), tl.float32)
    held = tl.full([ROWS, K], -1, tl.int32)
    lowest = tl.full([ROWS], float("-inf"), tl.float32)
    slot = tl.zeros([ROWS], tl.int32)
    return best, held, lowest, slot


@triton.jit
def _offer_block(best, held, lowest, slot, score, block, sees, K: tl.constexpr):
    """Offer one block's score to every row that sees it. Blocks come in ascending order."""
    wins = sees & (score > lowest)
    if tl.max(wins.to(tl.int32), 0) > 0:
        here = (tl.arange(0, K)[None, :] == slot[:, None]) & wins[:, None]
        best = tl.where(here, score[:, None], best)
        held = tl.where(here, block, held)
        lowest, slot = tl.min(best, 1, return_indices=True)
    return best, held, lowest, slot


@triton.jit
def _pass_block(
    rows, top, mass, out, best, held, lowest, slot,
    keys, values, key_token_stride, value_token_stride, block, position, is_row, num_blocks, context, scale_log2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Advance the softmax over one key block, and offer its score to the selection.

    MASKED: some rows do not see all of the block.
    """
    LN2: tl.constexpr = 0.6931471805599453
    token = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    column = tl.arange(0, BLOCK_DIM)
    key_at = keys + token.to(tl.int64)[:, None] * key_token_stride + column[None, :]
    value_at = values + token.to(tl.int64)[:, None] * value_token_stride + column[None, :]
    if MASKED:
        inside = (token < context)[:, None] & (column < DIM)[None, :]
        key = tl.load(key_at, mask=inside, other=0.0)
        value = tl.load(value_at, mask=inside, other=0.0)
    elif BLOCK_DIM != DIM:
        key = tl.load(key_at, mask=(column < DIM)[None, :], other=0.0)
        value = tl.load(value_at, mask=(column < DIM)[None, :], other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(value_at)
    products = tl.dot(rows, tl.trans(key), input_precision="ieee")
    sees = is_row
    if MASKED:
        products = tl.where(token[None, :] <= position[:, None], products, float("-inf"))
        sees = is_row & (block < num_blocks)
    higher = tl.maximum(top, tl.max(products, 1) * scale_log2)
    # An explicit fused product: the compiler would fuse it without masks, but not with them.
    weights = tl.exp2(tl.fma(products, scale_log2 + tl.zeros_like(products), tl.zeros_like(products) - higher[:, None]))
    rescale = tl.exp2(top - higher)
    block_mass = tl.sum(weights, 1)
    mass = mass * rescale + block_mass
    out = out * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    score = (higher + tl.maximum(tl.log2(block_mass), -_OCTAVES)) * LN2
    best, held, lowest, slot = _offer_block(best, held, lowest, slot, score, block, sees, K)
    return higher, mass, out, best, held, lowest, slot


@triton.jit(do_not_specialize=["begin", "num_rows", "context"])  # any unit runs what the first one compiled
def _query_sparse_kernel(
    query, keys, values, out, lse, blocks, scores, begin, num_rows, context, scale_log2,
    query_stride, key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    ROWS: tl.constexpr, GAMMA: tl.constexpr, KEY_BLOCK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // BLOCK_GROUP
    LN2: tl.constexpr = 0.6931471805599453
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    kv_head = tl.program_id(1)
    member = tl.arange(0, ROWS) % BLOCK_GROUP
    which = tile * QUERIES + tl.arange(0, ROWS) // BLOCK_GROUP
    is_row = (which < num_rows) & (member < GROUP)
    which = tl.minimum(which, num_rows - 1)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    position = begin + which * GAMMA
    num_blocks = position // KEY_BLOCK + 1
    column = tl.arange(0, BLOCK_DIM)
    is_column = (column < DIM)[None, :]
    from_query = query + which.to(tl.int64)[:, None] * GAMMA * query_stride + head[:, None] * DIM + column[None, :]
    rows = tl.load(from_query, mask=is_column, other=0.0)
    row = which.to(tl.int64) * (KV_HEADS * GROUP) + head
    to_blocks, to_scores = blocks + row * K, scores + row * K
    key_head = keys + kv_head.to(tl.int64) * key_head_stride
    value_head = values + kv_head.to(tl.int64) * value_head_stride

    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    best, held, lowest, slot = _begin_selection(ROWS, K)
    first = begin + tile * QUERIES * GAMMA
    last = begin + tl.minimum(tile * QUERIES + QUERIES - 1, num_rows - 1) * GAMMA
    num_whole = (first + 1) // KEY_BLOCK
    for block in range(num_whole):
        top, mass, total, best, held, lowest, slot = _pass_block(
            rows, top, mass, total, best, held, lowest, slot,
            key_head, value_head, key_token_stride, value_token_stride, block, position, is_row, num_blocks, context,
            scale_log2, DIM, BLOCK_DIM, KEY_BLOCK, K, False,
        )  # fmt: skip
    for block in range(num_whole, last // KEY_BLOCK + 1):
        top, mass, total, best, held, lowest, slot = _pass_block(
            rows, top, mass, total, best, held, lowest, slot,
            key_head, value_head, key_token_stride, value_token_stride, block, position, is_row, num_blocks, context,
            scale_log2, DIM, BLOCK_DIM, KEY_BLOCK, K, True,
        )  # fmt: skip
    to = out + row[:, None] * DIM + column[None, :]
    tl.store(to, total / mass[:, None], mask=is_row[:, None] & is_column)
    tl.store(lse + row, (top + tl.log2(mass)) * LN2, mask=is_row)
    at = tl.arange(0, K)[None, :]
    tl.store(to_blocks[:, None] + at, held, mask=is_row[:, None])
    tl.store(to_scores[:, None] + at, best, mask=is_row[:, None])


def query_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, gamma: int, key_block: int, k: int, scale: float
) -> SparseRows:
    """Attend with queries 0, gamma, 2 gamma, ... of `query [tokens, heads, dim]`, at positions `begin`, `begin +
    gamma`, ...

    keys, values: `[kv_heads, context, dim]` (heads and tokens strided), of tokens from 0 to the last sparse query at
    least; of one dtype. Raises ValueError for another shape, dtype or device.
    """
    op, (tokens, heads, dim), device = "query_sparse_attention", query.shape, query.device
    kv_heads, context, _ = keys.shape
    rows = count_rows(tokens, gamma)
    last = begin + (rows - 1) * gamma
    check(op, "keys", keys, (kv_heads, context, dim), query.dtype, device)
    check(op, "values", values, (kv_heads, context, dim), query.dtype, device)
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    if rows == 0 or last >= context:
        raise ValueError(f"{op}: queries to position {last} over {context} keys; wanted one query or more, and its key")
    if not multiplies_on_tensor_cores(query):
        return query_sparse_reference(query, keys, values, begin, gamma, key_block, k, scale)
    if query.stride()[1:] != (dim, 1):
        raise ValueError(f"{op}: query has strides {query.stride()}; wanted heads and dim contiguous")
    if dim not in CONFIGS:
        raise ValueError(f"{op}: dim is {dim}; on {device} wanted one of {sorted(CONFIGS)}")
    tile_rows, num_warps, num_stages = CONFIGS[dim]
    group = heads // kv_heads
    block_group = triton.next_power_of_2(group)
    tile_rows = max(LEAST_ROWS, tile_rows, block_group)
    out = torch.empty(rows, heads, dim, dtype=torch.float32, device=device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    blocks = torch.full((rows, heads, k), -1, dtype=torch.int32, device=device)
    scores = torch.full((rows, heads, k), -torch.inf, dtype=torch.float32, device=device)
    _query_sparse_kernel[(triton.cdiv(rows, tile_rows // block_group), kv_heads)](
        query, keys, values, out, lse, blocks, scores, begin, rows, last + 1, scale * 1.4426950408889634,
        query.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_GROUP=block_group,
        ROWS=tile_rows, GAMMA=gamma, KEY_BLOCK=key_block, K=k,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return SparseRows(out, lse, blocks, scores)
