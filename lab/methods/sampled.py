"""LSH sampling: keys that share two or more hash buckets with the query, weighted by the inverse probability of that.

Paper: MagicPIG, section 4.3, equations 10 and 11; K = bits_per_table, L = num_tables. The sink and the recent window
are read exactly. All keys between them count as offloaded. They are stored in their own dtype, minus the mean of the
keys offloaded at the first decode step (one mean for each KV head); keys that leave the window later are centred on the
same mean. The query is not centred. A head's sample represents the mass of all offloaded keys. Invariant: each
offloaded key's weight has expectation exp(logit) over the projections, so numerator and denominator of the output are
unbiased.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from evals.methods.attention_method import DecodeMethod, PromptLayer, Step, StepResult
from evals.methods.key_attention import attend_chosen, rows_apart, score_keys, weigh_values
from evals.tuning.collisions import LOOKUP_STRIPE_TOKENS, count_collisions, hash_rows, log_inclusion
from gpu.methods.sampled.hyperplanes import MAX_BITS_PER_TABLE, Projections, draw_projections


@dataclass(frozen=True, slots=True)
class Offloaded:
    """One layer's offloaded keys, allocated for the whole capacity. A new key is written when its token comes.

    centre: float32 `[requests, kv_heads, dim]`. rows: centred keys `[requests, kv_heads, capacity, dim]`. norms:
    float32 `[requests, kv_heads, capacity]`. codes: int16 (a uint16's bits) `[requests, kv_heads, tables, capacity]`.
    """

    projections: Projections
    centre: torch.Tensor
    rows: torch.Tensor
    norms: torch.Tensor
    codes: torch.Tensor


class Sampled(DecodeMethod):
    """The reference of sampling. `centred=false` hashes keys without centring, as the paper's ablation (figure 8)."""

    name: ClassVar[str] = "sampled"
    paper: ClassVar[str] = "MagicPIG"
    bits_per_table: int = Field(10, ge=1, le=MAX_BITS_PER_TABLE)
    num_tables: int = Field(150, ge=2)
    sink: int = Field(4, ge=0)
    window: int = Field(64, ge=0)
    centred: bool = True
    seed: int = 0
    dense_layers: str = Field("0+half", description="layers read in full; the paper keeps the first and the middle one")

    def begin(self, prompt: PromptLayer) -> Offloaded:
        position = torch.arange(prompt.capacity, device=prompt.keys.device)
        known = (position < prompt.lengths[:, None])[:, None, :, None]
        keys = prompt.keys.masked_fill(~known, 0)
        end = torch.minimum(prompt.lengths + 1 - self.window, prompt.lengths)  # end of what the first step offloads
        offloaded = (position >= self.sink) & (position < end[:, None])
        share = offloaded.float() / offloaded.sum(-1, keepdim=True).clamp(min=1)  # [requests, capacity]
        centre = torch.einsum("rn,rknd->rkd", share, keys.float()) * self.centred
        rows = (keys.float() - centre[:, :, None]).to(keys.dtype)
        projections = draw_projections(
            keys.shape[-1], self.bits_per_table, self.num_tables, self.seed, torch.float32, keys.device
        )
        codes = hash_rows(rows, projections).transpose(2, 3).contiguous()
        return Offloaded(projections, centre, rows, rows.float().norm(dim=-1), codes)

    def step(self, step: Step, state: Offloaded) -> StepResult:
        rest = self.attend_offloaded(step, state)
        exact = self._attend_resident(step)
        out, lse = merge(exact.out, exact.lse, rest.out, rest.lse)
        rows = exact.rows_read + rows_apart(rest.rows_read, step.keys.shape[1])
        return StepResult(out, lse, rest.keys_scored + exact.keys_scored, rows)

    def attend_offloaded(self, step: Step, state: Offloaded, excluded: torch.Tensor | None = None) -> StepResult:
        """Return the sample's part; call it once a step. rows_read: `[requests, heads]`, rows and tables of each head.

        excluded: bool `[requests, heads, longest]`, keys that the sample does not represent; tables still find them.
        """
        self._append(step, state)
        position = torch.arange(step.longest, device=step.lengths.device)
        end = (step.lengths - self.window)[:, None, None]
        offloaded = (position >= self.sink) & (position < end)  # [requests, 1, n]
        codes = hash_rows(step.query, state.projections)
        collisions = count_collisions(codes, state.codes[..., : step.longest])  # [requests, heads, n]
        sampled = (collisions >= 2) & offloaded
        if excluded is not None:
            sampled &= ~excluded
        out, lse = self._attend_sampled(step, state, sampled)
        index_read = self._index_rows((collisions * offloaded).sum(-1), step)
        keys = sampled.sum(-1).float()
        return StepResult(out, lse, keys, keys + index_read)

    def _append(self, step: Step, state: Offloaded) -> None:
        requests, last = torch.arange(len(step.lengths), device=step.lengths.device), step.lengths - 1
        new = step.keys[requests, :, last]  # [requests, kv_heads, dim]
        row = (new.float() - state.centre).to(new.dtype)
        state.rows[requests, :, last] = row
        state.norms[requests, :, last] = row.float().norm(dim=-1)
        state.codes[requests, :, :, last] = hash_rows(row, state.projections)

    def _attend_sampled(self, step: Step, state: Offloaded, sampled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and lse of equation 11 over the sample. The centre's part of the logits is added to the lse."""
        requests, heads, dim = step.query.shape
        products = score_keys(step.query, state.rows[:, :, : step.longest])
        norms = step.query.float().norm(dim=-1)[..., None] * state.norms[:, :, : step.longest].repeat_interleave(
            step.group, dim=1
        )
        log_u = log_inclusion(products / norms.clamp(min=torch.finfo().tiny), self.bits_per_table, self.num_tables)
        logits = (products * dim**-0.5 - log_u.float()).masked_fill_(~sampled, -torch.inf)
        lse = logits.logsumexp(-1)
        weights = (logits - lse[..., None]).exp_().masked_fill_(~sampled, 0)
        out = weigh_values(weights, step.values, sampled.view(requests, -1, step.group, step.longest).any(2))
        shift = torch.einsum("rkgd,rkd->rkg", step.query.float().view(requests, -1, step.group, dim), state.centre)
        return out, lse + shift.reshape(requests, heads) * dim**-0.5

    def _attend_resident(self, step: Step) -> StepResult:
        """Attend to the sink and the window exactly. The heads of a group read them together."""
        sink = torch.arange(self.sink, device=step.lengths.device).expand(len(step.lengths), -1)
        begin = (step.lengths - self.window).clamp(min=self.sink)[:, None]
        recent = begin + torch.arange(self.window, device=step.lengths.device)
        index = torch.cat([sink, recent], dim=1)[:, None].expand(-1, step.query.shape[1], -1)
        part = attend_chosen(step, index, index < step.lengths[:, None, None])
        return StepResult(part.out, part.lse, part.keys_scored, part.rows_read / step.group)

    def _index_rows(self, entries: torch.Tensor, step: Step) -> torch.Tensor:
        """Return the lookup's bytes in rows of KV: a uint16 for each entry, two int32 offsets a table and stripe."""
        stripes = math.ceil(step.longest / LOOKUP_STRIPE_TOKENS)
        index_bytes = 2 * entries + 8 * self.num_tables * stripes
        return index_bytes / (2 * 2 * step.query.shape[-1])  # a key and a value, two bytes a channel


def merge(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the partials of two disjoint sets, `[requests, heads, dim]` and `[requests, heads]`. An empty one has lse
    -inf.
    """
    total = torch.logaddexp(lse, other_lse)
    mine, other = ((part - total).exp().nan_to_num(0.0)[..., None] for part in (lse, other_lse))
    return mine * out.nan_to_num(0.0) + other * other_out, total
