"""StreamingLLM: attend to the first few tokens and the most recent ones, and drop all between.

Paper: Xiao et al. 2024, section 3.2. Keys keep the positions that they were rotated with. The paper renumbers them
inside its cache, which matters only beyond the trained context. All heads of a group read the same rows.
"""

from typing import Any, ClassVar

import torch
from pydantic import Field

from evals.methods.attention_method import BudgetSetting, DecodeMethod, Step, StepResult
from evals.methods.budget import Budget
from evals.methods.key_attention import attend_chosen


class Streaming(DecodeMethod):
    """StreamingLLM: attend to the first `sink` keys and the last `budget - sink`."""

    name: ClassVar[str] = "streaming"
    paper: ClassVar[str] = "StreamingLLM"
    budget: BudgetSetting = Budget(0.05, None)
    sink: int = Field(4, ge=0)

    def step(self, step: Step, state: Any) -> StepResult:
        lengths = step.lengths[:, None]
        most = min(step.longest, max(self.budget.most(step.longest), self.sink + 1))
        count = torch.minimum(self.budget.of(step.lengths).clamp(min=self.sink + 1), step.lengths)[:, None]
        rank = torch.arange(most, device=lengths.device)
        index = torch.where(rank < self.sink, rank, lengths - count + rank)  # [requests, most]
        heads = step.query.shape[1]
        chosen = (rank < count)[:, None].expand(-1, heads, -1)
        result = attend_chosen(step, index[:, None].expand(-1, heads, -1), chosen)
        return StepResult(result.out, result.lse, result.keys_scored, count.float().expand(-1, step.keys.shape[1]))

    def read_between(self, step: Step, result: StepResult) -> torch.Tensor:
        """Return 0: whatever this method reads is sink or window."""
        return torch.zeros_like(step.lengths, dtype=torch.float32)
