"""Compute decode attention over paged rows in plain torch: as the reference, and on the CPU in dtypes other than
float32.

Cells that no head reads are not loaded, so a skipped range may hold anything, or have no pages.
"""

import torch
from torch import Tensor

from gpu.operations.kv.kv_rows import codes_of, has_codes, read_cells, read_codes, scales_of
from transfer.partial import Partial

# A context with keys and values of up to so many bytes is batched with others like it. Measured in
# float32, 64 requests: of 100 tokens 1.1 ms in a batch, 3.8 ms one by one; of 300 the same; of 1024 3x slower.
BATCHED_BYTES = 256 * 1024


def attend_whole(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Partial:
    """Return the partial over `[0, context_lens)`; in float64 it is float64 too. See `paged_decode_attention`.

    Short contexts go through torch's flash attention in one padded batch, long ones one by one.
    """
    requests, _, dim = query.shape
    lens = torch.where(slots >= 0, context_lens, 0).tolist()
    token_bytes = 2 * key_pages.shape[1] * dim * key_pages.element_size()
    short = [row for row, context in enumerate(lens) if 0 < context * token_bytes <= BATCHED_BYTES]
    pages = (key_pages, value_pages, page_table)
    wide = _wide(query)
    if len(short) == requests or (requests == 1 and lens[0] > 0):
        out, lse = _attend(query, *pages, slots, lens, scale)
        return Partial(out.to(wide), lse.to(wide))
    partial = _empty(query)
    if short:
        out_short, lse_short = _attend(query[short], *pages, slots[short], [lens[row] for row in short], scale)
        partial.out[short], partial.lse[short] = out_short.to(wide), lse_short.to(wide)
    for row, context in enumerate(lens):
        if context * token_bytes > BATCHED_BYTES:
            one = slice(row, row + 1)
            partial.out[one], partial.lse[one] = _attend(query[one], *pages, slots[one], [context], scale)
    return partial


def attend_cells(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    wanted: Tensor,
    scale: float,
) -> tuple[Partial, Tensor]:
    """Return the partial over the `wanted` cells, bool `[requests, heads, cells]`, with counts; and the logits.

    The logits are `[requests, heads, cells]` in the partial's dtype, -inf where a head reads nothing.
    """
    (kv_heads, page_tokens), partial, wide = key_pages.shape[1:3], _empty(query), _wide(query)
    partial = Partial(partial.out, partial.lse, wanted.sum(-1, dtype=torch.int32))
    logits = torch.full(wanted.shape, float("-inf"), dtype=wide)
    group = query.shape[1] // kv_heads
    for row, slot in enumerate(slots.tolist()):
        for kv_head in range(kv_heads) if slot >= 0 else ():
            heads = slice(kv_head * group, (kv_head + 1) * group)
            cells = wanted[row, heads].any(0).nonzero()[:, 0]
            pages, offsets = page_table[slot, cells // page_tokens].long(), cells % page_tokens
            keys, values = (read_cells(of, pages, kv_head, offsets, wide) for of in (key_pages, value_pages))
            scores = (query[row, heads].to(wide) @ keys.T) * scale  # [group, cells]
            scores.masked_fill_(~wanted[row, heads][:, cells], float("-inf"))
            logits[row, heads.start : heads.stop, cells] = scores
            lse = partial.lse[row, heads] = scores.logsumexp(-1)
            partial.out[row, heads] = (scores - lse.clamp_min(torch.finfo(wide).min)[:, None]).exp() @ values
    return partial, logits


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _empty(query: Tensor) -> Partial:
    wide = _wide(query)
    return Partial(torch.zeros(query.shape, dtype=wide), torch.full(query.shape[:2], float("-inf"), dtype=wide))


def _attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    contexts: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of requests with contexts of at least one token, padded to the longest."""
    query = query.to(_wide(query)) if has_codes(key_pages) else query  # do not round what codes stand for
    requests, heads, dim = query.shape
    kv_heads, page_tokens = key_pages.shape[1:3]
    longest = max(contexts)
    num_pages = -(-longest // page_tokens)
    owned = page_table[slots, :num_pages] if requests > 1 else page_table[slots[0], :num_pages].unsqueeze(0)
    mask = None
    if min(contexts) < longest:
        lens = torch.tensor(contexts).unsqueeze(1)
        owned = torch.where(torch.arange(num_pages) * page_tokens < lens, owned, owned[:, :1])
        mask = torch.zeros(requests, 1, 1, longest, dtype=query.dtype)
        mask.masked_fill_((torch.arange(longest) >= lens)[:, None, None], float("-inf"))
    rows = (owned.unsqueeze(1) * kv_heads + torch.arange(kv_heads).unsqueeze(1)).view(-1)
    keys, values = (
        _whole_pages(pages, rows, query.dtype).view(requests, kv_heads, -1, dim)[:, :, :longest]
        for pages in (key_pages, value_pages)
    )
    if mask is not None:  # what a masked row holds must be finite: 0 * NaN is NaN
        for row, context in enumerate(contexts):
            keys[row, :, context:].zero_()
            values[row, :, context:].zero_()
    grouped = query.reshape(requests, kv_heads, heads // kv_heads, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return out.reshape(requests, heads, dim), lse.reshape(requests, heads)


def _whole_pages(pages: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return pages of single KV heads, `[rows, page_tokens, dim]`. rows: page * kv_heads + kv_head."""
    by_head = pages.flatten(0, 1)
    own = by_head.index_select(0, rows)
    return read_codes(codes_of(own), scales_of(own), dtype) if has_codes(pages) else own.to(dtype)
