"""Sources of drafts for tests: what they propose is the text that comes, spoilt where it is told so."""

from itertools import cycle
from random import Random
from typing import Any

import numpy as np
import pytest

from bench.engine_patches import switch_drafts
from gpu.config import DraftConfig
from gpu.profiles import Profile
from scheduler.drafts.draft_source import Proposal
from scheduler.engine.engine import Engine
from scheduler.messages import Delta
from scheduler.sequences.sequence import Sequence
from tests.scheduler.engines import text

DRAFTING = Profile("drafting", kv_key="exact", parts=(), draft=DraftConfig())


class Foreseen:
    """Proposes the text of one request, each token of it wrong with the chance `spoilt`."""

    def __init__(self, num_prompt_tokens: int, output: list[int], spoilt: float, draw: Random) -> None:
        self.num_observed = 0
        self.is_forgotten = False
        self._num_prompt_tokens = num_prompt_tokens
        self._output = output
        self._spoilt = spoilt
        self._draw = draw

    def observe(self, token_ids: np.ndarray) -> None:
        self.num_observed += len(token_ids)

    def propose(self, most_tokens: int) -> Proposal:
        begin = self.num_observed - self._num_prompt_tokens
        follow = self._output[begin : begin + self._draw.randint(0, most_tokens)]
        return Proposal([one ^ (self._draw.random() < self._spoilt) for one in follow], 8)

    def forget(self) -> None:
        self.is_forgotten = True


def foresee(engine: Engine, outputs: dict[str, list[int]], spoilt: float, seed: int = 0) -> list[Foreseen]:
    """Have an engine's drafts come from the texts of its requests, by name, and be taken whenever there are any."""
    made: list[Foreseen] = []

    def make(config: DraftConfig, sequence: Sequence) -> Foreseen:
        made.append(
            Foreseen(sequence.num_prompt_tokens, outputs[sequence.request_id], spoilt, Random(len(made) + seed))
        )
        return made[-1]

    engine.scheduler.drafts.make_source = make
    take_all(engine)
    return made


def take_all(engine: Engine) -> None:
    """Have every step compute as many drafted tokens as there are rows for."""
    drafts = engine.scheduler.drafts

    def choose(looks: list[tuple[list[int], list[float]]], num_fed: int, times: object) -> list[int]:
        left, lengths = drafts.most_rows - num_fed, []
        for token_ids, _ in looks:
            lengths.append(max(0, min(len(token_ids), left)))
            left -= lengths[-1]
        return lengths

    drafts.choose_lengths = choose


class SpoiltAt:
    """Proposes the text of one request with one wrong token: each number of right ones of each length in turn."""

    turns = cycle((length, right) for length in range(1, 6) for right in range(length + 1))

    def __init__(self, num_prompt_tokens: int, output: list[int]) -> None:
        self.num_observed, self._num_prompt_tokens, self._output = 0, num_prompt_tokens, output

    def observe(self, token_ids: np.ndarray) -> None:
        self.num_observed += len(token_ids)

    def propose(self, most_tokens: int) -> Proposal:
        length, right = next(self.turns)
        begin = self.num_observed - self._num_prompt_tokens
        follow = self._output[begin : begin + length]
        return Proposal([token_id + (place == right) for place, token_id in enumerate(follow)], 8)

    def forget(self) -> None:
        """Keep nothing."""


def spoil_in_turn(engine: Engine, alone: dict[str, list[Delta]]) -> None:
    """Have drafts be the texts that were told without them, spoilt at each place in turn."""
    drafts, outputs = engine.scheduler.drafts, {name: text(deltas) for name, deltas in alone.items()}
    switch_drafts(drafts, True)
    drafts.make_source = lambda config, sequence: SpoiltAt(sequence.num_prompt_tokens, outputs[sequence.request_id])
    take_all(engine)


def note_drafts(engine: Engine, patch: pytest.MonkeyPatch, profile: str = "") -> set[tuple[int, int]]:
    """Return a set that gets the length of each draft from now on and how much of it was accepted; of one profile."""
    seen, tell = set[tuple[int, int]](), engine.scheduler.drafts.tell

    def noted(lane: object, drafted: list[tuple[Any, int, int]], *rest: object) -> None:
        seen.update((length, right) for one, length, right in drafted if profile in ("", one.profile.name))
        tell(lane, drafted, *rest)  # type: ignore[arg-type]

    patch.setattr(engine.scheduler.drafts, "tell", noted)
    return seen
