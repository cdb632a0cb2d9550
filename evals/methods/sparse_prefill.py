"""Prefill methods: MInference's vertical-slash pattern, and mean-pooled blocks. Causal attention under a mask.

Quality only: every logit is computed, block of queries by block of queries, and those outside the mask are dropped.
Papers: Jiang et al. 2024 (MInference: the last queries vote for columns and diagonals; here exact diagonals, where its
kernel takes whole blocks along them); MOMO, table 2 (Mean Pool: pooled queries times pooled keys choose key blocks).
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention import (
    choose_best,
    force_ends,
    last_positions,
    matmul_float32,
    prompt_weights,
    query_blocks,
    valid_positions,
)
from evals.methods.blocks import num_blocks, split_blocks
from evals.methods.budget import Budget
from evals.methods.method import BudgetSetting, PrefillMethod, PrefillResult, PromptLayer


class VerticalSlash(PrefillMethod):
    """`vertical` columns and `slash` diagonals, `sink` and `window` of them always the first and the nearest."""

    name: ClassVar[str] = "vertical_slash"
    paper: ClassVar[str] = "MInference vertical-slash"
    vertical: BudgetSetting = Budget(0.05, None)
    slash: BudgetSetting = Budget(0.05, None)
    observe: int = Field(64, ge=1)
    sink: int = Field(4, ge=0)
    window: int = Field(64, ge=1)

    def attend(self, prompt: PromptLayer) -> PrefillResult:
        positions = last_positions(prompt, self.observe)
        weights = prompt_weights(prompt, positions)  # [requests, heads, observe, longest]
        offset = positions[..., None] - torch.arange(prompt.longest, device=positions.device)
        along = offset.clamp(min=0)[:, None].expand_as(weights)
        diagonal = weights.gather(3, along) * (offset >= 0)[:, None]
        columns = self._best(weights.sum(2), prompt, self.vertical, self.sink, "sink")
        slashes = self._best(diagonal.sum(2), prompt, self.slash, self.window, "window")

        def mask(begin: int, end: int) -> torch.Tensor:
            query = torch.arange(begin, end, device=positions.device)[:, None]
            distance = (query - torch.arange(end, device=positions.device)).clamp(min=0)
            return slashes[:, :, distance] | columns[:, :, None, :end]

        return attend_masked(prompt, mask)

    def _best(self, mass: torch.Tensor, prompt: PromptLayer, budget: Budget, always: int, which: str) -> torch.Tensor:
        """bool `[requests, heads, longest]`: the heaviest columns or diagonals; the first `always` are among them."""
        counts = budget.of(prompt.lengths).clamp(min=always)
        scores = force_ends(mass, prompt.lengths, always, 0)
        index, chosen = choose_best(scores, counts, max(budget.most(prompt.longest), always))
        return torch.zeros_like(mass, dtype=torch.bool).scatter_(2, index, chosen)


class MeanPoolPrefill(PrefillMethod):
    """`budget` of the prompt's key blocks for each block of queries; the first block and its own are among them."""

    name: ClassVar[str] = "mean_pool_prefill"
    paper: ClassVar[str] = "mean pooling, prefill"
    budget: BudgetSetting = Budget(0.05, None)
    block: int = Field(64, ge=1)

    def attend(self, prompt: PromptLayer) -> PrefillResult:
        heads, kv_heads = prompt.queries.shape[1], prompt.keys.shape[1]
        begin_of = torch.arange(num_blocks(prompt.longest, self.block), device=prompt.queries.device) * self.block
        filled = (prompt.lengths[:, None] - begin_of).clamp(1, self.block)[:, None, :, None]
        queries = split_blocks(prompt.queries[:, :, : prompt.longest], prompt.lengths, self.block, 0.0)
        keys = split_blocks(prompt.keys[:, :, : prompt.longest], prompt.lengths, self.block, 0.0)
        pooled = queries.sum(3, dtype=torch.float32) / filled
        means = (keys.sum(3, dtype=torch.float32) / filled).repeat_interleave(heads // kv_heads, dim=1)
        scores = pooled @ means.transpose(2, 3)  # [requests, heads, query blocks, key blocks]
        row, column = (
            torch.arange(scores.shape[2], device=scores.device)[:, None],
            torch.arange(scores.shape[3], device=scores.device),
        )
        scores = scores.masked_fill((column == 0) | (column == row), torch.inf).masked_fill(column > row, -torch.inf)
        most = max(2, num_blocks(self.budget.most(prompt.longest), self.block))
        counts = ((self.budget.of(prompt.lengths) + self.block - 1) // self.block).clamp(min=2)
        index, chosen = choose_best(scores.flatten(1, 2), counts, most)
        chosen_blocks = torch.zeros_like(scores, dtype=torch.bool).flatten(1, 2).scatter_(2, index, chosen)
        chosen_blocks = chosen_blocks.view_as(scores)

        def mask(begin: int, end: int) -> torch.Tensor:
            query = torch.arange(begin, end, device=scores.device) // self.block
            key = torch.arange(end, device=scores.device) // self.block
            return chosen_blocks[:, :, query][..., key]

        return attend_masked(prompt, mask)


def attend_masked(prompt: PromptLayer, mask: Callable[[int, int], torch.Tensor]) -> PrefillResult:
    """Causal attention over the pairs in `mask(begin, end)`, bool `[requests, heads, end - begin, end]`.

    Rows of queries behind a prompt's end come out as 0. Every real query must have a key.
    """
    requests, heads, _, dim = prompt.queries.shape
    kv_heads, longest = prompt.keys.shape[1], prompt.longest
    valid = valid_positions(prompt.lengths, longest)[:, 0]  # [requests, longest]
    keys = prompt.keys[:, :, :longest].reshape(requests * kv_heads, longest, dim)
    values = prompt.values[:, :, :longest].masked_fill(~valid[:, None, :, None], 0)
    values = values.reshape(requests * kv_heads, longest, dim)
    out = torch.zeros_like(prompt.queries)
    pairs = torch.zeros(requests, device=out.device, dtype=torch.float64)
    key = torch.arange(longest, device=out.device)
    for begin, end in query_blocks(prompt):
        allowed = mask(begin, end) & (key[:end] <= key[begin:end, None])
        allowed &= valid[:, None, begin:end, None]
        pairs += allowed.sum((1, 2, 3))
        queries = prompt.queries[:, :, begin:end].reshape(requests * kv_heads, -1, dim)
        logits = matmul_float32(queries, keys[:, :end].transpose(1, 2)).mul_(dim**-0.5).view(allowed.shape)
        weights = logits.masked_fill_(~allowed, -torch.inf).softmax(-1).masked_fill_(~allowed, 0)
        block = matmul_float32(weights.view(queries.shape[0], -1, end).to(values.dtype), values[:, :end])
        out[:, :, begin:end] = block.view(requests, heads, end - begin, dim).to(out.dtype)
    causal = prompt.lengths.double() * (prompt.lengths.double() + 1) / 2
    head_fraction = (pairs / heads / causal).float()
    return PrefillResult(out, head_fraction, head_fraction * (heads // kv_heads))
