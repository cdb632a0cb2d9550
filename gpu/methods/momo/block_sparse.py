"""Compute causal attention of query blocks, each over a list of key blocks and its own: out and natural-log lse.

MOMO, Algorithm 1, step 3. Invariants: a query block's output does not depend on which others are computed with it, bit
for bit in the kernel; keys outside a list and behind the last query are never read. On a GPU one program computes one
head's queries of one query block. Floor: 4 * dim operations for each (query, key it reads). Keys and values of a block
are read once for all queries of a query block, 4 * dim bytes of bf16 per key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.methods.momo.union import KeyLists
from gpu.operations.arguments import check, multiplies_on_tensor_cores
from transfer.partial import Partial

CONFIGS = {64: (4, 3), 96: (4, 2), 128: (4, 2)}  # dim: num_warps, num_stages


def block_sparse_reference(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, query_block: int, key_block: int, lists: KeyLists,
    scale: float,
) -> Partial:  # fmt: skip
    """Compute `block_sparse_attention` in plain torch."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    (tokens, heads, dim), kv_heads = query.shape, keys.shape[0]
    own = torch.arange(query_block, device=query.device)
    hidden = own > own[:, None]
    grouped = query.unflatten(1, (kv_heads, -1)).to(wide)  # [tokens, kv_heads, group, dim]
    out = torch.empty(tokens, heads, dim, dtype=wide, device=query.device)
    lse = torch.empty(tokens, heads, dtype=wide, device=query.device)
    for place in range(tokens // query_block):
        mine, first = slice(place * query_block, (place + 1) * query_block), begin + place * query_block
        reads = torch.zeros(heads, first // key_block + 1, dtype=torch.bool, device=query.device)
        listed = torch.arange(lists.blocks.shape[-1], device=query.device) < lists.counts[place, :, None]
        head, slot = listed.nonzero(as_tuple=True)
        reads[head, lists.blocks[place][head, slot].long()] = True
        for kv_head, of_group in enumerate(reads.unflatten(0, (kv_heads, -1))):
            past = of_group.any(0).repeat_interleave(key_block).nonzero()[:, 0]  # read by some head of the group
            columns = torch.cat([past, first + own])
            group = len(of_group)
            rows = grouped[mine, kv_head].transpose(0, 1).reshape(-1, dim)
            logits = (rows @ keys[kv_head, columns].to(wide).t() * scale).view(group, query_block, -1)
            logits[..., : len(past)].masked_fill_(~of_group[:, None, past // key_block], -torch.inf)
            logits[..., len(past) :].masked_fill_(hidden, -torch.inf)
            row_lse = logits.logsumexp(-1)  # [group, query_block]
            weights = logits.sub_(row_lse[..., None]).exp_().flatten(0, 1)
            heads_of_group = slice(kv_head * group, (kv_head + 1) * group)
            attended = (weights @ values[kv_head, columns].to(wide)).view(group, query_block, dim)
            out[mine, heads_of_group], lse[mine, heads_of_group] = attended.transpose(0, 1), row_lse.t()
    return Partial(out, lse)


@triton.jit
def _pass_block(
    rows, top, mass, out, keys, values, key_token_stride, value_token_stride, block, position, scale_log2,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    token = block * KEY_BLOCK + tl.arange(0, KEY_BLOCK)
    column = tl.arange(0, BLOCK_DIM)
    key_at = keys + token.to(tl.int64)[:, None] * key_token_stride + column[None, :]
    value_at = values + token.to(tl.int64)[:, None] * value_token_stride + column[None, :]
    if BLOCK_DIM == DIM:
        key, value = tl.load(key_at), tl.load(value_at)
    else:
        is_column = (column < DIM)[None, :]
        key, value = tl.load(key_at, mask=is_column, other=0.0), tl.load(value_at, mask=is_column, other=0.0)
    logits = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale_log2
    if MASKED:
        logits = tl.where(token[None, :] <= position[:, None], logits, float("-inf"))
    higher = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - higher[:, None])
    rescale = tl.exp2(top - higher)
    mass = mass * rescale + tl.sum(weights, 1)
    out = out * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, mass, out


@triton.jit(do_not_specialize=["begin"])
def _block_sparse_kernel(
    query, keys, values, lists, counts, out, lse, begin, scale_log2,
    query_stride, key_head_stride, key_token_stride, value_head_stride, value_token_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    LN2: tl.constexpr = 0.6931471805599453
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = place * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    position = begin + row
    column = tl.arange(0, BLOCK_DIM)
    is_column = (column < DIM)[None, :]
    rows = tl.load(query + row[:, None] * query_stride + head * DIM + column[None, :], mask=is_column, other=0.0)
    key_head = keys + (head // GROUP).to(tl.int64) * key_head_stride
    value_head = values + (head // GROUP).to(tl.int64) * value_head_stride
    listed = lists + (place * HEADS + head) * MOST
    top = tl.full([QUERY_BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([QUERY_BLOCK], tl.float32)
    total = tl.zeros([QUERY_BLOCK, BLOCK_DIM], tl.float32)
    for number in range(tl.load(counts + place * HEADS + head)):
        block = tl.load(listed + number)
        top, mass, total = _pass_block(
            rows, top, mass, total, key_head, value_head, key_token_stride, value_token_stride, block, position,
            scale_log2, DIM, BLOCK_DIM, KEY_BLOCK, False,
        )  # fmt: skip
    first = (begin // KEY_BLOCK + tl.program_id(0) * (QUERY_BLOCK // KEY_BLOCK)).to(tl.int32)
    for own in range(QUERY_BLOCK // KEY_BLOCK):
        top, mass, total = _pass_block(
            rows, top, mass, total, key_head, value_head, key_token_stride, value_token_stride, first + own, position,
            scale_log2, DIM, BLOCK_DIM, KEY_BLOCK, True,
        )  # fmt: skip
    to = row * HEADS + head
    tl.store(out + to[:, None] * DIM + column[None, :], total / mass[:, None], mask=is_column)
    tl.store(lse + to, (top + tl.log2(mass)) * LN2)


def block_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, begin: int, query_block: int, key_block: int, lists: KeyLists,
    scale: float,
) -> Partial:  # fmt: skip
    """Attend with whole query blocks: `query [tokens, heads, dim]` at positions from `begin` on, a multiple of
    `query_block`.

    keys, values: `[kv_heads, context, dim]` (heads and tokens strided), context at least begin + tokens; of one dtype.
    lists: from `gpu.methods.momo.union`. Returns out float32 `[tokens, heads, dim]` and lse float32 `[tokens, heads]`.
    Raises ValueError for another shape, dtype or device; the lists' blocks are trusted.
    """
    op, (tokens, heads, dim), device = "block_sparse_attention", query.shape, query.device
    kv_heads, context, _ = keys.shape
    check(op, "keys", keys, (kv_heads, context, dim), query.dtype, device)
    check(op, "values", values, (kv_heads, context, dim), query.dtype, device)
    if heads % kv_heads:
        raise ValueError(f"{op}: {heads} query heads over {kv_heads} KV heads; wanted a multiple")
    if begin % query_block or tokens % query_block or begin + tokens > context:
        raise ValueError(
            f"{op}: queries [{begin}, {begin + tokens}) over {context} keys; wanted whole blocks of {query_block}, and "
            "their keys"
        )
    num_query_blocks, _, most = lists.blocks.shape
    check(op, "lists.blocks", lists.blocks, (tokens // query_block, heads, most), torch.int32, device)
    check(op, "lists.counts", lists.counts, (num_query_blocks, heads), torch.int32, device)
    if not multiplies_on_tensor_cores(query):
        return block_sparse_reference(query, keys, values, begin, query_block, key_block, lists, scale)
    if query.stride()[1:] != (dim, 1):
        raise ValueError(f"{op}: query has strides {query.stride()}; wanted heads and dim contiguous")
    if dim not in CONFIGS:
        raise ValueError(f"{op}: dim is {dim}; on {device} wanted one of {sorted(CONFIGS)}")
    num_warps, num_stages = CONFIGS[dim]
    out = torch.empty(tokens, heads, dim, dtype=torch.float32, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    _block_sparse_kernel[(num_query_blocks, heads)](
        query, keys, values, lists.blocks, lists.counts, out, lse, begin, scale * 1.4426950408889634,
        query.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, GROUP=heads // kv_heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), QUERY_BLOCK=query_block,
        KEY_BLOCK=key_block, MOST=most, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return Partial(out, lse)
