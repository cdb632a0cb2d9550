"""Choose the tokens of chunks to compute again: each policy scores every token, and those with the highest scores are
taken.

A3, eq. 3. A policy uses its arguments alone. Invariant: nothing here waits for the device. The number of tokens is
planned before (`gpu.fusion.fusion_plan`), so ids need not come to the host.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LOGIT_ENTRIES = 2**25  # float32 logits of the question that are made at once
COMPUTED = float("inf")
"""The score of tokens that are computed whatever the policy is."""
_SEAM = 1e30  # above any score of a policy; tokens nearer to the seam have a higher one


def question_scores(query: Tensor, keys: Tensor, begin: int, scale: float) -> Tensor:
    """Return the attention (A3, eq. 3) that each token gets, summed over question tokens and query heads; float32
    `[context]`.

    query: `[question, heads, dim]`, rotated, of consecutive tokens from position `begin` on, which attend causally.
    keys: `[kv_heads, context, dim]`; those behind the question are not used.
    """
    (count, heads, dim), (kv_heads, context, _) = query.shape, keys.shape
    total = torch.zeros(context, dtype=torch.float32, device=keys.device)
    most = max(1, LOGIT_ENTRIES // (heads * context))
    nothing = keys.new_empty(1, 1, 1)
    for first in range(0, count, most):
        rows = query[first : first + most]
        seen = begin + first + len(rows)
        grouped = rows.view(-1, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        logits = torch.baddbmm(nothing, grouped, keys[:, :seen].transpose(1, 2), beta=0, alpha=scale)
        logits = logits.view(heads, len(rows), seen)
        later = torch.ones(len(rows), len(rows), dtype=torch.bool, device=keys.device).triu_(1)
        logits[..., seen - len(rows) :].masked_fill_(later, -torch.inf)
        total[:seen] += logits.softmax(-1, dtype=torch.float32).sum((0, 1))
    return total


def draw_scores(token_ids: np.ndarray) -> np.ndarray:
    """Return the scores of the policy `random`, float32 `[tokens]` in [0, 1), always the same for the same tokens."""
    generator = np.random.default_rng(zlib.crc32(np.ascontiguousarray(token_ids, "<i4").tobytes()))
    return generator.random(len(token_ids), dtype=np.float32)


def floors(num_tokens: int, spans: Sequence[tuple[int, int]], seam_tokens: int) -> np.ndarray:
    """Return the least score of each token, float32 `[num_tokens]`: COMPUTED outside of `spans`; for the first
    `seam_tokens` of a span above any policy's score, and falling; else -inf.
    """
    least = np.full(num_tokens, COMPUTED, np.float32)
    for begin, end in spans:
        least[begin:end] = -np.inf
        seam = min(seam_tokens, end - begin)
        least[begin : begin + seam] = _SEAM / (1 + np.arange(seam))
    return least


def choose(scores: Tensor, least: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` tokens with the highest scores, ascending, int64. Arguments: float32
    `[tokens]`.
    """
    return torch.maximum(scores, least).topk(count, sorted=False).indices.sort().values
