"""Exact top-k: the keys with the largest logits, each head for itself. The upper bound of every search.

Paper: MagicPIG, equation 3. Finding the keys is not counted in what is read: no system can do it for free.
"""

from typing import Any, ClassVar

import torch
from pydantic import Field

from evals.methods.attention import attend_chosen, choose_best, force_ends, step_logits
from evals.methods.budget import Budget
from evals.methods.method import BudgetSetting, DecodeMethod, Step, StepResult


class TopK(DecodeMethod):
    """`budget` keys in all, of which `sink` first and `window` last ones are taken whatever their logits."""

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "exact top-k"
    budget: BudgetSetting = Budget(0.05, None)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)

    def step(self, step: Step, state: Any) -> StepResult:
        return attend_best(step, step_logits(step), self.budget, self.sink, self.window)


def attend_best(step: Step, scores: torch.Tensor, budget: Budget, sink: int, window: int) -> StepResult:
    """Exact attention over the keys with the best `scores [requests, heads, longest]`, sink and window always in."""
    least = max(sink + window, 1)
    counts = budget.of(step.lengths).clamp(min=least)
    index, chosen = choose_best(
        force_ends(scores, step.lengths, sink, window), counts, max(budget.most(step.longest), least)
    )
    return attend_chosen(step, index, chosen)
