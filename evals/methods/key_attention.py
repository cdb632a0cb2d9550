"""Compute attention for the methods: over the whole context, over chosen keys, and the mass on each key of a prompt.

Plain torch, batched over requests and heads; masses and outputs in float32. No value at or behind a row's length
reaches a result, NaN included: logits there are masked, values there are replaced or never gathered.
"""

from functools import cache
from typing import Literal

import torch

from evals.methods.attention_method import PromptLayer, Step, StepResult

Choice = Literal["apart", "together"]
"""Whether each query head chooses the keys it reads, or the heads of a group choose together and read rows once."""

MAX_BLOCK_LOGITS = 1 << 28
"""Most logits that a blocked pass over a prompt holds at once: 1 GiB in float32."""


def matmul_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right` of 3-D operands, summed and returned in float32."""
    if left.dtype != torch.float32 and left.is_cuda and widens_in_matmul(left.device, left.dtype):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


@cache
def widens_in_matmul(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this torch and GPU return a 16-bit product in float32.

    The answer is cached. It comes from one small product with a known result.
    """
    ones = torch.ones(2, 3, 8, device=device, dtype=dtype)
    try:
        product = torch.bmm(ones, ones.transpose(1, 2), out_dtype=torch.float32)
    except (TypeError, RuntimeError):
        return False
    return product.dtype == torch.float32 and bool((product == 8).all())


def score_keys(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return inner products of query `[requests, heads, dim]` and keys `[requests, kv_heads, n, dim]`.

    Returns float32 `[requests, heads, n]`.
    """
    requests, heads, dim = query.shape
    kv_heads, count = keys.shape[1], keys.shape[2]
    grouped = query.reshape(requests * kv_heads, heads // kv_heads, dim)
    scores = matmul_float32(grouped, keys.reshape(requests * kv_heads, count, dim).transpose(1, 2))
    return scores.view(requests, heads, count)


def valid_positions(lengths: torch.Tensor, longest: int) -> torch.Tensor:
    """Return bool `[requests, 1, longest]`: positions below each row's length."""
    return (torch.arange(longest, device=lengths.device) < lengths[:, None])[:, None]


def step_logits(step: Step) -> torch.Tensor:
    """Return the exact logits of a step, scaled, -inf behind each length. float32 `[requests, heads, longest]`."""
    logits = score_keys(step.query, step.keys) * step.query.shape[-1] ** -0.5
    return logits.masked_fill_(~valid_positions(step.lengths, step.longest), -torch.inf)


def weigh_values(weights: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return `weights [requests, heads, n]` @ `values [requests, kv_heads, n, dim]`, float32 `[requests, heads, dim]`.

    valid: False where a value may not be read.
    """
    requests, heads, count = weights.shape
    kv_heads, dim = values.shape[1], values.shape[3]
    clean = values.masked_fill(~valid[..., None], 0).reshape(requests * kv_heads, count, dim)
    grouped = weights.reshape(requests * kv_heads, heads // kv_heads, count).to(values.dtype)
    return matmul_float32(grouped, clean).view(requests, heads, dim)


def attend_all(step: Step) -> StepResult:
    """Attend exactly over the whole context. The heads of a group read each row once, together."""
    logits = step_logits(step)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp_()
    out = weigh_values(weights, step.values, valid_positions(step.lengths, step.longest))
    rows = step.lengths.float()[:, None].expand(-1, step.keys.shape[1])
    return StepResult(out, lse, step.lengths.float()[:, None].expand(-1, step.query.shape[1]), rows)


def gather_rows(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather rows of `[requests, kv_heads, n, dim]` for each query head.

    index: `[requests, heads, m]`. Returns `[requests, heads, m, dim]`.
    """
    requests, heads, _ = index.shape
    request = torch.arange(requests, device=rows.device)[:, None, None]
    kv_head = torch.arange(heads, device=rows.device) // (heads // rows.shape[1])
    return rows[request, kv_head[:, None], index]


def attend_chosen(step: Step, index: torch.Tensor, chosen: torch.Tensor) -> StepResult:
    """Attend exactly over chosen keys. Each query head reads its own.

    index: int64 `[requests, heads, m]`, no position twice; chosen: bool of the same shape, False where unused.
    """
    return attend_weighted(step, index, chosen, None)


def attend_weighted(
    step: Step, index: torch.Tensor, chosen: torch.Tensor, log_weights: torch.Tensor | None
) -> StepResult:
    """Attend as `attend_chosen` does, but with a weight for each key.

    log_weights: float `[requests, heads, m]`; a key counts as exp(log_weights) equal keys. None: all weights are 1.
    """
    index = index.masked_fill(~chosen, 0)
    keys = gather_rows(step.keys, index).float()
    logits = torch.einsum("rhd,rhmd->rhm", step.query.float(), keys) * step.query.shape[-1] ** -0.5
    if log_weights is not None:
        logits = logits + log_weights
    logits = logits.masked_fill(~chosen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp()
    out = torch.einsum("rhm,rhmd->rhd", weights, gather_rows(step.values, index).float())
    keys_scored = chosen.sum(-1).float()
    return StepResult(out, lse, keys_scored, rows_apart(keys_scored, step.keys.shape[1]))


def read_together(result: StepResult, group: int) -> StepResult:
    """Count the rows of a group once, because its heads read the same; `result` counts them for each head."""
    return StepResult(result.out, result.lse, result.keys_scored, result.keys_scored[:, ::group])


def read_between(step: Step, result: StepResult, ends: int, heads: Choice) -> torch.Tensor:
    """Return `DecodeMethod.read_between` of a method that always reads `ends` tokens of sink and window.

    Heads that choose together read a row once.
    """
    kept = step.lengths.clamp(max=ends).float()
    rows = (result.keys_scored - kept[:, None]).mean(1) * (1 if heads == "together" else step.group)
    return rows / (step.lengths - kept).clamp(min=1)


def add_group(masses: torch.Tensor, group: int) -> torch.Tensor:
    """Return masses `[requests, heads, n]` summed over each group's heads, with the sum repeated for each of them."""
    return masses.unflatten(1, (-1, group)).sum(2).repeat_interleave(group, 1)


def rows_apart(keys_scored: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the rows read of each KV head if its query heads read separately, `[requests, kv_heads]`.

    keys_scored: `[requests, heads]`.
    """
    return keys_scored.view(keys_scored.shape[0], kv_heads, -1).sum(-1)


def force_ends(scores: torch.Tensor, lengths: torch.Tensor, sink: int, window: int) -> torch.Tensor:
    """Return scores `[requests, heads, n]` with sink and recent window at +inf, and -inf at and behind the lengths."""
    position = torch.arange(scores.shape[-1], device=scores.device)
    end = lengths[:, None, None]
    scores = scores.masked_fill((position < sink) | (position >= end - window), torch.inf)
    return scores.masked_fill(position >= end, -torch.inf)


def choose_best(scores: torch.Tensor, counts: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `counts [requests]` best positions of each row (at most `most`) as (index, chosen), the arguments of
    `attend_chosen`.
    """
    top = scores.topk(min(most, scores.shape[-1]), dim=-1)
    rank = torch.arange(top.indices.shape[-1], device=scores.device)
    return top.indices, (rank < counts[:, None, None]) & (top.values > -torch.inf)


def query_blocks(prompt: PromptLayer) -> list[tuple[int, int]]:
    """Return half-open ranges of query positions whose logits fit MAX_BLOCK_LOGITS."""
    requests, heads = prompt.queries.shape[:2]
    size = max(1, MAX_BLOCK_LOGITS // (requests * heads * prompt.longest))
    return [(begin, min(begin + size, prompt.longest)) for begin in range(0, prompt.longest, size)]


def prompt_weights(prompt: PromptLayer, positions: torch.Tensor) -> torch.Tensor:
    """Return the causal attention weights of the queries at some positions: float32 `[requests, heads, queries,
    longest]`.

    positions: int64 `[requests, queries]`; the weights of a position outside the prompt are 0.
    """
    requests, heads, _, dim = prompt.queries.shape
    kv_heads, count = prompt.keys.shape[1], positions.shape[1]
    inside = (positions >= 0) & (positions < prompt.lengths[:, None])
    safe = positions.masked_fill(~inside, 0)
    queries = prompt.queries.gather(2, safe[:, None, :, None].expand(requests, heads, count, dim))
    keys = prompt.keys[:, :, : prompt.longest].reshape(requests * kv_heads, prompt.longest, dim)
    grouped = queries.reshape(requests * kv_heads, heads // kv_heads * count, dim)
    logits = matmul_float32(grouped, keys.transpose(1, 2)).mul_(dim**-0.5)
    logits = logits.view(requests, heads, count, prompt.longest)
    key = torch.arange(prompt.longest, device=positions.device)
    logits.masked_fill_((key > safe[..., None])[:, None], -torch.inf)
    return logits.softmax(-1).mul_(inside[:, None, :, None])


def last_positions(prompt: PromptLayer, count: int) -> torch.Tensor:
    """Return int64 `[requests, count]`: each row's last positions, negative if the prompt is shorter than `count`."""
    return prompt.lengths[:, None] - count + torch.arange(count, device=prompt.lengths.device)


def column_mass(prompt: PromptLayer, observe: int) -> torch.Tensor:
    """Return the attention that each key received, summed over the last `observe` queries of the prompt (0: all).

    Returns float32 `[requests, heads, longest]`. Methods share the tensor, so do not write to it.
    """

    def total() -> torch.Tensor:
        if observe:
            return prompt_weights(prompt, last_positions(prompt, observe)).sum(2)
        mass = torch.zeros(*prompt.queries.shape[:2], prompt.longest, device=prompt.queries.device)
        for begin, end in query_blocks(prompt):
            block = torch.arange(begin, end, device=mass.device).expand(len(prompt.lengths), -1)
            mass += prompt_weights(prompt, block).sum(2)
        return mass

    return prompt.once(("column_mass", observe), total)
