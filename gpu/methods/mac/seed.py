"""Seed a prompt's rings with what its last queries would have left if they had been decoded.

Invariant: an entry holds the result of dense attention of its query over the cells `[sink, p + 1 - band)`, whatever
method the prompt's prefill uses.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from gpu.attention.prefill_attention import default_kernel, past_attention, windowed_attention
from gpu.attention.prefill_query import Attended, PrefillQuery
from gpu.methods.mac.match import Limits
from gpu.methods.mac.rings import LEAST_NORM, Ring


def seed(
    ring: Ring,
    number: int,
    query: PrefillQuery,
    limits: Limits,
    num_seeds: int,
    attend: Callable[[PrefillQuery], Attended],
) -> None:
    """Write the entries of a prompt's last `num_seeds` positions to ring `number`, as far as they are among the
    queries.

    A summary's last cell is `band` behind its query's cell. So all summaries together are causal attention with a
    shift: the queries are the last ones of a context `[sink, end - band)`. attend: dense attention that returns an lse.
    If shares are limited, attention to sink and band is computed too, since a query saw them beside its prefix.
    Asynchronous.
    """
    assert query.begin is not None, "mac: positions of a prompt are consecutive"
    sink, band, end = limits.sink, limits.band, query.begin + len(query.query)
    begin = max(query.begin, query.num_prompt_tokens - num_seeds, sink + band)
    if begin >= end:
        return
    own, shift = slice(begin - query.begin, None), sink + band
    summary = attend(
        replace(
            query,
            query=query.query[own],
            pre_rope_query=query.pre_rope_query[own],
            keys=query.keys[:, sink : end - band],
            values=query.values[:, sink : end - band],
            positions=query.positions[own] - shift,
            begin=begin - shift,
            num_prompt_tokens=end - shift,
        )
    )
    cells, lses = query.positions[own], summary.partial_lse.float().T
    entries = cells % ring.norms.shape[-1]
    queries = query.pre_rope_query[own].to(torch.bfloat16).transpose(0, 1)  # [heads, tokens, dim]
    norms = queries.float().square().sum(-1)
    if limits.max_log_share < inf:
        is_refused = _log_shares(query, own, end, lses, limits) > limits.max_log_share
        norms = torch.where(is_refused, -norms.clamp_min(LEAST_NORM), norms)
    norms = torch.where(lses.isfinite(), norms, torch.inf)
    for field, values in (
        (ring.queries, queries),
        (ring.norms, norms),
        (ring.outs, summary.out.transpose(0, 1)),
        (ring.lses, lses),
        (ring.origins, cells.expand(lses.shape)),
        (ring.is_estimate, torch.zeros_like(lses)),
    ):
        field[number].index_copy_(1, entries, values.to(field.dtype))


def _log_shares(query: PrefillQuery, own: slice, end: int, lses: Tensor, limits: Limits) -> Tensor:
    """Return lse(prefix) - lse(whole) of the queries `own`, `[heads, tokens]`.

    end: of the context that the last query sees. lses: of the queries' prefixes, `[heads, tokens]`.
    """
    asked, keys, values = query.query[own], query.keys[:, :end], query.values[:, :end]
    sides = [windowed_attention(asked, keys, values, limits.band, query.scale)]
    if limits.sink:
        sink = slice(0, limits.sink)
        kernel = default_kernel(asked)
        sides.append(past_attention(asked, keys[:, sink], values[:, sink], query.scale, kernel))
    whole = torch.stack([lses, *(side.partial_lse.float().T for side in sides)]).logsumexp(0)
    return lses - whole
