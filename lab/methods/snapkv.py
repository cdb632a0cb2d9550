"""SnapKV: keep the prompt keys that the prompt's last queries attended to, and every generated token.

Paper: Li et al. 2024, section 4 (observation window, pooling over neighbouring keys, top of each head). Each query head
keeps its own keys, or a group keeps the same keys by the votes of all its heads. The budget is a share of the prompt
and includes the observation window; generated tokens come on top.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch.nn import functional

from evals.methods.attention_method import BudgetSetting, DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.budget import Budget
from evals.methods.key_attention import (
    Choice,
    add_group,
    attend_chosen,
    choose_best,
    column_mass,
    force_ends,
    read_together,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The prompt keys that SnapKV kept. index, chosen: `[requests, heads, m]`. lengths, longest: of the prompts."""

    index: torch.Tensor
    chosen: torch.Tensor
    lengths: torch.Tensor
    longest: int


class SnapKV(DecodeMethod):
    """SnapKV: keep the prompt keys that get most attention from its last `observe` queries, and the keys of these
    queries. Votes are pooled over `kernel` neighbours.
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "SnapKV"
    budget: BudgetSetting = Budget(0.05, None)
    observe: int = Field(64, ge=1)
    kernel: int = Field(7, ge=1, description="odd")
    pool: Literal["max", "mean"] = "max"
    heads: Choice = "apart"

    def begin(self, prompt: PromptLayer) -> Snapshot:
        votes = column_mass(prompt, self.observe)
        if self.heads == "together":
            votes = add_group(votes, prompt.queries.shape[1] // prompt.keys.shape[1])
        position = torch.arange(prompt.longest, device=votes.device)
        votes = votes.masked_fill(position >= (prompt.lengths - self.observe)[:, None, None], 0)
        pool = functional.max_pool1d if self.pool == "max" else functional.avg_pool1d
        votes = pool(votes, self.kernel, stride=1, padding=self.kernel // 2)
        votes = force_ends(votes, prompt.lengths, 0, self.observe)
        counts = self.budget.of(prompt.lengths).clamp(min=self.observe)
        index, chosen = choose_best(votes, counts, max(self.budget.most(prompt.longest), self.observe))
        return Snapshot(index, chosen, prompt.lengths, prompt.longest)

    def step(self, step: Step, state: Snapshot) -> StepResult:
        generated = torch.arange(step.longest - state.longest, device=step.lengths.device)
        new = (state.lengths[:, None] + generated)[:, None].expand(-1, step.query.shape[1], -1)
        index = torch.cat([state.index, new], dim=-1)
        chosen = torch.cat([state.chosen, new < step.lengths[:, None, None]], dim=-1)
        result = attend_chosen(step, index, chosen)
        return read_together(result, step.group) if self.heads == "together" else result
