"""LSH sampling in float64 numpy, from the formulas of MagicPIG (arXiv 2410.16179), section 4.3, eq. (10) and (11).

It shares nothing with what serves. Arrays are `[sets, ...]`: two sets of keys, each with queries of its own.
"""

from dataclasses import dataclass, replace

import numpy as np


def simhash(rows: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Codes `[..., tables]` of rows `[..., dim]`: bit i is the side of hyperplane `planes[table, i]`, `[dim]`."""
    tables, bits, dim = planes.shape
    above = rows @ planes.reshape(-1, dim).T > 0
    return above.reshape(*rows.shape[:-1], tables, bits) @ (1 << np.arange(bits))


def chance(cosine: np.ndarray, bits: int, tables: int) -> np.ndarray:
    """u of eq. (10): that a key at this cosine to the query shares two buckets with it, or more."""
    p = 1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi
    return 1 - (1 - p**bits) ** tables - tables * p**bits * (1 - p**bits) ** (tables - 1)


@dataclass(frozen=True)
class Stored:
    """Tokens as they are kept. keys: less `centre`, both `[sets, kv_heads, tokens, dim]`; codes: `[sets, kv_heads,
    tokens, tables]`; values: `[kv_heads, tokens, dim]`.
    """

    keys: np.ndarray
    centre: np.ndarray
    codes: np.ndarray
    values: np.ndarray

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    def first(self, tokens: int) -> "Stored":
        keys, centre, codes = (rows[:, :, :tokens] for rows in (self.keys, self.centre, self.codes))
        return Stored(keys, centre, codes, self.values[:, :tokens])

    def join(self, other: "Stored") -> "Stored":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Stored(*(np.concatenate(pair, axis=-2) for pair in pairs))

    def with_codes(self, codes: np.ndarray) -> "Stored":
        return replace(self, codes=codes)


@dataclass(frozen=True)
class Answer:
    """weights: of each token, `[sets, heads, tokens]`, their sum 1, exactly 0 where it was not drawn; lse: natural,
    `[sets, heads]`; out: `[sets, heads, dim]`; covered: tokens that it stands for, `[heads]`; rows: keys read, one that
    a group reads together once, keys: those scored, of all heads, both `[sets]`.
    """

    weights: np.ndarray
    lse: np.ndarray
    out: np.ndarray
    covered: np.ndarray
    rows: np.ndarray
    keys: np.ndarray


def attend(
    stored: Stored, queries: np.ndarray, query_codes: np.ndarray, exact: np.ndarray, covered: np.ndarray, bits: int
) -> Answer:
    """Eq. (11) over what is drawn, and all of what is read exactly; of nothing: zeros and an lse of -inf.

    queries: float64 `[sets, heads, dim]`; query_codes: `[sets, heads, tables]`; exact: bool `[tokens]`; covered: bool
    `[heads, tokens]`, what the answer is to stand for.
    """
    sets, heads, dim = queries.shape
    kv_heads, tables = stored.keys.shape[1], query_codes.shape[2]
    group = heads // kv_heads
    grouped = queries.reshape(sets, kv_heads, group, dim)
    buckets = query_codes.reshape(sets, kv_heads, group, 1, tables)
    drawn = (buckets == stored.codes[:, :, None]).sum(-1) >= 2  # [sets, kv_heads, group, tokens]
    products = np.einsum("skgd,sktd->skgt", grouped, stored.keys)
    norms = np.linalg.norm(grouped, axis=-1)[..., None] * np.linalg.norm(stored.keys, axis=-1)[:, :, None]
    u = chance(products / norms, bits, tables)
    logits = (products + np.einsum("skgd,sktd->skgt", grouped, stored.centre)) / np.sqrt(dim)
    asked = covered.reshape(kv_heads, group, stored.tokens)
    sampled, read = drawn & ~exact & asked, np.broadcast_to(exact & asked, drawn.shape)
    with np.errstate(divide="ignore"):
        logits = np.where(read, logits, np.where(sampled, logits - np.log(u), -np.inf))
        top = np.maximum(logits.max(-1, keepdims=True, initial=-np.inf), np.finfo(float).min)
        masses = np.exp(logits - top)
        lse = (np.log(masses.sum(-1)) + top[..., 0]).reshape(sets, heads)
    weights = masses / np.maximum(masses.sum(-1, keepdims=True), np.finfo(float).tiny)
    out = np.einsum("skgt,ktd->skgd", weights, stored.values).reshape(sets, heads, dim)
    rows = sampled.sum((1, 2, 3)) + read.any(2).sum((1, 2))
    keys = sampled.sum((1, 2, 3)) + read.sum((1, 2, 3))
    return Answer(weights.reshape(sets, heads, stored.tokens), lse, out, covered.sum(-1), rows, keys)
