"""Split keys into blocks of consecutive positions, and attend over chosen blocks."""

import torch

from evals.methods.attention_method import Step, StepResult
from evals.methods.budget import Budget
from evals.methods.key_attention import attend_chosen, choose_best


def num_blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def split_blocks(keys: torch.Tensor, lengths: torch.Tensor, block: int, fill: float) -> torch.Tensor:
    """Return `[requests, kv_heads, n, dim]` as `[requests, kv_heads, blocks, block, dim]`.

    Positions at and behind each length are set to `fill`.
    """
    requests, kv_heads, count, dim = keys.shape
    behind = torch.arange(count, device=keys.device) >= lengths[:, None]
    keys = keys.masked_fill(behind[:, None, :, None], fill)
    blocks = num_blocks(count, block)
    keys = torch.nn.functional.pad(keys, (0, 0, 0, blocks * block - count), value=fill)
    return keys.view(requests, kv_heads, blocks, block, dim)


def attend_blocks(
    step: Step, scores: torch.Tensor, block: int, budget: Budget, sink: int, window: int, index_rows: float
) -> StepResult:
    """Attend exactly over the blocks with the best `scores [requests, heads, blocks]`.

    The number of blocks is what holds the budget, rounded up; blocks of the sink and the window are always chosen.
    index_rows: rows of KV that a group's heads together read per block to compute its score.
    """
    position = torch.arange(scores.shape[-1], device=scores.device) * block
    end = step.lengths[:, None, None]
    forced = (position < sink) | ((position + block > end - window) & (window > 0))
    scores = scores.masked_fill(forced, torch.inf).masked_fill(position >= end, -torch.inf)
    least = num_blocks(sink, block) + (num_blocks(window, block) + 1 if window else 0)
    counts = ((budget.of(step.lengths) + block - 1) // block).clamp(min=max(least, 1))
    most = max(num_blocks(budget.most(step.longest), block), least, 1)
    blocks, chosen = choose_best(scores, counts, most)
    index = (blocks[..., None] * block + torch.arange(block, device=scores.device)).flatten(2)
    chosen = chosen.repeat_interleave(block, dim=-1) & (index < end)
    result = attend_chosen(step, index, chosen)
    index_read = (step.lengths.float() / block).ceil()[:, None] * index_rows
    return StepResult(result.out, result.lse, result.keys_scored, result.rows_read + index_read)
