"""Rotary embedding of queries and keys, and the write of keys and values into their pages, in one pass.

It refuses to know how frequencies are scaled: cos and sin come as tables. Invariant: `qkv` is not modified, so its first
heads * dim columns stay the pre-RoPE query; a token with slot -1 is padding and writes nothing. The layout is
Hugging Face's rotate_half: element i pairs with i + dim / 2. Bytes moved per token: 2 * (heads + 2 * kv_heads) * dim *
itemsize, and 4 * dim of cos and sin.
"""

import torch
from torch import Tensor


def rope_kv_write_reference(
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
    """Plain torch; see `rope_kv_write`. The rotation is in the wider of qkv's and cos' dtypes."""
    kv_heads, page_tokens, dim = key_pages.shape[1:]
    valid = slots >= 0
    all_valid = bool(valid.all())
    if not all_valid:
        positions = torch.where(valid, positions, 0)
    split = qkv.view(qkv.shape[0], num_heads + 2 * kv_heads, 2, dim // 2)
    rotated_heads = split[:, : num_heads + kv_heads]  # [tokens, heads + kv_heads, 2, dim // 2]
    first, second = rotated_heads.unbind(2)
    cosine, sine = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [tokens, 1, dim // 2]
    rotated = torch.empty(rotated_heads.shape, dtype=qkv.dtype, device=qkv.device)
    rotated[:, :, 0] = (first * cosine).sub_(second * sine)
    rotated[:, :, 1] = (second * cosine).add_(first * sine)
    rotated = rotated.view(-1, num_heads + kv_heads, dim)
    query, key = rotated[:, :num_heads], rotated[:, num_heads:]
    value = split[:, num_heads + kv_heads :].reshape(-1, kv_heads, dim)
    if not all_valid:
        slots, positions, key, value = slots[valid], positions[valid], key[valid], value[valid]
    pages, offsets = page_table[slots, positions // page_tokens], positions % page_tokens
    key_pages[pages, :, offsets] = key
    value_pages[pages, :, offsets] = value
    return query


def rope_kv_write(
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
    """Rotate the query and the key of each token; write key and value to `page_table[slot, position // page_tokens]`.

    qkv: `[tokens, (heads + 2 * kv_heads) * dim]`; cos, sin: float32 `[max_context, dim // 2]`; positions: int64
    `[tokens]`; slots: int32 `[tokens]`, -1 for padding; page_table: int32 `[max_slots, max_pages]`; key_pages,
    value_pages: `[num_pages, kv_heads, page_tokens, dim]`, qkv's dtype. Returns the rotated query `[tokens, heads, dim]`
    (its rows may be strided). A padding token's query is undefined.
    """
    return rope_kv_write_reference(
        qkv, cos, sin, positions, slots, page_table, key_pages, value_pages, num_heads
    )  # fmt: skip
