"""Measure the reads and errors of LSH sampling in one layer over a grid of (K, L), from queries and keys of one pass.

MagicPIG, section 4.3 and appendix F; paper: K = bits_per_table, L = num_tables. Invariant: a larger number of tables
begins with those of a smaller one, so one count of collisions gives all numbers of tables. Every setting is compared
with exact attention on the same queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evals.methods.attention_method import PromptLayer
from evals.methods.key_attention import matmul_float32
from evals.tuning.collisions import (
    LOOKUP_STRIPE_TOKENS,
    MAX_COMPARED,
    TABLES_AT_ONCE,
    count_collisions,
    hash_rows,
    log_inclusion,
)
from gpu.methods.sampled.hyperplanes import MAX_BITS_PER_TABLE, draw_projections


@dataclass(frozen=True, slots=True)
class Setting:
    bits_per_table: int
    num_tables: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits_per_table <= MAX_BITS_PER_TABLE or self.num_tables < 2:
            raise ValueError(
                f"grid: {self.bits_per_table} bits and {self.num_tables} tables; wanted 1 to {MAX_BITS_PER_TABLE} bits "
                "and two tables or more"
            )


@dataclass(frozen=True, slots=True)
class Resident:
    """Tokens that are read exactly, beside the sample."""

    sink: int
    window: int


@dataclass(slots=True)
class Tally:
    """Sums over query heads and positions: the share of offloaded keys read, and the relative error of the output."""

    read: float
    error: float
    terms: int


def table_memory_bytes(setting: Setting, tokens: int, layers: int, kv_heads: int) -> int:
    """Return the bytes of one context's hash tables: a uint16 for each token and table, and an int32 offset for each
    bucket and 32,768 tokens.
    """
    offsets = 4 * 2**setting.bits_per_table * math.ceil(tokens / LOOKUP_STRIPE_TOKENS)
    return layers * kv_heads * setting.num_tables * (2 * tokens + offsets)


class LayerSamples:
    """One layer's queries at some positions, and all its keys, centred by the keys offloaded at the first position."""

    def __init__(self, prompt: PromptLayer, positions: torch.Tensor, resident: Resident) -> None:
        """Take one request's queries at positions: int64 `[queries]`, ascending, the first beyond sink and window."""
        key = torch.arange(prompt.longest, device=positions.device)
        self.queries = prompt.queries[0][:, positions]  # [heads, queries, dim]
        keys, self.values = prompt.keys[0][:, : prompt.longest], prompt.values[0][:, : prompt.longest]
        self.keys = keys  # [kv_heads, n, dim]
        self.causal = key <= positions[:, None]  # [queries, n]
        self.offloaded = (key >= resident.sink) & (key <= positions[:, None] - resident.window)
        self.centre = keys[:, self.offloaded[0]].float().mean(1, keepdim=True)  # [kv_heads, 1, dim]
        self.rows = (keys.float() - self.centre).to(keys.dtype)
        self.norms = self.rows.float().norm(dim=-1)  # [kv_heads, n]

    def queries_at_once(self) -> int:
        """Return the number of positions that can be compared with all keys within MAX_COMPARED."""
        return max(1, MAX_COMPARED // (TABLES_AT_ONCE * self.queries.shape[0] * self.keys.shape[1]))

    def measure(self, grid: Sequence[Setting], seed: int) -> dict[Setting, Tally]:
        tallies = {setting: Tally(0.0, 0.0, 0) for setting in grid}
        for bits in sorted({setting.bits_per_table for setting in grid}):
            own = sorted((one for one in grid if one.bits_per_table == bits), key=lambda one: one.num_tables)
            dim, device = self.rows.shape[-1], self.rows.device
            projections = draw_projections(dim, bits, own[-1].num_tables, seed, torch.float32, device)
            key_codes = hash_rows(self.rows, projections).transpose(1, 2).contiguous()  # [kv_heads, tables, n]
            query_codes = hash_rows(self.queries, projections)  # [heads, queries, tables]
            for begin in range(0, self.queries.shape[1], self.queries_at_once()):
                part = slice(begin, begin + self.queries_at_once())
                self._measure_part(own, part, query_codes[:, part], key_codes, tallies)
        return tallies

    def _measure_part(
        self,
        settings: Sequence[Setting],
        part: slice,
        query_codes: torch.Tensor,
        key_codes: torch.Tensor,
        tallies: dict[Setting, Tally],
    ) -> None:
        """Add the sums of some positions, for settings with the same bits in ascending number of tables."""
        heads, count, _ = query_codes.shape
        kv_heads, dim = self.rows.shape[0], self.rows.shape[-1]
        query = self.queries[:, part].reshape(kv_heads, -1, dim)  # [kv_heads, group * queries, dim]
        shape = (heads, count, self.rows.shape[1])
        products = matmul_float32(query, self.rows.transpose(1, 2))
        norms = query.float().norm(dim=-1)[..., None] * self.norms[:, None]
        cosine = (products / norms.clamp(min=torch.finfo().tiny)).view(shape)
        logits = matmul_float32(query, self.keys.transpose(1, 2)).view(shape) * dim**-0.5
        exact = self._attend(logits.masked_fill(~self.causal[part], -torch.inf))
        centred = products.view(shape) * dim**-0.5
        shift = (query.float() @ self.centre.transpose(1, 2)).view(heads, count, 1) * dim**-0.5
        offloaded = self.offloaded[part]
        read_exactly = (logits - shift).masked_fill(~(self.causal[part] & ~offloaded), -torch.inf)
        collisions = torch.zeros(shape, dtype=torch.int16, device=cosine.device)
        counted = 0
        for setting in settings:
            tables = slice(counted, setting.num_tables)
            flat = query_codes[..., tables].reshape(1, heads * count, -1)
            collisions += count_collisions(flat, key_codes[None, :, tables]).view(shape)
            counted = setting.num_tables
            sampled = (collisions >= 2) & offloaded
            weighted = read_exactly.clone()
            log_u = log_inclusion(cosine[sampled], setting.bits_per_table, setting.num_tables).float()
            weighted[sampled] = centred[sampled] - log_u
            error = (self._attend(weighted) - exact).norm(dim=-1) / exact.norm(dim=-1)
            tally = tallies[setting]
            tally.read += (sampled.sum(-1) / offloaded.sum(-1)).sum().item()
            tally.error += error.sum().item()
            tally.terms += heads * count

    def _attend(self, logits: torch.Tensor) -> torch.Tensor:
        """Return softmax of `[heads, queries, n]` times the values: float32 `[heads, queries, dim]`."""
        heads, count, keys = logits.shape
        weights = logits.softmax(-1).view(self.values.shape[0], -1, keys).to(self.values.dtype)
        return matmul_float32(weights, self.values).view(heads, count, -1)
