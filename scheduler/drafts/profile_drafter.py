"""One request's drafter where another profile drafts on the device: how long drafts may be, and how often they were
accepted.
"""

from gpu.config import DraftConfig
from gpu.step import TO_DRAFT
from scheduler.drafts.acceptance import Chances
from scheduler.sequences.sequence import Sequence

KIND = 64  # of sights, in matched tokens: all are alike, of the surest kind before anything is seen
SHARED_WEIGHT = 4.0  # of what all requests saw, in sights of a request's own
TRIED_AGAIN = 256  # looks without a draft, after which one is taken for certain: chances are known of drafts alone
_OWN_KEPT = 0.95  # of older sights, with each that comes


class ProfileDrafter:
    """Drafts for one sequence. config: of its profile. shared: chances of all sequences that are drafted so."""

    def __init__(self, config: DraftConfig, shared: Chances) -> None:
        self._most_tokens = config.most_tokens
        self._shared = shared
        self._own = Chances(_OWN_KEPT)
        self._num_looks = 0  # since the last draft

    def look(self, sequence: Sequence) -> tuple[list[int], list[float]]:
        """Return tokens to draft, and for each the chance that it and all in front of it are drawn."""
        self._num_looks += 1
        most = max(0, min(self._most_tokens, sequence.request.max_tokens - sequence.num_drawn - 1))
        chance = self._own.of(KIND, self._shared.of(KIND, 0.0, 0.0), SHARED_WEIGHT)
        if self._num_looks > TRIED_AGAIN:
            chance = 1.0
        return [TO_DRAFT] * most, [chance ** (step + 1) for step in range(most)]

    def judge(self, num_drafted: int, num_accepted: int) -> None:
        """See how many tokens of a draft were drawn."""
        self._num_looks = 0
        for step in range(min(num_accepted + 1, num_drafted)):
            for chances in (self._own, self._shared):
                chances.see(KIND, step < num_accepted)

    def forget(self) -> None:
        """Keep nothing."""
