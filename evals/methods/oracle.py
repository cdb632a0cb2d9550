"""Oracle sampling: keys drawn with replacement from the true attention distribution, their values averaged.

Paper: MagicPIG, definition 3.1 and equation 5. The sink and the window are read exactly, and the draws represent the
mass of all other keys. `budget` is the number of draws; the distinct keys among them count as read (theorem 3.3). The
method is an oracle because reading the keys to know the distribution is not counted.
"""

from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.budget import Budget
from evals.methods.key_attention import attend_chosen, gather_rows, rows_apart, step_logits


class Oracle(DecodeMethod):
    name: ClassVar[str] = "oracle"
    paper: ClassVar[str] = "oracle sampling"
    budget: BudgetSetting = Budget(0.05, None)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)
    seed: int = 0

    def begin(self, prompt: PromptLayer) -> torch.Generator:
        generator = torch.Generator(prompt.keys.device)
        return generator.manual_seed(self.seed * 1_000_003 + prompt.layer)

    def step(self, step: Step, state: torch.Generator) -> StepResult:
        logits = step_logits(step)
        lse = logits.logsumexp(-1)
        position = torch.arange(step.longest, device=logits.device)
        resident = (position < self.sink) | (position >= step.lengths[:, None, None] - self.window)
        weights = (logits - lse[..., None]).exp().double()
        rest = weights.masked_fill(resident, 0)
        mass = rest.sum(-1)
        draws = self._draw(rest, self.budget.most(step.longest), state)
        counts = self.budget.of(step.lengths)[:, None]
        used = (torch.arange(draws.shape[-1], device=draws.device) < counts[..., None]) & (mass > 0)[..., None]
        share = used / counts[..., None]  # [requests, heads, draws]
        values = gather_rows(step.values, draws.masked_fill(~used, 0)).float()
        out = torch.einsum("rhm,rhmd->rhd", share.float() * mass[..., None].float(), values)
        if self.sink + self.window:
            out += self._resident(step, lse)
        distinct = torch.zeros_like(rest, dtype=torch.int32).scatter_add_(2, draws, used.int()) > 0
        keys = (distinct | (resident & (logits > -torch.inf))).sum(-1).float()
        return StepResult(out, lse, keys, rows_apart(keys, step.keys.shape[1]))

    def _draw(self, weights: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
        """Draw int64 `[requests, heads, draws]` independently, by inverting the cumulative mass.

        A key without mass is never drawn.
        """
        cumulative = weights.cumsum(-1)
        uniform = torch.rand(*weights.shape[:2], draws, generator=generator, device=weights.device, dtype=weights.dtype)
        found = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
        return found.clamp(max=weights.shape[-1] - 1)

    def _resident(self, step: Step, lse: torch.Tensor) -> torch.Tensor:
        """Return the part of the exact output that comes from the sink and the window."""
        sink = torch.arange(self.sink, device=lse.device).expand(len(step.lengths), -1)
        begin = (step.lengths - self.window).clamp(min=self.sink)[:, None]
        recent = begin + torch.arange(self.window, device=lse.device)
        index = torch.cat([sink, recent], dim=1)[:, None].expand(-1, step.query.shape[1], -1)
        part = attend_chosen(step, index, index < step.lengths[:, None, None])
        return part.out * (part.lse - lse).exp()[..., None]
