"""The rings of a prompt: what its last queries would have left, had they been decoded.

It refuses to know units and pages. Invariant: an entry holds what dense attention of its query over the cells
`[sink, p + 1 - band)` gives, whatever the prompt's own prefill does.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from gpu.methods.mac.rings import Ring
from gpu.prefill.query import Attended, PrefillQuery


def seed(
    ring: Ring,
    number: int,
    query: PrefillQuery,
    sink: int,
    band: int,
    num_seeds: int,
    attend: Callable[[PrefillQuery], Attended],
) -> None:
    """Leave entries of the prompt's last `num_seeds` positions, as far as they are among the queries, in ring `number`.

    A summary's last cell is `band` behind its query's, so all of them together are causal attention that is shifted:
    the queries are the last ones of a context `[sink, end - band)`. attend: with an lse. Asynchronous.
    """
    assert query.begin is not None, "mac: positions of a prompt are consecutive"
    end = query.begin + len(query.query)
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
    norms = torch.where(lses.isfinite(), queries.float().square().sum(-1), torch.inf)
    for field, values in (
        (ring.queries, queries),
        (ring.norms, norms),
        (ring.outs, summary.out.transpose(0, 1)),
        (ring.lses, lses),
        (ring.origins, cells.expand(lses.shape)),
        (ring.is_sampled, torch.zeros_like(lses)),
    ):
        field[number].index_copy_(1, entries, values.to(field.dtype))
