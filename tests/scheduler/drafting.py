"""Sources of drafts for tests: what they propose is the text that comes, spoilt where it is told so."""

from random import Random

import numpy as np

from gpu.config import DraftConfig
from gpu.profiles import Profile
from scheduler.drafts.draft_source import Proposal
from scheduler.engine.engine import Engine
from scheduler.sequences.sequence import Sequence

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
