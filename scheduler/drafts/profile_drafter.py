"""Keep one request's drafter for drafts that the device makes: their longest length, and how many were accepted."""

from gpu.config import DraftConfig
from gpu.step import TO_DRAFT
from scheduler.drafts.acceptance import Chances
from scheduler.sequences.sequence import Sequence

KIND = 64  # matched tokens that count for every draft: the class with the highest first chance
SHARED_WEIGHT = 4.0  # of all requests' estimate, in observations of a request's own
TRIED_AGAIN = 256  # looks without a draft until one is tried, since chances are learnt from drafts alone
_OWN_KEPT = 0.95  # factor of older observations for each new one


class ProfileDrafter:
    """Drafts for one sequence. config: of its profile. shared: the chances of all sequences with such drafts."""

    def __init__(self, config: DraftConfig, shared: Chances) -> None:
        self._most_tokens = config.most_tokens
        self._shared = shared
        self._own = Chances(_OWN_KEPT)
        self._num_looks = 0  # since the last draft

    def look(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """Return placeholders for tokens to draft, and for each the chance that it and all before it are drawn."""
        self._num_looks += 1
        most = max(0, min(self._most_tokens, sequence.request.max_tokens - sequence.num_drawn - 1))
        chance = self._own.of(KIND, self._shared.of(KIND, 0.0, 0.0), SHARED_WEIGHT)
        if self._num_looks > TRIED_AGAIN:
            chance = 1.0
        return [TO_DRAFT] * most, [chance ** (step + 1) for step in range(most)]

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """Learn how many tokens of a draft were accepted."""
        self._num_looks = 0
        for step in range(min(num_accepted + 1, num_drafted)):
            for chances in (self._own, self._shared):
                chances.see(KIND, step < num_accepted)

    def forget(self) -> None:
        """Do nothing: no memory is kept."""
