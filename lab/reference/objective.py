"""Define the loss of a step, the learning rate, and the counts of a run.

The invariant: text, answers and hints have the same weight whatever their share of the batch, so that a long document's
text does not outweigh its few answers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.reference.conversation_rows import ANSWER, FILLER, HINTS, LISTED, PLAIN_TEXT
from lab.reference.curriculum import LENGTHS
from lab.reference.evaluation import Target, exact
from lab.reference.tasks import TASKS

LISTED_WEIGHT = 0.02
HINT_WEIGHTS = (2.0, 1.0, 0.3, 0.5, 0.5)
"""Weights of hints by subject: an answer has a few hints, a list some dozens."""
WARM_UP_STEPS = 60


def lr_at(progress: float, step: int, decay: float, final: float) -> float:
    """Return the learning rate as a share of its top: warm-up steps, a level stretch, a straight fall in `decay`."""
    fall = max(0.0, (progress - (1 - decay)) / decay) if decay else 0.0
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (1 - (1 - final) * min(1.0, fall))


def weigh(target: Target, answer_weight: float, filler_weight: float) -> Tensor:
    """Return the loss weight of each predicted token, float32.

    The weights of text average to one, those of answers to `answer_weight`. A long answer counts as the square root of
    its length.
    """
    classes = target.classes
    table = torch.zeros(8, device=classes.device)
    table[PLAIN_TEXT], table[FILLER], table[LISTED] = 1.0, filler_weight, LISTED_WEIGHT
    text = table[classes]
    _, begin, end = target.spans.unbind(1)
    value = (end - begin).double().rsqrt()
    steps = torch.zeros(len(classes) + 1, dtype=torch.float64, device=classes.device)
    steps.index_add_(0, begin, value)
    steps.index_add_(0, end, -value)
    answers = steps.cumsum(0)[:-1].float() * (classes == ANSWER)
    return text / text.sum().clamp(min=1) + answer_weight * answers / answers.sum().clamp(min=1)


def weigh_hints(hints: Tensor) -> Tensor:
    """Return the loss weights of hints `[hints, 3]`, float32, which sum to one. Unused ones weigh nothing."""
    table = torch.zeros(len(HINT_WEIGHTS) + 1, device=hints.device)
    for about, weight in enumerate(HINT_WEIGHTS):
        table[about] = weight
    weights = table[hints[:, 0]]
    return weights / weights.sum().clamp(min=1)


@dataclass
class Counts:
    """Sums since the last synchronisation of processes, on the device."""

    device: torch.device
    losses: Tensor = field(init=False)
    hits: Tensor = field(init=False)
    hints: Tensor = field(init=False)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.losses = torch.zeros(4, device=self.device)
        self.hints = torch.zeros(2, len(HINTS) + 1, device=self.device)
        self.hits = torch.zeros(2, len(LENGTHS) * len(TASKS), device=self.device)

    def add_hints(self, hints: Tensor, right: Tensor) -> None:
        """Count hints `[hints, 3]`, and those answered right, by subject."""
        for number, counted in enumerate((right.float(), torch.ones_like(right, dtype=torch.float32))):
            self.hints[number].index_add_(0, hints[:, 0] % (len(HINTS) + 1), counted)

    def add(self, target: Target, nll: Tensor, right: Tensor, length: int) -> None:
        """Count a batch's losses of text and answers, and its answers that are exactly right."""
        for place_of, counts_as in enumerate((PLAIN_TEXT, ANSWER)):
            chosen = target.classes == counts_as
            self.losses[2 * place_of] += (nll * chosen).sum()
            self.losses[2 * place_of + 1] += chosen.sum()
        index = LENGTHS.index(length) * len(TASKS) + target.spans[:, 0]
        found = exact(right, target.spans)
        self.hits[0].index_add_(0, index, found)
        self.hits[1].index_add_(0, index, torch.ones_like(found))
        self.tokens += len(nll)
