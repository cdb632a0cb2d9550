"""Compute log-probabilities of given tokens and of the most likely alternatives, from raw logits, without a sync.

These are the model's own probabilities, before temperature, penalties and bias. Alternatives come best first; of equal
logits, which are common in bf16, the lower token id comes first, as argmax has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu.sampling.sampling_arrays import LOGPROB_LOGITS
from gpu.step import TokenLogprob


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of tokens and of alternatives. `token` float32 `[rows]`; `top_ids` int64 and `top` float32
    `[rows, num_top]`, on the device of the logits.
    """

    token: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    def copy_to_host(self) -> "Logprobs":
        """Start copies into pinned memory (on CUDA) on the current stream; read them after a sync."""
        return Logprobs(to_pinned(self.token), to_pinned(self.top_ids), to_pinned(self.top))

    def to_list(self) -> list[TokenLogprob]:
        """Return one TokenLogprob a row. Waits for the device unless this is a copy on the host."""
        rows = zip(self.token.tolist(), self.top_ids.tolist(), self.top.tolist(), strict=True)
        return [TokenLogprob(token, tuple(zip(ids, values, strict=True))) for token, ids, values in rows]


def join_logprobs(pieces: Sequence[Logprobs]) -> Logprobs:
    """Return the rows of all pieces, in order."""
    if not pieces:
        none = torch.empty((0, 0), dtype=torch.float32)
        return Logprobs(none.flatten(), none.long(), none)
    return Logprobs(
        torch.cat([piece.token for piece in pieces]),
        torch.cat([piece.top_ids for piece in pieces]),
        torch.cat([piece.top for piece in pieces]),
    )


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned host memory on the current stream and return it; a tensor on the host is returned as it
    is.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def gather_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """Return logprobs of `token_ids` int64 `[rows]` under `logits` (bf16 or float32 `[rows, vocab]`), with `num_top`
    alternatives.

    Computed in float32. `num_top` beyond the vocabulary is cut to it. No sync.
    """
    rows, vocab = logits.shape
    chunk = max(1, LOGPROB_LOGITS // vocab)
    parts = [
        _gather(logits[begin : begin + chunk].float(), token_ids[begin : begin + chunk], min(num_top, vocab))
        for begin in range(0, max(rows, 1), chunk)
    ]
    return Logprobs(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def _gather(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    total = logits.logsumexp(1)
    token = logits.gather(1, token_ids[:, None])[:, 0] - total
    if num_top == 0:
        empty = logits.new_empty((len(logits), 0))
        return token, empty.long(), empty
    top_ids = (rank_keys(logits).topk(num_top, 1).values & 0xFFFFFFFF).neg_().add_(0xFFFFFFFF)
    return token, top_ids, logits.gather(1, top_ids) - total[:, None]


def rank_keys(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 `[rows, vocab]`, all different, that sort by logit and then by lower id. logits: float32, no NaN.

    The upper half is the float's bits made monotone, the lower half counts ids down from 2**32 - 1.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered.long() << 32) + (0xFFFFFFFF - ids)
