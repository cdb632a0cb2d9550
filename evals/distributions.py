"""Compare a method's next-token distributions with full attention's: agreement, and KL(full || method) in nats.

Invariant: distributions are compared position by position after the same tokens. An engine or a server reports only its
most likely tokens; all others count as one, so that KL is a lower bound.
"""

import math
from collections.abc import Sequence

import torch

from evals.decode import decode_forced, prefill_batch
from evals.forward import ReferenceDecoder
from evals.methods.full import Full

NUM_TOP = 20
LEAST_MASS = 1e-9
"""Least mass that is assumed for the tokens that a profile did not list: logprobs carry no more digits."""


class TokenSums:
    """Sums of agreement and KL between a method's next-token distributions and full attention's, for each request.

    exact: full attention's log probabilities, a tensor `[requests, vocab]` a step. forced: int64 `[requests, steps]`,
    negative where a request has ended.
    """

    def __init__(self, exact: list[torch.Tensor], forced: torch.Tensor) -> None:
        self._exact, self._real = exact, forced >= 0
        zero = torch.zeros(len(forced), device=forced.device, dtype=torch.float64)
        self.agree, self.divergence = zero, zero.clone()

    def __call__(self, number: int, logits: torch.Tensor) -> None:
        """Add the logits of step `number`: KL(full || method), and whether the most likely tokens are the same."""
        exact, real = self._exact[number].double(), self._real[:, number]
        mine = logits.double().log_softmax(-1)
        divergence = (exact.exp() * (exact - mine)).sum(-1)
        self.agree += (exact.argmax(-1) == mine.argmax(-1)) & real
        self.divergence += divergence.where(real, 0.0)

    def means(self) -> tuple[float, float]:
        """Return agreement and KL over all tokens."""
        count = self._real.sum().item()
        return self.agree.sum().item() / count, self.divergence.sum().item() / count

    def divergences(self) -> list[float]:
        """Return each request's mean KL over its tokens."""
        return (self.divergence / self._real.sum(1)).tolist()


def full_logprobs(decoder: ReferenceDecoder, text: Sequence[int], chosen: Sequence[int], count: int) -> torch.Tensor:
    """Return full attention's log probabilities of the text's last `count` tokens and of the `chosen` tokens behind it:
    float64 `[tokens, vocab]` on the host.
    """
    batch = prefill_batch(decoder, [text[:-count]], count + len(chosen), [Full()])
    kept: list[torch.Tensor] = []
    decode_forced(
        batch, 0, [[*text[-count:], *chosen]], None, lambda _, logits: kept.append(logits[0].double().log_softmax(-1))
    )
    return torch.stack(kept).cpu()


def divergence(exact: torch.Tensor, top: dict[int, float]) -> float:
    """Return KL(full || profile) in nats over the listed tokens, with all others as one token.

    exact: full attention's log probabilities `[vocab]`. top: the profile's logprobs by token id.
    """
    listed = exact[list(top)].tolist()
    total = sum(math.exp(full) * (full - mine) for full, mine in zip(listed, top.values(), strict=True))
    full_rest = max(1 - sum(map(math.exp, listed)), 0.0)
    rest = max(1 - sum(map(math.exp, top.values())), LEAST_MASS)
    return total + (full_rest * (math.log(max(full_rest, LEAST_MASS)) - math.log(rest)) if full_rest else 0.0)
