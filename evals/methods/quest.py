"""Quest: pages of keys ranked by an upper bound of their logits, from the minimum and maximum of each channel.

Paper: Tang et al. 2024, algorithm 1: a page's score is sum over channels of max(q min, q max). The bounds cost two
vectors a page, read by the heads of a group together; the pages are chosen by each query head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention import score_keys
from evals.methods.blocks import attend_blocks, num_blocks, split_blocks
from evals.methods.budget import Budget
from evals.methods.method import BudgetSetting, DecodeMethod, PromptLayer, Step, StepResult


@dataclass(frozen=True, slots=True)
class PageBounds:
    """low, high: `[requests, kv_heads, pages, dim]` of the whole capacity; +inf and -inf in pages still empty."""

    low: torch.Tensor
    high: torch.Tensor


class Quest(DecodeMethod):
    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Quest"
    budget: BudgetSetting = Budget(0.05, None)
    page: int = Field(16, ge=1)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)

    def begin(self, prompt: PromptLayer) -> PageBounds:
        def bounds() -> PageBounds:
            low = split_blocks(prompt.keys, prompt.lengths, self.page, torch.inf).amin(3)
            high = split_blocks(prompt.keys, prompt.lengths, self.page, -torch.inf).amax(3)
            return PageBounds(low, high)

        shared = prompt.once(("page_bounds", self.page), bounds)
        return PageBounds(shared.low.clone(), shared.high.clone())

    def step(self, step: Step, state: PageBounds) -> StepResult:
        requests = torch.arange(len(step.lengths), device=step.lengths.device)
        last, page = step.lengths - 1, (step.lengths - 1) // self.page
        new = step.keys[requests, :, last]  # [requests, kv_heads, dim]
        state.low[requests, :, page] = torch.minimum(state.low[requests, :, page], new)
        state.high[requests, :, page] = torch.maximum(state.high[requests, :, page], new)
        pages = num_blocks(step.longest, self.page)
        # Pages behind a shorter row's end are empty: infinite bounds become 0, and attend_blocks never takes them.
        low = state.low[:, :, :pages].nan_to_num(posinf=0.0)
        high = state.high[:, :, :pages].nan_to_num(neginf=0.0)
        bound = score_keys(step.query.clamp(min=0), high) + score_keys(step.query.clamp(max=0), low)
        return attend_blocks(step, bound, self.page, self.budget, self.sink, self.window, index_rows=1.0)
