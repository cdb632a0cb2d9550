"""What stands between a layer's projections, compiled for float32 on the CPU: RoPE with the KV write, decode attention.

Same contracts as `rope_kv_write` and `paged_decode_attention`, whose plain torch references take some sixty small
operations and a copy of every page; here a page is read where it lies. It refuses to know threads but its own pool,
which long contexts are spread over. Bytes moved: those of the two operations, keys and values once for a query group.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numba
import numpy as np
import torch
from torch import Tensor

from transfer.partial import Partial

SPREAD_TOKENS = 8192  # context tokens of a batch from which more than one thread pays for its start
FINITE_OR_NOT = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; NaN and infinity stay what they are


def applies(tensor: Tensor) -> bool:
    """Whether these functions serve tensors of this device and type."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def rope_kv_write_cpu(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
) -> Tensor:
    """See `gpu.kernels.rope_kv_write.rope_kv_write`; float32 throughout. A padding token's query is zero."""
    kv_heads, _, dim = key_pages.shape[1:]
    query = torch.zeros(len(qkv), num_heads, dim)
    tokens = qkv.view(-1, num_heads + 2 * kv_heads, dim)
    _rope_kv_write(
        tokens.numpy(), cos.numpy(), sin.numpy(), positions.numpy(), slots.numpy(), page_table.numpy(),
        key_pages.numpy(), value_pages.numpy(), query.numpy(),
    )  # fmt: skip
    return query


@numba.njit(nogil=True, cache=True, fastmath=FINITE_OR_NOT)
def _rope_kv_write(qkv, cos, sin, positions, slots, page_table, key_pages, value_pages, query):
    heads, dim = query.shape[1:]
    kv_heads, page_tokens = key_pages.shape[1:3]
    half = dim // 2
    for token in range(qkv.shape[0]):
        slot, position = slots[token], positions[token]
        if slot < 0:
            continue
        page, offset = page_table[slot, position // page_tokens], position % page_tokens
        for head in range(heads + kv_heads):
            to = query[token, head] if head < heads else key_pages[page, head - heads, offset]
            for i in range(half):
                first, second = qkv[token, head, i], qkv[token, head, i + half]
                to[i] = first * cos[position, i] - second * sin[position, i]
                to[i + half] = second * cos[position, i] + first * sin[position, i]
        for head in range(kv_heads):
            for i in range(dim):
                value_pages[page, head, offset, i] = qkv[token, heads + kv_heads + head, i]


def paged_decode_attention_cpu(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Partial:
    """See `gpu.kernels.paged_decode_attention.paged_decode_attention`; float32 throughout."""
    requests, heads, dim = query.shape
    kv_heads = key_pages.shape[1]
    out = torch.empty(requests, heads, dim)
    lse = torch.empty(requests, heads)
    lens = context_lens.numpy()
    arrays = (
        query.numpy(), key_pages.numpy(), value_pages.numpy(), page_table.numpy(), slots.numpy(), lens,
        np.float32(scale), out.numpy(), lse.numpy(),
    )  # fmt: skip
    threads = torch.get_num_threads()
    items = requests * kv_heads
    if threads == 1 or int(lens.sum()) < SPREAD_TOKENS:
        _attend(*arrays, 0, items, 1)
    else:
        others = [_pool(threads - 1).submit(_attend, *arrays, first, items, threads) for first in range(1, threads)]
        _attend(*arrays, 0, items, threads)
        for other in others:
            other.result()
    return Partial(out, lse)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decode-attention")


@numba.njit(nogil=True, cache=True, fastmath=FINITE_OR_NOT)
def _attend(query, key_pages, value_pages, page_table, slots, context_lens, scale, out, lse, first, end, step):
    """(request, KV head) pairs `first, first + step ..`: logits, their softmax, then the weighted values."""
    kv_heads, page_tokens, dim = key_pages.shape[1:]
    group = query.shape[1] // kv_heads
    logits = np.empty((group, max(1, context_lens.max())), dtype=np.float32)
    for item in range(first, end, step):
        request, kv_head = item // kv_heads, item % kv_heads
        slot, context = slots[request], context_lens[request]
        heads = kv_head * group
        if slot < 0 or context == 0:
            out[request, heads : heads + group] = 0.0
            lse[request, heads : heads + group] = -np.inf
            continue
        for token in range(context):
            key = key_pages[page_table[slot, token // page_tokens], kv_head, token % page_tokens]
            for member in range(group):
                product = np.float32(0.0)
                for i in range(dim):
                    product += query[request, heads + member, i] * key[i]
                logits[member, token] = product * scale
        for member in range(group):
            top = logits[member, :context].max()
            mass = np.float32(0.0)
            for token in range(context):
                weight = np.exp(logits[member, token] - top)
                logits[member, token] = weight
                mass += weight
            lse[request, heads + member] = top + np.log(mass)
            for token in range(context):
                logits[member, token] /= mass
        out[request, heads : heads + group] = 0.0
        for token in range(context):
            value = value_pages[page_table[slot, token // page_tokens], kv_head, token % page_tokens]
            for member in range(group):
                weight = logits[member, token]
                for i in range(dim):
                    out[request, heads + member, i] += weight * value[i]
