"""Quest: pages of keys ranked by an upper bound of their logits, from the minimum and maximum of each channel.

Paper: Tang et al. 2024, algorithm 1: a page's score is the sum over channels of max(q min, q max). With
`bounds=moments` mean - deviation and mean + deviation replace minimum and maximum, so that one outlier moves them less.
The bounds cost two vectors a page, which the heads of a group read together. Either each query head chooses its pages,
or a group chooses by the sum over its heads of the softmax over the bounds.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.blocks import attend_blocks, num_blocks, split_blocks
from evals.methods.budget import Budget
from evals.methods.key_attention import Choice, add_group, read_between, score_keys


@dataclass(frozen=True, slots=True)
class PageBounds:
    """Bounds of the keys of each page.

    low, high: `[requests, kv_heads, pages, dim]` for the whole capacity; +inf and -inf for empty pages.
    """

    low: torch.Tensor
    high: torch.Tensor


class Quest(DecodeMethod):
    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "Quest"
    budget: BudgetSetting = Budget(0.05, None)
    page: int = Field(16, ge=1)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    bounds: Literal["extremes", "moments"] = "extremes"
    heads: Choice = "apart"

    def begin(self, prompt: PromptLayer) -> PageBounds:
        def bounds() -> PageBounds:
            if self.bounds == "moments":
                return spread(prompt.keys, prompt.lengths, self.page)
            low = split_blocks(prompt.keys, prompt.lengths, self.page, torch.inf).amin(3)
            high = split_blocks(prompt.keys, prompt.lengths, self.page, -torch.inf).amax(3)
            return PageBounds(low, high)

        shared = prompt.once(("page_bounds", self.page, self.bounds), bounds)
        return PageBounds(shared.low.clone(), shared.high.clone())

    def step(self, step: Step, state: PageBounds) -> StepResult:
        requests = torch.arange(len(step.lengths), device=step.lengths.device)
        last, page = step.lengths - 1, (step.lengths - 1) // self.page
        new = step.keys[requests, :, last]  # [requests, kv_heads, dim]
        if self.bounds == "moments":
            begin = page * self.page
            index = (begin[:, None] + torch.arange(self.page, device=last.device)).clamp(max=step.longest - 1)
            own = spread(step.keys[requests[:, None], :, index].transpose(1, 2), step.lengths - begin, self.page)
            state.low[requests, :, page], state.high[requests, :, page] = own.low[:, :, 0], own.high[:, :, 0]
        else:
            state.low[requests, :, page] = torch.minimum(state.low[requests, :, page], new)
            state.high[requests, :, page] = torch.maximum(state.high[requests, :, page], new)
        pages = num_blocks(step.longest, self.page)
        # Pages behind a shorter row's end are empty: infinite bounds become 0, and attend_blocks never takes them.
        low = state.low[:, :, :pages].nan_to_num(posinf=0.0)
        high = state.high[:, :, :pages].nan_to_num(neginf=0.0)
        bound = score_keys(step.query.clamp(min=0), high) + score_keys(step.query.clamp(max=0), low)
        if self.heads == "apart":
            return attend_blocks(step, bound, self.page, self.budget, self.sink, self.window, index_rows=1.0)
        inside = torch.arange(pages, device=last.device) * self.page < step.lengths[:, None, None]
        bound = (bound * step.query.shape[-1] ** -0.5).masked_fill(~inside, -torch.inf)
        masses = add_group(bound.softmax(-1), step.group)
        result = attend_blocks(step, masses, self.page, self.budget, self.sink, self.window, index_rows=1.0)
        index_read = (step.lengths.float() / self.page).ceil()[:, None]
        return StepResult(result.out, result.lse, result.keys_scored, result.keys_scored[:, :: step.group] + index_read)

    def read_between(self, step: Step, result: StepResult) -> torch.Tensor:
        return read_between(step, result, self.sink + self.window, self.heads)


def spread(keys: torch.Tensor, lengths: torch.Tensor, page: int) -> PageBounds:
    """Return the bounds mean - deviation and mean + deviation for each page and channel.

    keys: `[requests, kv_heads, n, dim]`.
    """
    rows = split_blocks(keys, lengths, page, torch.nan).float()  # [requests, kv_heads, pages, page, dim]
    mean = rows.nanmean(3)
    deviation = (rows - mean[:, :, :, None]).square().nanmean(3).sqrt()
    low, high = mean - deviation, mean + deviation
    return PageBounds(low.nan_to_num(nan=torch.inf).to(keys.dtype), high.nan_to_num(nan=-torch.inf).to(keys.dtype))
