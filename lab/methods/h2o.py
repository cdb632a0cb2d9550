"""H2O: half of the budget for the keys that received most attention so far, half for the most recent ones.

Paper: Zhang et al. 2023, section 4 (greedy eviction by accumulated attention). An evicted key never returns. With
`observe` only the attention of the prompt's last queries is accumulated: AttentionPredictor (appendix C.1) calls that
H2O+, since accumulating over all queries favours the first tokens. Each query head keeps its own keys, or a group keeps
the same keys by the attention of all its heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.budget import Budget
from evals.methods.key_attention import (
    Choice,
    add_group,
    attend_chosen,
    choose_best,
    column_mass,
    read_together,
    step_logits,
    valid_positions,
)


@dataclass(slots=True)
class Kept:
    """H2O's state of one layer. mass: accumulated attention, float32 `[requests, heads, capacity]`. kept: bool of the
    same shape, False once a key is evicted.
    """

    mass: torch.Tensor
    kept: torch.Tensor


class H2O(DecodeMethod):
    """H2O: keep the `recent` part of `budget` for the last keys, and the rest for those with the most attention so far.

    observe: last prompt queries whose attention counts; 0: all.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "H2O"
    budget: BudgetSetting = Budget(0.05, None)
    recent: float = Field(0.5, gt=0, le=1)
    observe: int = Field(0, ge=0)
    heads: Choice = "apart"

    def begin(self, prompt: PromptLayer) -> Kept:
        room = prompt.capacity - prompt.longest
        mass = torch.nn.functional.pad(column_mass(prompt, self.observe), (0, room))
        kept = torch.ones_like(mass, dtype=torch.bool)
        return Kept(mass, kept)

    def step(self, step: Step, state: Kept) -> StepResult:
        counts = self.budget.of(step.lengths)
        recent = (counts * self.recent).ceil().long()
        mass, kept = state.mass[..., : step.longest], state.kept[..., : step.longest]
        position = torch.arange(step.longest, device=mass.device)
        shared = add_group(mass, step.group) if self.heads == "together" else mass
        scores = shared.masked_fill(position >= (step.lengths - recent)[:, None, None], torch.inf)
        valid = valid_positions(step.lengths, step.longest)
        scores = scores.masked_fill(~(valid & kept), -torch.inf)
        index, chosen = choose_best(scores, counts, self.budget.most(step.longest))
        survivors = torch.zeros_like(kept).scatter_(2, index, chosen)
        state.kept[..., : step.longest] = survivors | ~valid
        result = attend_chosen(step, index, chosen)
        weights = (step_logits(step) - result.lse[..., None]).exp().masked_fill(~survivors, 0)
        mass += weights
        return read_together(result, step.group) if self.heads == "together" else result
