"""Count collisions of SimHash codes: how many tables a query and a key share, and the probability of two or more.

MagicPIG, section 4.3 and appendix F; paper: K = bits_per_table, L = num_tables. Invariant: probabilities are float64
and keep their digits even when they are small, where equation 10 in its written form loses them by cancellation.
"""

import math

import torch

from gpu.methods.sampled.hyperplanes import Projections, encode_reference

TABLES_AT_ONCE = 64
"""Tables whose collisions are counted together, in one byte for each key."""

MAX_COMPARED = 1 << 28
"""Codes compared at once: 256 MiB of results."""

LOOKUP_STRIPE_TOKENS = 32_768
"""Keys that one array of bucket offsets covers."""

SMALL_RATE = 1e-5
"""Expected collisions below which two terms of the binomial tail are more accurate than its difference from one."""


def count_collisions(query_codes: torch.Tensor, key_codes: torch.Tensor) -> torch.Tensor:
    """Return the number of tables in which each query head's code equals each key's: int16 `[requests, heads, n]`.

    query_codes: int16 `[requests, heads, tables]`. key_codes: int16 `[requests, kv_heads, tables, n]`, table-major, so
    that neighbouring keys are compared together.
    """
    requests, heads, tables = query_codes.shape
    kv_heads, count = key_codes.shape[1], key_codes.shape[3]
    grouped = query_codes.view(requests, kv_heads, heads // kv_heads, tables)
    counts = torch.zeros(requests, kv_heads, heads // kv_heads, count, dtype=torch.int16, device=key_codes.device)
    together = max(1, MAX_COMPARED // (heads * min(tables, TABLES_AT_ONCE) * count))
    for first in range(0, requests, together):
        rows = slice(first, first + together)
        for begin in range(0, tables, TABLES_AT_ONCE):
            piece = slice(begin, begin + TABLES_AT_ONCE)
            equal = key_codes[rows, :, None, piece] == grouped[rows, :, :, piece, None]
            counts[rows] += equal.view(torch.uint8).sum(3, dtype=torch.uint8)
    return counts.view(requests, heads, count)


def log_inclusion(cosine: torch.Tensor, bits_per_table: int, num_tables: int) -> torch.Tensor:
    """Return log u of equation 10: the log probability that a key shares two or more tables with the query. float64.

    cosine: between key and query, any float dtype and shape, clamped to [-1, 1].
    """
    angle_share = torch.acos(cosine.double().clamp(-1, 1)) / math.pi
    rate = (1 - angle_share).clamp(min=1e-15) ** bits_per_table  # p^K: one table agrees
    small = num_tables * rate < SMALL_RATE
    pairs = num_tables * (num_tables - 1) / 2
    leading = math.log(pairs) + 2 * rate.log() + torch.log1p(-2 / 3 * (num_tables - 2) * rate.clamp(max=SMALL_RATE))
    safe = rate.masked_fill(small, 0.5)
    none = num_tables * torch.log1p(-safe.clamp(max=1 - 1e-15))
    one = num_tables * safe * ((num_tables - 1) * torch.log1p(-safe.clamp(max=1 - 1e-15))).exp()
    return torch.where(small, leading, (-torch.expm1(none) - one).log())


def even_bucket_fraction(bits_per_table: int, num_tables: int) -> float:
    """Return equation 21: the share of keys that would be sampled if every key fell into each bucket alike, whatever
    its cosine.
    """
    return float(log_inclusion(torch.zeros(()), bits_per_table, num_tables).exp())


def hash_rows(rows: torch.Tensor, projections: Projections) -> torch.Tensor:
    """Return the codes of `[..., dim]` as int16 `[..., tables]`: uint16 bits, because few operations take uint16."""
    return encode_reference(rows, projections).view(torch.int16)
