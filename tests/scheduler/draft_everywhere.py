"""A pytest plugin: every sequence of an engine drafts, whatever a test is about.

`python -m pytest -p tests.scheduler.draft_everywhere tests/scheduler/test_rings.py`. A draft is the text that would
come over pages of tokens, of any length up to four, and one token in five of it is another; real models refuse most of
it. A last line tells how many tokens were drafted and drawn.
"""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from gpu.config import DraftConfig
from gpu.profiles import Profile
from scheduler.drafts.draft_source import Proposal
from scheduler.sequences.sequence import Sequence
from scheduler.steps.drafts import Drafts
from scheduler.steps.scheduler import Scheduler
from tests.scheduler.page_runner import draw_token

MOST_TOKENS, SPOILT = 4, 0.2
COUNTS: Counter[str] = Counter()


class Oracle:
    """Proposes what the runner would draw next, without masks."""

    def __init__(self, sequence: Sequence, draw: Random) -> None:
        self.num_observed = 0
        self._sequence = sequence
        self._draw = draw

    def observe(self, token_ids: np.ndarray) -> None:
        self.num_observed += len(token_ids)

    def propose(self, most_tokens: int) -> Proposal:
        tokens, name = self._sequence.tokens_from(0).tolist(), self._sequence.profile.name
        drafted: list[int] = []
        for _ in range(self._draw.randint(0, most_tokens)):
            drafted.append(draw_token(tokens + drafted, name, []))
        return Proposal([one ^ (self._draw.random() < SPOILT) for one in drafted], 8)

    def forget(self) -> None:
        """Keep nothing."""


def drafting(profile: Profile) -> Profile:
    """Return the profile with drafts, where its steps look at no ring."""
    return profile if profile.held_parts else replace(profile, draft=DraftConfig(most_tokens=MOST_TOKENS))


def pytest_configure() -> None:
    """Have each scheduler's profiles draft, and its steps take as much of drafts as there are rows for."""
    made, kept, tell = Scheduler.__init__, Drafts.__init__, Drafts.tell

    def make_scheduler(self: Scheduler, *given: Any, **more: Any) -> None:
        profiles = {name: drafting(one) for name, one in given[4].items()}
        made(self, *given[:4], profiles, *given[5:], **more)

    def make_drafts(self: Drafts, *given: Any) -> None:
        kept(self, *given)
        self.make_source = lambda config, sequence: Oracle(sequence, Random(sequence.request_id))

        def take_all(looks: list[tuple[list[int], list[float]]], num_fed: int, times: object) -> list[int]:
            left, lengths = self.most_rows - num_fed, []
            for token_ids, _ in looks:
                lengths.append(max(0, min(len(token_ids), left)))
                left -= lengths[-1]
            return lengths

        self.choose_lengths = take_all

    def count(self: Drafts, lane: Any, drafted: list[tuple[Sequence, int, int]], *rest: Any) -> None:
        COUNTS.update(drafted=sum(one[1] for one in drafted), drawn=sum(one[2] for one in drafted))
        tell(self, lane, drafted, *rest)

    Drafts.tell = count  # type: ignore[method-assign]
    Scheduler.__init__ = make_scheduler  # type: ignore[method-assign, assignment]
    Drafts.__init__ = make_drafts  # type: ignore[method-assign, assignment]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"drafted {COUNTS['drafted']} tokens, drawn {COUNTS['drawn']}")
