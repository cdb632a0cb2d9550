"""Norm heads, apply RoPE, and write keys and values to their pages, in one pass.

Cos and sin come as tables. In `qkv` only normed heads change, in place, so its first heads * dim columns are afterwards
the pre-RoPE query. A token with slot -1 is padding: it writes nothing to pages, and its position and cell are not used.
8-bit codes are made from what pages in the compute dtype would hold. The layout is Hugging Face's rotate_half: element
i pairs with i + dim / 2. Bytes moved per token: 2 * (heads + 2 * kv_heads) * dim * itemsize, less what codes save, and
4 * dim of cos and sin; with norms (heads + kv_heads) * dim * itemsize more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, check_dtype, runs_on_triton
from gpu.operations.head_norm import HeadNorms, head_norm
from gpu.operations.kv.kv_rows import (
    PLAIN,
    check_pages,
    codes_of,
    dim_of,
    encode_rows,
    floats_of,
    has_codes,
    kind_of,
    make_codes,
    scale_of,
    scales_of,
)
from gpu.operations.kv.row_places import RowPlaces

_PLAIN = tl.constexpr(PLAIN)


def rope_kv_write_reference(
    qkv: Tensor,
    places: RowPlaces,
    page_table: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
) -> Tensor:
    """Compute `rope_kv_write` without its norms in plain torch, in the wider of qkv's and cos' dtypes."""
    (kv_heads, page_tokens), dim = key_pages.shape[1:3], dim_of(key_pages)
    cos, sin, positions, cells, slots = places
    valid = slots >= 0
    all_valid = bool(valid.all())
    if not all_valid:
        positions = torch.where(valid, positions, 0)
    split = qkv.unflatten(-1, (num_heads + 2 * kv_heads, 2, dim // 2))
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
        slots, cells, key, value = slots[valid], cells[valid], key[valid], value[valid]
    pages, offsets = page_table[slots, cells // page_tokens], cells % page_tokens
    for written, rows in ((key_pages, key), (value_pages, value)):
        if has_codes(written):
            codes, scales = make_codes(rows, written.dtype)
            codes_of(written)[pages, :, offsets], scales_of(written)[pages, :, offsets] = codes, scales
        else:
            written[pages, :, offsets] = rows.to(written.dtype)
    return query


@triton.jit
def _rope_kv_write_kernel(
    qkv, query_norm, key_norm, cos, sin, positions, cells, slots, page_table, key_pages, value_pages, query,
    qkv_stride, max_pages, eps,
    NORMS: tl.constexpr, NORMS_VALUES: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_HALF: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    is_token = slot >= 0
    position = tl.load(positions + token, mask=is_token, other=0).to(tl.int64)
    cell = tl.load(cells + token, mask=is_token, other=0).to(tl.int64)
    page = tl.load(page_table + slot * max_pages + cell // PAGE_TOKENS, mask=is_token, other=0).to(tl.int64)
    WIDTH: tl.constexpr = DIM if KIND == _PLAIN else DIM + 4
    page_begin, offset = page * KV_HEADS, cell % PAGE_TOKENS  # pages are counted per KV head

    half = tl.arange(0, BLOCK_HALF)[None, :]
    is_half = half < HALF  # dim may be no power of two
    cosine = tl.load(cos + position * HALF + half, mask=is_half, other=0.0)
    sine = tl.load(sin + position * HALF + half, mask=is_half, other=0.0)
    head = tl.arange(0, BLOCK_ROTATED)[:, None]
    source = qkv + token * qkv_stride + head * DIM + half
    is_rotated = (head < HEADS + KV_HEADS) & is_half
    first = tl.load(source, mask=is_rotated, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_rotated, other=0.0).to(tl.float32)
    if NORMS:
        dtype = qkv.dtype.element_ty
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
        first *= scale
        second *= scale
        if query_norm.dtype.element_ty == dtype:
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        gain = tl.where(head < HEADS, query_norm, key_norm) + half
        first *= tl.load(gain, mask=is_rotated, other=0.0).to(tl.float32)
        second *= tl.load(gain + HALF, mask=is_rotated, other=0.0).to(tl.float32)
        tl.store(source, first.to(dtype), mask=is_rotated)
        tl.store(source + HALF, second.to(dtype), mask=is_rotated)
        first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    low = (first * cosine - second * sine).to(query.dtype.element_ty)
    high = (second * cosine + first * sine).to(query.dtype.element_ty)
    to_query = query + (token * HEADS + head) * DIM + half
    tl.store(to_query, low, mask=(head < HEADS) & is_half)
    tl.store(to_query + HALF, high, mask=(head < HEADS) & is_half)
    num_written = tl.where(is_token, KV_HEADS, 0)
    is_key = (head >= HEADS) & (head < HEADS + num_written) & is_half
    to_key = key_pages + (page_begin + head - HEADS) * (PAGE_TOKENS * WIDTH) + offset * DIM + half
    if KIND == _PLAIN:
        tl.store(to_key, low, mask=is_key)
        tl.store(to_key + HALF, high, mask=is_key)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)  # 0 where nothing was loaded
        largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)[:, None]
        scale = scale_of(largest, tl.sum(low * 0.0 + high * 0.0, 1)[:, None], KIND)
        tl.store(to_key, encode_rows(low, scale, KIND), mask=is_key)
        tl.store(to_key + HALF, encode_rows(high, scale, KIND), mask=is_key)
        word = (page_begin + head - HEADS) * (PAGE_TOKENS * WIDTH // 4) + PAGE_TOKENS * DIM // 4 + offset
        tl.store(floats_of(key_pages) + word, scale, mask=(head >= HEADS) & (head < HEADS + num_written))

    kv_head = tl.arange(0, BLOCK_KV)[:, None]
    column = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    is_value = (kv_head < num_written) & (column < DIM)
    value = tl.load(qkv + token * qkv_stride + (HEADS + KV_HEADS + kv_head) * DIM + column, mask=is_value, other=0.0)
    if NORMS_VALUES:
        wide = value.to(tl.float32)
        wide *= tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        value = wide.to(qkv.dtype.element_ty)
    to_value = value_pages + (page_begin + kv_head) * (PAGE_TOKENS * WIDTH) + offset * DIM + column
    if KIND == _PLAIN:
        tl.store(to_value, value, mask=is_value)
    else:
        value = value.to(tl.float32)
        scale = scale_of(tl.max(tl.abs(value), 1)[:, None], tl.sum(value * 0.0, 1)[:, None], KIND)
        tl.store(to_value, encode_rows(value, scale, KIND), mask=is_value)
        word = (page_begin + kv_head) * (PAGE_TOKENS * WIDTH // 4) + PAGE_TOKENS * DIM // 4 + offset
        tl.store(floats_of(value_pages) + word, scale, mask=kv_head < num_written)


def rope_kv_write(
    qkv: Tensor,
    places: RowPlaces,
    page_table: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    num_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate the query and the key of each token; write key and value to `page_table[slot, cell // page_tokens]`.

    qkv: `[tokens, (heads + 2 * kv_heads) * dim]`. places: with rotations for all of a head's dim. page_table: int32
    `[max_slots, max_pages]`. key_pages, value_pages: `[num_pages, kv_heads, page_tokens, dim]` in qkv's dtype, or in
    codes (`kv_rows`). norms: of queries and keys, whose results are in qkv afterwards, and of values, for which that is
    not promised. Returns the rotated query `[tokens, heads, dim]` (tokens may be strided). A padding token's query is
    rotated as at position 0. Raises ValueError for another shape, dtype or device; positions, cells and page ids are
    trusted.
    """
    op, (tokens, width), device = "rope_kv_write", qkv.shape, qkv.device
    cos, sin, positions, cells, slots = places
    (num_pages, kv_heads, page_tokens), dim = key_pages.shape[:3], dim_of(key_pages)
    if width != (num_heads + 2 * kv_heads) * dim:
        raise ValueError(f"{op}: qkv is {width} wide; wanted ({num_heads} + 2 * {kv_heads}) heads of {dim}")
    check(op, "positions", positions, (tokens,), torch.int64, device)
    check(op, "cells", cells, (tokens,), torch.int64, device)
    check(op, "slots", slots, (tokens,), torch.int32, device)
    check(op, "page_table", page_table, tuple(page_table.shape), torch.int32, device)
    check_pages(op, "key_pages", key_pages, (num_pages, kv_heads, page_tokens, dim), qkv.dtype, device)
    check(op, "value_pages", value_pages, tuple(key_pages.shape), key_pages.dtype, device)
    if norms is not None:
        norms.check(op, qkv, dim)
    if not runs_on_triton(qkv) or tokens == 0:
        if norms is not None:
            head_norm(qkv, norms, num_heads, kv_heads)
        return rope_kv_write_reference(qkv, places, page_table, key_pages, value_pages, num_heads)
    check_dtype(op, qkv)
    check(op, "qkv", qkv, (tokens, width), qkv.dtype, device)
    check(op, "cos", cos, (cos.shape[0], dim // 2), torch.float32, device)
    check(op, "sin", sin, tuple(cos.shape), torch.float32, device)
    for name, tensor in (("key_pages", key_pages), ("value_pages", value_pages), ("page_table", page_table),
                         ("cos", cos), ("sin", sin)):  # fmt: skip
        check_contiguous(op, name, tensor)
    query = torch.empty(tokens, num_heads, dim, dtype=qkv.dtype, device=device)
    _rope_kv_write_kernel[(tokens,)](
        qkv, *((cos, cos, cos) if norms is None else (norms.query, norms.key, cos)), sin, positions, cells, slots,
        page_table, key_pages, value_pages, query, qkv.stride(0), page_table.stride(0),
        0.0 if norms is None else norms.eps, NORMS=norms is not None,
        NORMS_VALUES=norms is not None and norms.norms_values,
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE_TOKENS=page_tokens,
        BLOCK_ROTATED=triton.next_power_of_2(num_heads + kv_heads), BLOCK_KV=triton.next_power_of_2(kv_heads),
        BLOCK_HALF=triton.next_power_of_2(dim // 2), KIND=kind_of(key_pages),
        num_warps=8 if num_heads + kv_heads <= 32 or dim <= 256 else 16,
    )  # fmt: skip
    return query
