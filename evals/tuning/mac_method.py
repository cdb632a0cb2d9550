"""Run MAC-Attention by the code that serves it, `gpu.methods.mac`; KV is read in plain torch.

Reads are counted in bytes. A KV head's count is the union of the rows that its query heads read, each row once, and the
ring: its queries and their figures, one summary read and one written.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from evals.methods.attention_method import DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.key_attention import step_logits, valid_positions, weigh_values
from gpu.attention.prefill_query import PrefillQuery
from gpu.methods.mac.complete import complete
from gpu.methods.mac.match import NUM_COUNTS, Limits, match
from gpu.methods.mac.rings import Ring, RowRings
from gpu.methods.mac.seed import seed
from gpu.methods.mac.settings import MacSettings
from gpu.prefill.dense import Dense
from transfer.partial import Partial

_DEFAULT = MacSettings()
_SUMMARIES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUMBER_BYTES, _CHANNEL_BYTES = 4, 2


@dataclass(frozen=True, slots=True)
class MacState:
    """A ring for each request, and the counts of matching."""

    ring: Ring
    rings: torch.Tensor
    is_matching: torch.Tensor
    counts: torch.Tensor


class Mac(DecodeMethod):
    name: ClassVar[str] = "mac"
    paper: ClassVar[str] = "MAC-Attention"
    tau: float = _DEFAULT.tau
    max_prefix_share: float = _DEFAULT.max_prefix_share
    capacity: int = _DEFAULT.capacity
    band: int = _DEFAULT.band
    sink: int = _DEFAULT.sink_tokens
    max_gap: int | None = None
    min_gap: int = 1
    max_age: int = _DEFAULT.max_age
    seed_tokens: int | None = None
    summaries: Literal["float32", "bfloat16"] = _DEFAULT.summaries
    min_context: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> "Mac":
        assert self.served.capacity == self.capacity  # raises where the settings cannot be
        return self

    @property
    def served(self) -> MacSettings:
        """Return the settings of the served method."""
        return MacSettings(
            tau=self.tau, max_prefix_share=self.max_prefix_share, capacity=self.capacity, band=self.band,
            sink_tokens=self.sink, max_gap=self.max_gap, min_gap=self.min_gap, max_age=self.max_age,
            seed_tokens=self.seed_tokens, summaries=self.summaries, min_context_tokens=self.min_context,
            stops_matching=False,
        )  # fmt: skip

    def limits(self, dim: int) -> Limits:
        served = self.served
        distance2 = 2 * dim * (1 - self.tau) ** 2
        return Limits(
            self.sink, self.band, distance2, served.most_gap, self.max_age, self.min_context, self.max_prefix_share,
            self.min_gap,
        )  # fmt: skip

    def begin(self, prompt: PromptLayer) -> MacState:
        requests, heads, _, dim = prompt.queries.shape
        device, shape = prompt.queries.device, (requests, heads, self.capacity)
        ring = Ring(
            queries=torch.zeros(*shape, dim, dtype=torch.bfloat16, device=device),
            norms=torch.full(shape, torch.inf, device=device),
            outs=torch.zeros(*shape, dim, dtype=_SUMMARIES[self.summaries], device=device),
            lses=torch.zeros(shape, device=device),
            origins=torch.zeros(shape, dtype=torch.int32, device=device),
            is_estimate=torch.zeros(shape, dtype=torch.uint8, device=device),
        )
        attend, num_seeds = Dense().attend, self.served.num_seeds
        for request, length in enumerate(prompt.lengths.tolist()):
            first = max(0, length - num_seeds)
            own = (request, slice(None), slice(first, length))
            query = PrefillQuery(
                prompt.layer, prompt.queries[own].transpose(0, 1).contiguous(),
                prompt.pre_rope_queries[own].transpose(0, 1), prompt.keys[request, :, :length],
                prompt.values[request, :, :length], torch.arange(first, length, device=device), first, length,
                dim**-0.5, None,
            )  # fmt: skip
            if num_seeds:
                seed(ring, request, query, self.limits(dim), num_seeds, attend)
        return MacState(
            ring,
            torch.arange(requests, dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            torch.zeros(NUM_COUNTS, dtype=torch.int64, device=device),
        )

    def step(self, step: Step, state: MacState) -> StepResult:
        requests, dim = len(step.query), step.query.shape[-1]
        kv_heads, cells = step.keys.shape[1], step.lengths - 1
        limits, query = self.limits(dim), step.pre_rope_query.contiguous()
        skips = torch.zeros(3, requests, dtype=torch.int32, device=cells.device)
        own = RowRings(state.ring, state.rings, cells)
        matched = match(query, own, skips, limits, state.is_matching, state.counts, kv_heads)
        begin, end, cut = matched.bounds.unsqueeze(-1)  # [requests, heads, 1]
        position = torch.arange(step.longest, device=cells.device)
        near = ((position < begin) | (position >= cut)) & valid_positions(step.lengths, step.longest)
        far = (position >= end) & (position < cut)
        logits = step_logits(step)
        parts = [_attend(step, logits, chosen) for chosen in (near, far)]
        is_estimate = torch.zeros(requests, dtype=torch.uint8, device=cells.device)
        whole = complete(*parts, None, query, matched, own, limits, is_estimate)
        is_hit, read = matched.entries >= 0, near | far
        keys = read.sum(-1).float()
        rows = read.view(requests, kv_heads, -1, step.longest).any(2).sum(-1).float() + self._ring_rows(step, limits)
        skipped = ((end - begin)[..., 0] * is_hit).float().mean(1) / step.lengths
        gaps = torch.where(is_hit, cells[:, None] - (end[..., 0].long() - 1 + self.band), 0)
        return StepResult(whole.out, whole.lse, keys, rows, is_hit.float().mean(1), skipped, gaps)

    def _ring_rows(self, step: Step, limits: Limits) -> torch.Tensor:
        """Return the bytes of rings that a KV head's query heads read and write, in rows of KV: float32 `[requests,
        1]`.
        """
        dim = step.query.shape[-1]
        looks = (step.lengths >= limits.min_cells) & (step.lengths - limits.band > limits.sink)
        summary = dim * _SUMMARIES[self.summaries].itemsize + 2 * _NUMBER_BYTES
        look = limits.max_gap * (dim * _CHANNEL_BYTES + 2 * _NUMBER_BYTES) + summary
        written = dim * _CHANNEL_BYTES + _NUMBER_BYTES + summary
        return (step.group * (look * looks.float() + written) / (2 * dim * _CHANNEL_BYTES))[:, None]


def _attend(step: Step, logits: torch.Tensor, chosen: torch.Tensor) -> Partial:
    """Attend over chosen cells. chosen: bool `[requests, heads, n]`; logits: same shape, -inf behind each length."""
    logits = logits.masked_fill(~chosen, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num_(0.0)
    return Partial(weigh_values(weights, step.values, valid_positions(step.lengths, step.longest)), lse)
