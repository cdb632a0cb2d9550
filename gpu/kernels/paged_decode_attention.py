"""Attention of one query token per request over its paged context: a partial (out, natural-log lse).

It refuses to know which tokens are resident: it covers `[0, context_len)` of the slot's page table. Invariant: rows
beyond a context, and pages that it does not own, are never read into the result; an empty context gives (0, -inf).
Bytes moved: 2 * itemsize * kv_heads * dim * sum(context_lens), each key and value once for its whole query group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.partial import Partial


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch of the split kernel: out float32 `[max_requests, splits, heads, dim]`, lse `[max_requests, splits, heads]`.

    `num_splits` bounds the splits of one launch. On CPU both are empty.
    """

    out: Tensor
    lse: Tensor
    num_splits: int


def workspace_for(
    max_requests: int, num_heads: int, num_kv_heads: int, dim: int, max_context_tokens: int, device: torch.device | str
) -> Workspace:
    """Allocate once, for every launch of up to `max_requests` requests of up to `max_context_tokens` each."""
    splits = 0 if torch.device(device).type == "cpu" else 1
    return Workspace(
        torch.empty(max_requests, splits, num_heads, dim, dtype=torch.float32, device=device),
        torch.empty(max_requests, splits, num_heads, dtype=torch.float32, device=device),
        splits,
    )


def paged_decode_attention_reference(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Partial:
    """Plain torch, one request at a time; see `paged_decode_attention`. In float64 the partial is float64 too."""
    requests, heads, dim = query.shape
    kv_heads, page_tokens = key_pages.shape[1:3]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.zeros(requests, heads, dim, dtype=wide, device=query.device)
    lse = torch.full((requests, heads), float("-inf"), dtype=wide, device=query.device)
    head_ids = torch.arange(kv_heads, device=query.device)[:, None]
    keys = key_pages.view(-1, page_tokens, dim)
    values = value_pages.view(-1, page_tokens, dim)
    for row, (slot, context) in enumerate(zip(slots.tolist(), context_lens.tolist(), strict=True)):
        if slot < 0 or context == 0:
            continue
        pages = page_table[slot, : -(-context // page_tokens)]
        index = (pages * kv_heads + head_ids).view(-1)  # [kv_heads * pages]
        key = keys.index_select(0, index).view(kv_heads, -1, dim)[:, :context].to(wide)
        value = values.index_select(0, index).view(kv_heads, -1, dim)[:, :context].to(wide)
        grouped = (query[row].to(wide) * scale).view(kv_heads, -1, dim)
        logits = grouped @ key.transpose(1, 2)  # [kv_heads, group, context]
        mass = torch.logsumexp(logits, -1, keepdim=True)
        out[row] = ((logits - mass).exp_() @ value).view(heads, dim)
        lse[row] = mass.view(heads)
    return Partial(out, lse)


def paged_decode_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    scale: float,
    workspace: Workspace,
) -> Partial:
    """Softmax attention of each request's query over tokens `[0, context_lens[i])` of slot `slots[i]`.

    query: `[requests, heads, dim]`, after RoPE; key_pages, value_pages: `[num_pages, kv_heads, page_tokens, dim]`, the
    query's dtype; page_table: int32 `[max_slots, max_pages]`; slots, context_lens: int32 `[requests]`; slot -1 or
    context 0 is padding and gives an empty partial. Returns out float32 `[requests, heads, dim]`, lse float32
    `[requests, heads]`, natural log.
    """
    return paged_decode_attention_reference(
        query, key_pages, value_pages, page_table, slots, context_lens, scale
    )  # fmt: skip
