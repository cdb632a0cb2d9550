"""Causal attention of a prompt's queries, the last tokens of a context, over that whole context: a partial.

It refuses to know pages. Several prompts may be computed at once, and none sees another's keys. Invariant:
query i of n sees keys `[0, context - n + i]`, and keys are never repeated in memory for the query heads that share
them. FlashAttention on CUDA in bf16; elsewhere the past and the queries' own tokens are two partials, merged, because
those kernels align a causal mask to the upper left.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from transfer.partial import Partial, merge

FLASH_DIM_MULTIPLE = 8


def prefill_attention_reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Plain torch, any floating dtype: see `prefill_attention`."""
    tokens, heads, _ = query.shape
    kv_heads, context, _ = key.shape
    group = heads // kv_heads
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    logits = torch.einsum("thd,hcd->htc", query, key) * scale
    last_seen = torch.arange(context - tokens, context, device=query.device)
    hidden = torch.arange(context, device=query.device)[None, :] > last_seen[:, None]
    logits = logits.masked_fill(hidden, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)  # [heads, tokens]
    out = torch.einsum("htc,hcd->thd", (logits - lse[..., None]).exp(), value)
    return Partial(out, lse.transpose(0, 1))


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """query `[tokens, heads, dim]`; key, value `[kv_heads, context, dim]` (strided), context >= tokens, rotated.

    The queries are the context's last `tokens`. out float32 `[tokens, heads, dim]`, lse float32 `[tokens, heads]`.
    """
    if has_flash(query):
        return _flash(query, key, value, scale)
    begin = key.shape[1] - query.shape[0]
    own = _two_sided(query, key[:, begin:], value[:, begin:], True, scale)
    if begin == 0:
        return own
    return merge(_two_sided(query, key[:, :begin], value[:, :begin], False, scale), own)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where prompts that are computed together begin: int32 `[prompts + 1]` each, on the device, the last the end."""

    query_begins: Tensor
    key_begins: Tensor
    most_queries: int
    most_keys: int


def packed_prefill_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float) -> Partial:
    """`prefill_attention` of each prompt, by one kernel; where `has_flash`.

    query `[tokens, heads, dim]`; key, value `[context tokens of all prompts, kv_heads, dim]`.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, packing.query_begins, packing.key_begins, packing.most_queries, packing.most_keys,
        0.0, True, False, scale=scale,
    )  # fmt: skip
    return Partial(out.float(), lse.transpose(0, 1))


def has_flash(query: Tensor) -> bool:
    """Whether FlashAttention computes for queries like this."""
    return query.is_cuda and query.dtype != torch.float32 and query.shape[-1] % FLASH_DIM_MULTIPLE == 0


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """FlashAttention 2: its causal mask is aligned to the lower right, and it groups query heads itself."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query.transpose(0, 1).unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), 0.0, True, False, scale=scale
    )
    return Partial(out[0].transpose(0, 1).float(), lse[0].transpose(0, 1))


def _two_sided(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Partial:
    """All keys (or, causal, as many keys as queries); query heads of a group are a batch over the same keys."""
    tokens, heads, dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.view(tokens, kv_heads, heads // kv_heads, dim).permute(2, 1, 0, 3)  # [group, kv_heads, tokens, dim]
    key = key.expand(heads // kv_heads, *key.shape)
    value = value.expand(heads // kv_heads, *value.shape)
    if query.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            grouped, key, value, None, True, 0.0, causal, scale=scale
        )
        lse = lse[..., :tokens]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, key, value, 0.0, causal, scale=scale
        )
    out = out.permute(2, 1, 0, 3).reshape(tokens, heads, dim)
    return Partial(out.float(), lse.permute(2, 1, 0).reshape(tokens, heads).float())
