"""Measure how often one side chooses the other's tokens, after the same tokens before each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.benchmark_rows import require

# In float32 only near-ties differ. In bf16 the two best logits of random weights are often closer than its rounding. An
# 8B model differs at every tenth token or so. A deep mixture of experts differs at two of three (30 layers of Gemma 4,
# vocabulary of 262,144), because its router turns a rounding into other experts. So bf16 is judged by how much the peer
# prefers its own choice. For the peer a wrong step's tokens are like any other: 3.7 deviations behind, or more.
_LEAST_SHARE = 0.99
_MOST_BEHIND = 0.5


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well tokens agree. share: the share of tokens that the peer chooses too. behind: how far, on average, the
    peer's logit of a token is below its best one, in standard deviations of its logits.
    """

    share: float
    behind: float


def agree(logits: Tensor, tokens: Tensor) -> Agreement:
    """Return how logits `[..., vocabulary]` agree with the tokens `[...]` that the other side chose there."""
    logits = logits.float()
    theirs = logits.gather(-1, tokens[..., None]).squeeze(-1)
    best, deviation = logits.amax(-1), logits.std(-1)
    return Agreement(
        float((logits.argmax(-1) == tokens).double().mean()), float(((best - theirs) / deviation).double().mean())
    )


def require_agreement(agreement: Agreement, dtype: torch.dtype) -> None:
    """Raise GateError if the tokens agree less than those of a correct step would."""
    said = f"the peer chooses {agreement.share:.2%} of our {dtype} tokens, and ours are {agreement.behind:.2f} behind"
    if dtype == torch.float32:
        require(agreement.share >= _LEAST_SHARE, f"{said}; wanted {_LEAST_SHARE:.0%} or more")
    require(agreement.behind <= _MOST_BEHIND, f"{said}; wanted {_MOST_BEHIND} deviations of its logits or less")
