"""Attend with a prompt's queries at any ascending positions to all tokens up to their own, in one pass over the keys.

Query i sees keys `[0, positions[i]]`, or the last `window` of these. Nothing behind a tile's last query is read, so it
may be NaN. A program holds a tile of queries of one head. Floor: 4 * dim operations per head for each (query, key that
it sees).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, multiplies_on_tensor_cores

CONFIGS = {
    64: (128, 64, 4, 3),
    96: (128, 64, 8, 2),
    128: (128, 64, 8, 2),
    256: (64, 32, 8, 2),
}  # dim: queries, keys, num_warps, num_stages
NO_WINDOW = 1 << 30


@triton.jit
def _pass_keys(
    rows, top, mass, total, keys, values, key_token_stride, value_token_stride, block, position, last, window,
    scale_log2, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = block * KEYS + tl.arange(0, KEYS)
    column = tl.arange(0, BLOCK_DIM)
    inside = (token <= last)[:, None]  # later rows may not be written yet
    if DIM != BLOCK_DIM:
        inside = inside & (column < DIM)[None, :]
    key = tl.load(keys + token.to(tl.int64)[:, None] * key_token_stride + column[None, :], mask=inside, other=0.0)
    value = tl.load(values + token.to(tl.int64)[:, None] * value_token_stride + column[None, :], mask=inside, other=0.0)
    logits = tl.dot(rows, tl.trans(key)) * scale_log2
    if MASKED:
        far = position[:, None] - token[None, :]
        logits = tl.where((far >= 0) & (far < window), logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    known = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row has seen no key yet
    weights = tl.exp2(logits - known[:, None])
    rescale = tl.exp2(top - known)
    mass = mass * rescale + tl.sum(weights, 1)
    total = total * rescale[:, None] + tl.dot(weights.to(value.dtype), value)
    return higher, mass, total


@triton.jit(do_not_specialize=["num_queries", "window"])
def _scattered_attention_kernel(
    query, keys, values, positions, out, lse, num_queries, window, scale_log2,
    query_stride, key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    LN2: tl.constexpr = 0.6931471805599453
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    which = tile * QUERIES + tl.arange(0, QUERIES)
    is_query = which < num_queries
    which = tl.minimum(which, num_queries - 1)
    position = tl.load(positions + which).to(tl.int32)
    column = tl.arange(0, BLOCK_DIM)
    is_column = (column < DIM)[None, :]
    rows = tl.load(
        query + which.to(tl.int64)[:, None] * query_stride + head * DIM + column[None, :], mask=is_column, other=0.0
    )
    key_head = keys + (head // GROUP).to(tl.int64) * key_head_stride
    value_head = values + (head // GROUP).to(tl.int64) * value_head_stride
    first, last = tl.min(position, 0), tl.max(position, 0)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, BLOCK_DIM], tl.float32)
    begin = tl.maximum(0, first - window + 1) // KEYS
    end_masked = tl.where(last >= window, (last - window) // KEYS + 1, 0)  # below, some query's window has not begun
    num_whole = (first + 1) // KEYS
    low = tl.minimum(tl.maximum(begin, end_masked), last // KEYS + 1)
    high = tl.maximum(low, tl.minimum(num_whole, last // KEYS + 1))
    for block in range(begin, low):
        top, mass, total = _pass_keys(
            rows, top, mass, total, key_head, value_head, key_token_stride, value_token_stride, block, position,
            last, window, scale_log2, DIM, BLOCK_DIM, KEYS, True,
        )  # fmt: skip
    for block in range(low, high):
        top, mass, total = _pass_keys(
            rows, top, mass, total, key_head, value_head, key_token_stride, value_token_stride, block, position,
            last, window, scale_log2, DIM, BLOCK_DIM, KEYS, False,
        )  # fmt: skip
    for block in range(high, last // KEYS + 1):
        top, mass, total = _pass_keys(
            rows, top, mass, total, key_head, value_head, key_token_stride, value_token_stride, block, position,
            last, window, scale_log2, DIM, BLOCK_DIM, KEYS, True,
        )  # fmt: skip
    row = which.to(tl.int64) * HEADS + head
    result = (total / mass[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * DIM + column[None, :], result, mask=is_query[:, None] & is_column)
    tl.store(lse + row, (top + tl.log2(mass)) * LN2, mask=is_query)


def serves(query: Tensor) -> bool:
    """Return whether the kernel supports queries like this one."""
    return multiplies_on_tensor_cores(query) and query.shape[-1] in CONFIGS


def scattered_attention_kernel(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return out `[tokens, heads, dim]` in the query's dtype, and lse float32 `[tokens, heads]`, natural; where
    `serves`.

    query: `[tokens, heads, dim]` (tokens strided). keys, values: `[kv_heads, context, dim]` (heads and tokens strided),
    of tokens from 0 on. positions: int64 `[tokens]`, ascending and below context, which is trusted. Raises ValueError
    for another shape, dtype or device.
    """
    op, (tokens, heads, dim), device = "scattered_attention", query.shape, query.device
    kv_heads, context, _ = keys.shape
    check(op, "keys", keys, (kv_heads, context, dim), query.dtype, device)
    check(op, "values", values, (kv_heads, context, dim), query.dtype, device)
    check(op, "positions", positions, (tokens,), torch.int64, device)
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    if query.stride()[1:] != (dim, 1) or keys.stride(2) != 1 or values.stride(2) != 1 or positions.stride() != (1,):
        raise ValueError(f"{op}: query has strides {query.stride()}; wanted heads, dim and positions contiguous")
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    if tokens == 0:
        return out, lse
    tile, block, num_warps, num_stages = CONFIGS[dim]
    _scattered_attention_kernel[(triton.cdiv(tokens, tile), heads)](
        query, keys, values, positions, out, lse, tokens, window or NO_WINDOW, scale * 1.4426950408889634,
        query.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), QUERIES=tile, KEYS=block,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out, lse
