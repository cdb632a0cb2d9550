"""vAttention: read the keys with the largest logits exactly, and a uniform sample of the rest by inverse probability.

Paper: arXiv 2510.05688, the estimator of section 4: each sampled key represents (keys of the rest) / (sampled) keys, in
numerator and denominator alike. As in `topk` the search for the largest is not counted: an upper bound of any search.
Sink and window are read exactly, and the rest of the budget is shared between the best of the other keys and the
sample. Invariant: over draws, numerator and mass are unbiased; a budget of the whole context is dense attention.
"""

from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.budget import Budget
from evals.methods.key_attention import (
    Choice,
    add_group,
    attend_weighted,
    force_ends,
    read_between,
    read_together,
    step_logits,
)


class VAttention(DecodeMethod):
    """vAttention: attend to the sink and window, to the best other keys, and to a uniform sample of the remaining ones.

    The best keys get the share `heavy` of the budget that sink and window leave; the rest is drawn without replacement.
    The heads of a group choose and draw apart or together.
    """

    name: ClassVar[str] = "vattention"
    paper: ClassVar[str] = "vAttention"
    budget: BudgetSetting = Budget(0.05, None)
    heavy: float = Field(0.5, ge=0, le=1)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    heads: Choice = "apart"
    seed: int = 0

    def begin(self, prompt: PromptLayer) -> torch.Generator:
        generator = torch.Generator(prompt.keys.device)
        return generator.manual_seed(self.seed * 1_000_003 + prompt.layer)

    def step(self, step: Step, state: torch.Generator) -> StepResult:
        masses = step_logits(step).softmax(-1)
        requests, heads, longest = masses.shape
        drawers = heads // step.group if self.heads == "together" else heads
        if self.heads == "together":
            masses = add_group(masses, step.group)
        counts = torch.maximum(self.budget.of(step.lengths), step.lengths.new_tensor(max(self.sink + self.window, 1)))
        counts = torch.minimum(counts, step.lengths)
        ends = counts.clamp(max=self.sink + self.window)
        exact = ends + ((counts - ends) * self.heavy).ceil().long()
        order = force_ends(masses, step.lengths, self.sink, self.window).argsort(dim=-1, descending=True, stable=True)
        rank = torch.arange(longest, device=masses.device)
        drawn = torch.rand(requests, drawers, longest, generator=state, device=masses.device)
        drawn = drawn.repeat_interleave(heads // drawers, 1)
        first, length = exact[:, None, None], step.lengths[:, None, None]
        key = torch.where(rank < first, -2.0, drawn).masked_fill(rank >= length, 2.0)  # exact, the rest, beyond the end
        most = min(longest, max(self.budget.most(longest), self.sink + self.window, 1))
        place = key.topk(most, largest=False).indices  # [requests, heads, most], of `order`
        chosen = rank[:most] < counts[:, None, None]
        stands_for = (step.lengths - exact).float() / (counts - exact).clamp(min=1)
        log_weights = torch.where(place < first, 0.0, stands_for.log()[:, None, None])
        result = attend_weighted(step, order.gather(2, place), chosen.expand_as(place), log_weights)
        return read_together(result, step.group) if self.heads == "together" else result

    def read_between(self, step: Step, result: StepResult) -> torch.Tensor:
        return read_between(step, result, self.sink + self.window, self.heads)
