"""Record the history that a prompt leaves: what its last queries would have attended to if they had been decoded.

Invariant: a row is computed by exact attention, whatever method the prompt's prefill uses.
"""

import torch
from torch import Tensor

from gpu.attention.prefill_query import PrefillQuery
from gpu.methods.predicted import PROMPT_ROWS
from gpu.predictor.history import compress, prompt_maxima
from transfer.tier_shape import BLOCK_TOKENS


def note_prompt(history: Tensor, ring: int, query: PrefillQuery, first_block: int, steps: int) -> None:
    """Write the last `steps` rows of one layer's history, `[places, rows, blocks]`; asynchronous.

    Writes only the rows whose positions are among the queries.
    """
    assert query.begin is not None, "predicted: positions of a prompt are consecutive"
    rows, kv_heads = history.shape[1], len(query.keys)
    end = query.begin + len(query.query)
    begin = max(query.begin, query.num_prompt_tokens - steps)
    if begin >= end:
        return
    own = query.query[begin - query.begin :].unflatten(1, (kv_heads, -1)).float()
    for kv_head in range(kv_heads):
        keys, heads = query.keys[kv_head, :end].float()[None], own[:, kv_head].transpose(0, 1)  # [group, tokens, dim]
        for at in range(begin, end, PROMPT_ROWS):
            to = min(at + PROMPT_ROWS, end)
            attended = prompt_maxima(heads[:, at - begin : to - begin], keys, to, BLOCK_TOKENS).amax(0)
            codes = compress(attended[:, first_block:], history.dtype)
            place = torch.arange(at, to, device=history.device) % rows
            history[ring * kv_heads + kv_head, place, : codes.shape[1]] = codes
