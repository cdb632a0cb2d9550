"""Make the rows of latent attention: norm a token's latent, rotate its rotated part, and write both to its page.

A row is `[latent | rotated]`, `rank + rotated` numbers, one per token and layer. The rotated part of queries is rotated
in the same pass. A token with slot -1 is padding: it writes nothing to pages, and its position and cell are not used.
Bytes moved per token: the row twice, and the rotated parts of queries twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Latent
from gpu.operations.arguments import check, check_contiguous, check_dtype, runs_on_triton
from gpu.operations.kv.kv_rows import PLAIN, encode_rows, floats_of, kind_of, scale_of
from gpu.operations.kv.latent_rows import check_latent_pages, put_latents
from gpu.operations.kv.row_places import RowPlaces
from gpu.operations.rms_norm import rms_norm

_PLAIN = tl.constexpr(PLAIN)
LATENT_EPS = 1e-6  # of the norms of latents, whatever eps a model's other norms have


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, has_neighbour_pairs: bool) -> Tensor:
    """Rotate `[tokens, heads, rotated]` by cos and sin `[tokens, rotated / 2]`, in the wider dtype.

    The result has pairs in two halves, whatever order the input had.
    """
    first, second = (x[..., ::2], x[..., 1::2]) if has_neighbour_pairs else x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def latent_write_reference(
    query: Tensor, row: Tensor, norm: Tensor, places: RowPlaces, page_table: Tensor, pages: Tensor, latent: Latent
) -> None:
    """Compute `latent_write` in plain torch, on the CPU."""
    cos, sin, positions, cells, slots = places
    valid = slots >= 0
    where = torch.where(valid, positions, 0)
    cosine, sine = cos[where], sin[where]
    turned = query[..., latent.plain :]
    turned.copy_(rotate_reference(turned, cosine, sine, latent.has_neighbour_pairs))
    normed = rms_norm(row[:, : latent.rank].contiguous(), norm, LATENT_EPS)
    key = rotate_reference(row[:, None, latent.rank :], cosine, sine, latent.has_neighbour_pairs)[:, 0]
    made, page_tokens = torch.cat([normed, key], 1)[valid], pages.shape[2]
    at = cells[valid]
    page_ids = page_table[slots[valid].long(), at // page_tokens].long()
    put_latents(made, page_ids, at % page_tokens, pages, latent.rank)


@triton.jit
def _latent_write_kernel(
    query, row, norm, cos, sin, positions, cells, slots, page_table, pages, row_stride, max_pages, eps,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROTATED: tl.constexpr, PLAIN: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    NEIGHBOURS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    HALF: tl.constexpr = ROTATED // 2
    pair = tl.arange(0, HALF)
    position = tl.where(slot >= 0, tl.load(positions + token), 0)
    cosine, sine = tl.load(cos + position * HALF + pair), tl.load(sin + position * HALF + pair)
    is_query = head < HEADS
    source = query + (token * HEADS + head) * (PLAIN + ROTATED) + PLAIN
    if not is_query:
        source = row + token * row_stride + RANK
    first_at = 2 * pair if NEIGHBOURS else pair
    second_at = first_at + 1 if NEIGHBOURS else pair + HALF
    first, second = tl.load(source + first_at).to(tl.float32), tl.load(source + second_at).to(tl.float32)
    turned, other = first * cosine - second * sine, second * cosine + first * sine
    if is_query:  # one warp, which loads everything before it stores
        tl.store(source + pair, turned.to(query.dtype.element_ty))
        tl.store(source + HALF + pair, other.to(query.dtype.element_ty))
    elif slot >= 0:
        cell = tl.load(cells + token)
        page = tl.load(page_table + slot.to(tl.int64) * max_pages + cell // PAGE_TOKENS).to(tl.int64)
        ROW: tl.constexpr = RANK + ROTATED
        offset = cell % PAGE_TOKENS
        column = tl.arange(0, RANK)
        values = tl.load(row + token * row_stride + column).to(tl.float32)
        gain = tl.load(norm + column)
        values *= tl.rsqrt(tl.sum(values * values, 0) / RANK + eps)
        if norm.dtype.element_ty == row.dtype.element_ty:
            values = values.to(row.dtype.element_ty).to(tl.float32)
        made = (values * gain.to(tl.float32)).to(row.dtype.element_ty)
        one, two = turned.to(row.dtype.element_ty), other.to(row.dtype.element_ty)
        if KIND == _PLAIN:
            to = pages + (page * PAGE_TOKENS + offset) * ROW
            tl.store(to + column, made)
            tl.store(to + RANK + pair, one)
            tl.store(to + RANK + HALF + pair, two)
        else:
            to = pages + page * (PAGE_TOKENS * (ROW + 8)) + offset * ROW
            word = floats_of(pages) + page * (PAGE_TOKENS * (ROW + 8) // 4) + PAGE_TOKENS * ROW // 4 + 2 * offset
            latents, keys, more = made.to(tl.float32), one.to(tl.float32), two.to(tl.float32)
            scale = scale_of(tl.max(tl.abs(latents), 0), tl.sum(latents * 0.0, 0), KIND)
            tl.store(to + column, encode_rows(latents, scale, KIND))
            tl.store(word, scale)
            largest = tl.maximum(tl.max(tl.abs(keys), 0), tl.max(tl.abs(more), 0))
            of_keys = scale_of(largest, tl.sum(keys * 0.0 + more * 0.0, 0), KIND)
            tl.store(to + RANK + pair, encode_rows(keys, of_keys, KIND))
            tl.store(to + RANK + HALF + pair, encode_rows(more, of_keys, KIND))
            tl.store(word + 1, of_keys)


def latent_write(
    query: Tensor, row: Tensor, norm: Tensor, places: RowPlaces, page_table: Tensor, pages: Tensor, latent: Latent
) -> None:
    """Rotate queries in place, and write the tokens' latent rows to their pages.

    query: `[tokens, heads, plain + rotated]`, contiguous. row: `[tokens, rank + rotated]`, rows strided, before norm
    and rotation. norm: `[rank]`. page_table: int32 `[max_slots, max_pages]`. pages: `[num_pages, 1, page_tokens, rank +
    rotated]` in the query's dtype, or in codes (`latent_rows`). On a GPU rank and rotated are powers of two. Raises
    ValueError for another shape, dtype or device; positions, cells and page ids are trusted.
    """
    op, (tokens, heads, _), device = "latent_write", query.shape, query.device
    cos, sin, positions, cells, slots = places
    check(op, "query", query, (tokens, heads, latent.query_dim), query.dtype, device)
    check(op, "row", row, (tokens, latent.row), query.dtype, device)
    check(op, "norm", norm, (latent.rank,), norm.dtype, device)
    check(op, "cos", cos, (len(cos), latent.rotated // 2), torch.float32, device)
    check(op, "sin", sin, tuple(cos.shape), torch.float32, device)
    for name, tensor, dtype in (("positions", positions, torch.int64), ("cells", cells, torch.int64),
                                ("slots", slots, torch.int32)):  # fmt: skip
        check(op, name, tensor, (tokens,), dtype, device)
    check(op, "page_table", page_table, tuple(page_table.shape), torch.int32, device)
    check_latent_pages(op, pages, latent.row, query.dtype, device)
    if not runs_on_triton(query) or tokens == 0:
        latent_write_reference(query, row, norm, places, page_table, pages, latent)
        return
    check_dtype(op, query)
    for name, tensor in (("query", query), ("page_table", page_table), ("pages", pages), ("cos", cos), ("sin", sin)):
        check_contiguous(op, name, tensor)
    _latent_write_kernel[(tokens, heads + 1)](
        query, row, norm, *places, page_table, pages, row.stride(0), page_table.stride(0), LATENT_EPS,
        HEADS=heads, RANK=latent.rank, ROTATED=latent.rotated, PLAIN=latent.plain, PAGE_TOKENS=pages.shape[2],
        NEIGHBOURS=latent.has_neighbour_pairs, KIND=kind_of(pages), num_warps=1,
    )  # fmt: skip
