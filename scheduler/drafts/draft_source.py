"""Draft sources: each request has one, which sees the request's tokens and proposes the next ones.

Proposed tokens are computed beside the token that is fed, and accepted only if the model draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow what a source has seen. num_matched: how much speaks for them, in tokens: for the first
    one, and one more for each behind it.
    """

    token_ids: Sequence[int]
    num_matched: int


NOTHING = Proposal((), 0)


class DraftSource(Protocol):
    """A source of one request. num_observed: tokens of prompt and output that it has seen."""

    num_observed: int

    def observe(self, token_ids: np.ndarray) -> None:
        """See further tokens of prompt or output, int32 `[tokens]`, in order."""

    def propose(self, most_tokens: int) -> Proposal:
        """Return at most so many tokens that may follow those that it has seen; maybe none."""

    def forget(self) -> None:
        """Give back what it keeps: the request is over."""
