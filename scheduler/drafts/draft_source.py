"""Draft sources: each request has one, which sees the request's tokens and proposes the next ones.

Proposed tokens are computed in the same step as the input token, and accepted only if the model draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow those that a source has seen. num_matched: the evidence for the first one, as a number of
    matched tokens; each later one has one more.
    """

    token_ids: Sequence[int]
    num_matched: int


NOTHING = Proposal((), 0)


class DraftSource(Protocol):
    """The source of one request. num_observed: tokens of prompt and output that it has seen."""

    num_observed: int

    def observe(self, token_ids: np.ndarray) -> None:
        """Take in further tokens of prompt or output, int32 `[tokens]`, in order."""

    def propose(self, most_tokens: int) -> Proposal:
        """Propose at most `most_tokens` next tokens; maybe none."""

    def forget(self) -> None:
        """Free the memory of the source, since the request is over."""
