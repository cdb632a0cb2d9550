"""Exact top-k: the keys with the largest logits, each head for itself. The upper bound of every search.

Paper: MagicPIG, equation 3. The search for the keys is not counted as read, though no real system has it for free. With
a `block` of more than one, whole blocks are chosen by the sum of their attention. Heads that choose together take the
keys with the most attention of all of them: the upper bound of methods that choose for a KV head.
"""

from typing import Any, ClassVar

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, Step, StepResult
from evals.methods.blocks import attend_blocks, num_blocks
from evals.methods.budget import Budget
from evals.methods.key_attention import (
    Choice,
    add_group,
    attend_chosen,
    choose_best,
    force_ends,
    read_between,
    read_together,
    step_logits,
)


class TopK(DecodeMethod):
    """Exact top-k: attend to the `budget` keys with the largest logits.

    The first `sink` and the last `window` keys are always among them.
    """

    name: ClassVar[str] = "topk"
    paper: ClassVar[str] = "exact top-k"
    budget: BudgetSetting = Budget(0.05, None)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    block: int = Field(1, ge=1)
    heads: Choice = "apart"

    def step(self, step: Step, state: Any) -> StepResult:
        masses = step_logits(step).softmax(-1)
        if self.heads == "together":
            masses = add_group(masses, step.group)
        if self.block == 1:
            result = attend_best(step, masses, self.budget, self.sink, self.window)
        else:
            behind = num_blocks(step.longest, self.block) * self.block - step.longest
            masses = torch.nn.functional.pad(masses, (0, behind)).unflatten(-1, (-1, self.block)).sum(-1)
            result = attend_blocks(step, masses, self.block, self.budget, self.sink, self.window, index_rows=0.0)
        return read_together(result, step.group) if self.heads == "together" else result

    def read_between(self, step: Step, result: StepResult) -> torch.Tensor:
        return read_between(step, result, self.sink + self.window, self.heads)


def attend_best(step: Step, scores: torch.Tensor, budget: Budget, sink: int, window: int) -> StepResult:
    """Attend exactly over the keys with the best `scores [requests, heads, longest]`, sink and window included."""
    least = max(sink + window, 1)
    counts = budget.of(step.lengths).clamp(min=least)
    index, chosen = choose_best(
        force_ends(scores, step.lengths, sink, window), counts, max(budget.most(step.longest), least)
    )
    return attend_chosen(step, index, chosen)
