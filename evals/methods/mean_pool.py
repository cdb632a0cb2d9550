"""Mean pooling: blocks of keys ranked by the query's product with their mean key.

The block-mean score of the papers' mean-pooling baselines, as a decode step (`mean_pool`): one vector a block, read
by the heads of a group together; the blocks are chosen by each query head.
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
class BlockSums:
    """total: float32 `[requests, kv_heads, blocks, dim]` of the whole capacity, the sum of each block's keys."""

    total: torch.Tensor


class MeanPool(DecodeMethod):
    name: ClassVar[str] = "mean_pool"
    paper: ClassVar[str] = "mean pooling"
    budget: BudgetSetting = Budget(0.05, None)
    block: int = Field(16, ge=1)
    sink: int = Field(0, ge=0)
    window: int = Field(0, ge=0)

    def begin(self, prompt: PromptLayer) -> BlockSums:
        def sums() -> torch.Tensor:
            return split_blocks(prompt.keys, prompt.lengths, self.block, 0.0).sum(3, dtype=torch.float32)

        return BlockSums(prompt.once(("block_sums", self.block), sums).clone())

    def step(self, step: Step, state: BlockSums) -> StepResult:
        requests = torch.arange(len(step.lengths), device=step.lengths.device)
        last, block = step.lengths - 1, (step.lengths - 1) // self.block
        state.total[requests, :, block] += step.keys[requests, :, last].float()
        blocks = num_blocks(step.longest, self.block)
        begin = torch.arange(blocks, device=step.lengths.device) * self.block
        filled = (step.lengths[:, None] - begin).clamp(1, self.block)  # [requests, blocks]
        means = state.total[:, :, :blocks] / filled[:, None, :, None]
        scores = score_keys(step.query.float(), means)
        return attend_blocks(step, scores, self.block, self.budget, self.sink, self.window, index_rows=0.5)
