"""Estimate how often drafted tokens are accepted, by the number of matched tokens, and for each request.

A proposal that was not computed is judged as well, once the tokens that it guessed have been drawn. So acceptance is
known before the first draft, and while drafts do not pay. Older observations decay.
"""

from bisect import bisect_right
from collections.abc import Sequence

from scheduler.drafts.draft_source import Proposal

_BORDERS = (4, 6, 8, 12, 16, 24, 40)  # of matched tokens, between classes
_FIRST_CHANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85)  # assumed before anything is observed
_FIRST_WEIGHT = 8.0  # of these, in observations
_SHARED_KEPT, _OWN_KEPT = 0.98, 0.9  # factor of older observations for each new one
_SHARED_WEIGHT = 2.0  # of all requests' estimate, in observations of a request's own


class Chances:
    """Observed tokens by class of matched tokens: how many, and how many of them were drawn; both decay."""

    def __init__(self, kept: float, drawn: Sequence[float] = (), seen: float = 0.0) -> None:
        self._kept = kept
        self._seen = [seen] * len(_FIRST_CHANCES)
        self._drawn = list(drawn) or [0.0] * len(_FIRST_CHANCES)

    def see(self, num_matched: int, is_drawn: bool) -> None:
        one = bisect_right(_BORDERS, num_matched)
        self._seen[one] = self._kept * self._seen[one] + 1.0
        self._drawn[one] = self._kept * self._drawn[one] + is_drawn

    def of(self, num_matched: int, prior: float, weight: float) -> float:
        """Return the chance of a token with so many matched tokens. `prior` counts as `weight` observations."""
        one = bisect_right(_BORDERS, num_matched)
        total = self._seen[one] + weight
        return (self._drawn[one] + weight * prior) / total if total else prior


def shared_chances() -> Chances:
    """Make the chances that all requests share, before anything is observed."""
    return Chances(_SHARED_KEPT, [_FIRST_WEIGHT * chance for chance in _FIRST_CHANCES], _FIRST_WEIGHT)


class Acceptance:
    """What is known about one request's proposals. shared: the chances of all requests, which learn from it as well."""

    def __init__(self, shared: Chances) -> None:
        self._shared = shared
        self._own = Chances(_OWN_KEPT)

    def judge(self, proposal: Proposal, token_ids: Sequence[int]) -> None:
        """Compare a proposal with the tokens that were drawn, up to the first difference."""
        for step, (proposed, token_id) in enumerate(zip(proposal.token_ids, token_ids, strict=False)):
            is_drawn = proposed == token_id
            for chances in (self._own, self._shared):
                chances.see(proposal.num_matched + step, is_drawn)
            if not is_drawn:
                return

    def chances(self, proposal: Proposal) -> list[float]:
        """Return for each proposed token the chance that it and all tokens before it are drawn."""
        chances, before = [], 1.0
        for num_matched in range(proposal.num_matched, proposal.num_matched + len(proposal.token_ids)):
            before *= self._own.of(num_matched, self._shared.of(num_matched, 0.0, 0.0), _SHARED_WEIGHT)
            chances.append(before)
        return chances
