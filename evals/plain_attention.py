"""Compute attention in plain torch over full keys and values (causal, in a window, with sinks), and rotate rows."""

import torch
from torch.nn import functional

WINDOW_QUERIES = 1024
"""Queries of a prompt that attend to their windows at once."""


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to `[requests, heads, tokens, dim]` in float32, and return it in the dtype of the rows.

    The two halves of a row are rotated against each other.
    """
    first, second = rows.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(rows.dtype)


def attend_masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return attention `[requests, heads, queries, dim]` to the keys where `mask` (bool) is set.

    sinks: `[heads]`, the logit of one more key for each head, whose value is 0. scale: of logits; None: dim ** -0.5.
    """
    if sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    key, value = functional.pad(key, (0, 0, 0, 1)), functional.pad(value, (0, 0, 0, 1))
    unseen = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(~mask, -torch.inf)
    unseen = unseen.expand(len(query), len(sinks), query.shape[2], -1)
    more = sinks.to(query.dtype).view(1, -1, 1, 1).expand(*unseen.shape[:3], 1)
    unseen = torch.cat([unseen, more], -1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=unseen, scale=scale)


def attend_causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return exact causal attention `[requests, heads, tokens, dim]`, over a window of tokens or all of them.

    KV heads are repeated, so any flash kernel can compute it. sinks, scale: see `attend_masked`.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if window is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    window, outs = window or query.shape[2], []
    for begin in range(0, query.shape[2], WINDOW_QUERIES):
        rows = torch.arange(begin, min(begin + WINDOW_QUERIES, query.shape[2]), device=query.device)
        seen = torch.arange(max(0, begin - window + 1), begin + len(rows), device=query.device)
        mask = (seen <= rows[:, None]) & (seen > rows[:, None] - window)
        keys, values = key[:, :, seen[0] : begin + len(rows)], value[:, :, seen[0] : begin + len(rows)]
        own = query[:, :, begin : begin + len(rows)]
        outs.append(attend_masked(own, keys, values, mask[None, None], sinks, scale))
    return torch.cat(outs, dim=2)


def attend_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, window: int,
    sinks: torch.Tensor | None = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return a step's attention `[requests, heads, dim]` to the last `window` of each request's `lengths` tokens.

    sinks, scale: see `attend_masked`.
    """
    group = query.shape[1] // keys.shape[1]
    places = torch.arange(keys.shape[2], device=query.device)
    mask = (places < lengths[:, None]) & (places >= lengths[:, None] - window)  # [requests, tokens]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    return attend_masked(query[:, :, None], keys, values, mask[:, None, None], sinks, scale)[:, :, 0]
