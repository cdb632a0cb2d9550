"""Compute how likely LSH sampling takes a key, from its cosine with the query, and the table of weights.

paper (2410.16179): K = bits, L = tables. A key is sampled if it shares the query's bucket in two tables or more. For
small p**K, eq. (10) as written is a difference of numbers near 1, which cancels in float32. Here it is a binomial tail,
summed from its largest term. No constant is added to u, because that would bias the mass.
"""

import numpy as np

INTERVALS = 4096  # of the table, over cosines in [-1, 1]
LARGEST = 80.0  # nats: the most that -log u is; a key with such a u is never sampled
MAX_BITS, MAX_TABLES = 16, 512
_SMALL = 0.05  # below this many expected collisions the tail is summed term by term
_TERMS = 10


def sample_probability(cosine: np.ndarray, bits: int, tables: int) -> np.ndarray:
    """Return u of eq. (10), float64, in the shape of `cosine` (any; clamped to [-1, 1])."""
    p = 1.0 - np.arccos(np.clip(np.asarray(cosine, np.float64), -1.0, 1.0)) / np.pi
    return _two_or_more(p**bits, tables)


def log_weights(bits: int, tables: int) -> np.ndarray:
    """Return `-log u` at the borders of INTERVALS even intervals over the cosine, float32 `[INTERVALS + 2]`.

    The last entry repeats: a cosine of 1 interpolates towards it.
    """
    if not (1 <= bits <= MAX_BITS and 2 <= tables <= MAX_TABLES):
        raise ValueError(f"hash tables: asked {bits} bits and {tables} tables; wanted 1 to 16 bits and 2 to 512 tables")
    u = sample_probability(np.linspace(-1.0, 1.0, INTERVALS + 1), bits, tables)
    weights = np.minimum(-np.log(np.maximum(u, np.exp(-LARGEST))), LARGEST)
    return np.append(weights, weights[-1]).astype(np.float32)


def _two_or_more(x: np.ndarray | np.float64, tables: int) -> np.ndarray:
    """Return P[B >= 2] for B of `tables` trials of probability x."""
    x = np.asarray(x, np.float64)
    small = np.minimum(x, _SMALL / tables)
    term = tables * (tables - 1) / 2 * small**2 * np.exp((tables - 2) * np.log1p(-small))
    tail = np.zeros_like(x)
    for collisions in range(2, 2 + _TERMS):
        tail += term
        term = term * (tables - collisions) / (collisions + 1) * small / (1.0 - small)
    large = np.clip(x, _SMALL / tables, 1.0 - 1e-16)
    none = np.exp(tables * np.log1p(-large))
    one = tables * large * np.exp((tables - 1) * np.log1p(-large))
    return np.where(x < _SMALL / tables, tail, 1.0 - none - one)
