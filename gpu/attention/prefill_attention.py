"""Compute causal attention of a prompt's queries, the last tokens of a context, to that whole context.

Query i of n sees keys `[0, context - n + i]`. Several prompts may be packed, and none sees another's keys. Keys are not
repeated in memory for query heads that share them. On CUDA in bf16 this is one FlashAttention launch. Elsewhere the
past and the queries' own tokens are two partials, which are merged, because those kernels align a causal mask to the
upper left. The CPU's kernel computes all of a causal square, so the CPU attends with few queries at once.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.attention.flash3 import flash3_attention, packed_flash3_attention
from gpu.attention.prefill_query import Attended, joined
from gpu.operations.prefill_attention.scattered_attention import scattered_attention_kernel, serves
from transfer.partial import Partial, merge

FLASH_DIM_MULTIPLE, FLASH_MOST_DIM = 8, 256
MASKED_ENTRIES = 2**24  # most entries of a mask for scattered queries
MASK_MULTIPLE = 16
BLOCK_ROWS = 256  # queries that the CPU's kernel takes at once
WINDOW_ROWS = 512  # queries in a layer with a window that are computed at once with a mask


def prefill_attention_reference(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Compute `prefill_attention` in plain torch, in any floating dtype."""
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


Whole = Literal["flash", "flash3", "efficient"]
"""Kernels that take any past in one launch: FlashAttention 2 and 3, and efficient attention, which takes two."""


def prefill_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Whole) -> Attended:
    """Attend to a whole context with its last `tokens` queries. Queries and keys are rotated.

    query `[tokens, heads, dim]`; key, value `[kv_heads, context, dim]` (strided), context >= tokens. kernel: `flash`
    where `has_flash`, `flash3` where `has_flash3`; the CPU has one kernel, under any name. Returns out
    `[tokens, heads, dim]` in the query's dtype, or in float32 where partials are merged, and lse float32
    `[tokens, heads]`.
    """
    if query.is_cuda and kernel != "efficient":
        return (flash3_attention if kernel == "flash3" else _flash)(query, key, value, True, scale)
    if not query.is_cuda:
        return _in_blocks(query, key, value, scale)
    begin = key.shape[1] - query.shape[0]
    own = _full_or_causal(query, key[:, begin:], value[:, begin:], True, scale)
    if begin == 0:
        return own
    past = _full_or_causal(query, key[:, :begin], value[:, :begin], False, scale)
    whole = merge(past.partial(), own.partial())
    return Attended(whole.out, whole.lse)


def past_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Whole) -> Attended:
    """Attend to keys that every query sees, none of them its own; otherwise like `prefill_attention`."""
    if query.is_cuda and kernel != "efficient":
        return (flash3_attention if kernel == "flash3" else _flash)(query, key, value, False, scale)
    return _full_or_causal(query, key, value, False, scale)


def scattered_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int | None
) -> Attended:
    """Attend with queries at any ascending positions, int64 `[tokens]` on the device; otherwise like
    `prefill_attention`.

    window: as in `windowed_attention`; None: a query sees all tokens before it. Keys and values behind the last query
    may hold anything, NaN included, because those of later units are not written yet.
    """
    if serves(query):
        return Attended(*scattered_attention_kernel(query, key, value, positions, scale, window))
    if query.is_cuda:  # reading the last position would wait for the device
        behind = (torch.arange(key.shape[1], device=query.device) > positions[-1])[None, :, None]
        key, value = key.masked_fill(behind, 0.0), value.masked_fill(behind, 0.0)
    else:
        end = int(positions[-1]) + 1
        key, value = key[:, :end], value[:, :end]
    context = key.shape[1]
    most = max(1, MASKED_ENTRIES // context)
    seen = torch.arange(context, device=query.device)
    attended = []
    for begin in range(0, len(query), most):
        own = slice(begin, begin + most)
        mask = torch.zeros(len(positions[own]), context, dtype=query.dtype, device=query.device)
        last = positions[own, None]
        mask.masked_fill_((seen > last) | (seen <= last - (window or context)), float("-inf"))
        attended.append(_full_or_causal(query[own], key, value, False, scale, mask))
    return joined(attended)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where packed prompts begin in the queries and keys: int32 `[prompts + 1]` each, on the device; the last entry is
    the end.
    """

    query_begins: Tensor
    key_begins: Tensor
    most_queries: int
    most_keys: int


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Attended:
    """Attend with queries that see themselves and the tokens before them, `window` tokens in all.

    Otherwise like `prefill_attention`. Uses FlashAttention where available, else WINDOW_ROWS queries at once with a
    mask.
    """
    tokens, context = query.shape[0], key.shape[1]
    first = max(0, context - tokens - window + 1)  # the first key that any query sees
    key, value, context = key[:, first:], value[:, first:], context - first
    if has_flash(query):
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], None, None, tokens, context, 0.0, True,
            False, scale=scale, window_size_left=window - 1, window_size_right=0,
        )  # fmt: skip
        return Attended(out[0], lse[0].transpose(0, 1))
    attended = []
    for begin in range(0, tokens, WINDOW_ROWS):
        rows = query[begin : begin + WINDOW_ROWS]
        last = torch.arange(len(rows), device=query.device) + (context - tokens + begin)  # the last key each sees
        low, high = max(0, context - tokens + begin - window + 1), context - tokens + begin + len(rows)
        seen = torch.arange(low, high, device=query.device)
        mask = torch.zeros(len(rows), high - low, dtype=query.dtype, device=query.device)
        mask.masked_fill_((seen > last[:, None]) | (seen <= last[:, None] - window), float("-inf"))
        attended.append(_full_or_causal(rows, key[:, low:high], value[:, low:high], False, scale, mask))
    return joined(attended)


def packed_prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None = None,
    kernel: Whole = "flash",
) -> Attended:  # fmt: skip
    """Compute `prefill_attention`, or `windowed_attention`, of each packed prompt in one launch; where `has_flash`.

    query `[tokens, heads, dim]`; key, value `[context tokens of all prompts, kv_heads, dim]`. kernel: `flash3` is used
    without a window; otherwise FlashAttention 2 is.
    """
    if kernel == "flash3" and window is None:
        return packed_flash3_attention(
            query, key, value, packing.query_begins, packing.key_begins, packing.most_queries, packing.most_keys, scale
        )
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, packing.query_begins, packing.key_begins, packing.most_queries, packing.most_keys,
        0.0, True, False, scale=scale, window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )  # fmt: skip
    return Attended(out, lse.transpose(0, 1))


def default_kernel(query: Tensor) -> Whole:
    """Return the kernel to use where none was measured."""
    return "flash" if has_flash(query) else "efficient"


def has_flash(query: Tensor) -> bool:
    """Return whether FlashAttention takes queries like this one: on CUDA, in half precision, with a head size that it
    serves.
    """
    dim = query.shape[-1]
    is_served = dim % FLASH_DIM_MULTIPLE == 0 and dim <= FLASH_MOST_DIM
    return query.is_cuda and query.dtype != torch.float32 and is_served


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Attended:
    """Run FlashAttention 2: its causal mask is aligned to the lower right, and it groups query heads itself."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query.transpose(0, 1).unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), 0.0, causal, False, scale=scale
    )
    return Attended(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def _in_blocks(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
    """Attend on the CPU, BLOCK_ROWS queries at once: to the keys that all of them see, and causally to their own,
    merged.
    """
    attended = []
    for first in range(0, len(query), BLOCK_ROWS):
        rows, begin = query[first : first + BLOCK_ROWS], key.shape[1] - len(query) + first
        end = begin + len(rows)
        whole = _full_or_causal(rows, key[:, begin:end], value[:, begin:end], True, scale)
        if begin:
            past = _full_or_causal(rows, key[:, :begin], value[:, :begin], False, scale)
            share = torch.sigmoid(past.partial_lse - whole.partial_lse)[..., None]  # weight of the keys that all see
            out = torch.lerp(whole.out.float(), past.out.float(), share)
            whole = Attended(out, torch.logaddexp(past.partial_lse, whole.partial_lse))
        attended.append(whole)
    return joined(attended)


def _full_or_causal(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, mask: Tensor | None = None
) -> Attended:
    """Attend to all keys, or causally to as many keys as queries, or with a mask, `[tokens, context]`, that is added to
    the scores of every head. Query heads of a group are a batch over the same keys, which are not copied.
    """
    tokens, heads, dim = query.shape
    kv_heads = key.shape[0]
    if mask is not None and query.is_cuda:  # the kernel reads a mask's rows in aligned pieces
        mask = F.pad(mask, (0, -mask.shape[1] % MASK_MULTIPLE))[:, : mask.shape[1]]
        mask = mask.expand(heads // kv_heads, kv_heads, *mask.shape)
    grouped = query.view(tokens, kv_heads, heads // kv_heads, dim).permute(2, 1, 0, 3)  # [group, kv_heads, tokens, dim]
    if not (query.is_cuda or causal or mask is not None):
        return _as_one_head(grouped, key, value, scale)
    key = key.expand(heads // kv_heads, *key.shape)
    value = value.expand(heads // kv_heads, *value.shape)
    if query.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            grouped, key, value, mask, True, 0.0, causal, scale=scale
        )
        lse = lse[..., :tokens]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
    out = out.permute(2, 1, 0, 3).reshape(tokens, heads, dim)
    return Attended(out, lse.permute(2, 1, 0).reshape(tokens, heads).float())


def _as_one_head(grouped: Tensor, key: Tensor, value: Tensor, scale: float) -> Attended:
    """Attend on the CPU with the heads of a group as one head with more queries, which see the same keys.

    The matrix products are longer then.
    """
    group, kv_heads, tokens, dim = grouped.shape
    rows = grouped.transpose(0, 1).reshape(1, kv_heads, group * tokens, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, key[None], value[None], 0.0, False, scale=scale
    )
    out = out.view(kv_heads, group, tokens, dim).permute(2, 0, 1, 3).reshape(tokens, kv_heads * group, dim)
    return Attended(out, lse.view(kv_heads, group, tokens).permute(2, 0, 1).reshape(tokens, kv_heads * group).float())
