"""Apply RoPE and write KV on the CPU in float32, compiled by numba."""

import numba
import torch
from torch import Tensor

import transfer.simd  # noqa: F401, what numba cannot cache it then keeps in memory
from gpu.operations.arguments import FINITE_OR_NOT
from gpu.operations.head_norm import HeadNorms, head_norm
from gpu.operations.kv.row_places import RowPlaces


def rope_kv_write_cpu(
    qkv: Tensor,
    places: RowPlaces,
    page_table: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Compute `rope_kv_write` in float32 throughout. A padding token's query is zero."""
    kv_heads, _, dim = key_pages.shape[1:]
    if norms is not None:
        head_norm(qkv, norms, num_heads, kv_heads)
    query = torch.zeros(len(qkv), num_heads, dim)
    tokens = qkv.view(-1, num_heads + 2 * kv_heads, dim)
    _rope_kv_write(
        tokens.numpy(), *(tensor.numpy() for tensor in places), page_table.numpy(), key_pages.numpy(),
        value_pages.numpy(), query.numpy(),
    )  # fmt: skip
    return query


@numba.njit(nogil=True, cache=True, fastmath=FINITE_OR_NOT)
def _rope_kv_write(qkv, cos, sin, positions, cells, slots, page_table, key_pages, value_pages, query):
    heads, dim = query.shape[1:]
    kv_heads, page_tokens = key_pages.shape[1:3]
    half = dim // 2
    for token in range(qkv.shape[0]):
        slot, position, cell = slots[token], positions[token], cells[token]
        if slot < 0:
            continue
        page, offset = page_table[slot, cell // page_tokens], cell % page_tokens
        for head in range(heads + kv_heads):
            to = query[token, head] if head < heads else key_pages[page, head - heads, offset]
            for i in range(half):
                first, second = qkv[token, head, i], qkv[token, head, i + half]
                to[i] = first * cos[position, i] - second * sin[position, i]
                to[i + half] = second * cos[position, i] + first * sin[position, i]
        for head in range(kv_heads):
            for i in range(dim):
                value_pages[page, head, offset, i] = qkv[token, heads + kv_heads + head, i]
