"""Keep one request's drafter: its draft source, and how often its proposals were accepted."""

from collections.abc import Callable

import numpy as np

from gpu.config import DraftConfig
from scheduler.drafts.acceptance import Acceptance, Chances
from scheduler.drafts.draft_source import NOTHING, DraftSource, Proposal
from scheduler.drafts.ngrams import NGrams
from scheduler.sequences.sequence import Sequence

MakeSource = Callable[[DraftConfig, Sequence], DraftSource]


def make_source(config: DraftConfig, sequence: Sequence) -> DraftSource:
    """Make the draft source of a sequence, as its profile configures it."""
    predicted = np.frombuffer(sequence.request.prediction, np.int32) if sequence.request.prediction else None
    return NGrams(config.least_match, sequence.prompt, predicted)


class Drafter:
    """Drafts for one sequence. config: of its profile. shared: the chances of all sequences."""

    def __init__(self, config: DraftConfig, source: DraftSource, shared: Chances) -> None:
        self._most_tokens = config.most_tokens
        self._source = source
        self._acceptance = Acceptance(shared)
        self._proposal: Proposal = NOTHING

    def look(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """Return tokens that may follow the sequence's next input token, and their chances.

        A token's chance is that it and all tokens before it are drawn; that includes the guesses for draws in flight.
        """
        num_new = sequence.num_tokens - self._source.num_observed
        if num_new:
            token_ids = sequence.tokens_from(self._source.num_observed)
            if self._proposal.token_ids:
                self._acceptance.judge(self._proposal, token_ids.tolist())
            self._source.observe(token_ids)
            self._proposal = self._source.propose(self._most_tokens + 1)
        ahead = sequence.num_in_flight
        most = ahead + min(self._most_tokens, sequence.request.max_tokens - sequence.num_drawn - 1)
        proposed = list(self._proposal.token_ids[ahead:most])
        ends = (place for place, one in enumerate(proposed) if one in sequence.request.stop_token_ids)
        num_tokens = next(ends, len(proposed))
        return proposed[:num_tokens], self._acceptance.chances(self._proposal)[ahead : ahead + num_tokens]

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: `look` judges proposals by the tokens that come."""

    def forget(self) -> None:
        """Free the memory of the source."""
        self._source.forget()
