"""Float64 numpy oracles of MOMO's steps, written from the paper's formulas, query by query and head by head."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SparseRow:
    """One sparse query of one head: its output, lse, and every block's score (eq. 3, scaled)."""

    out: np.ndarray
    lse: float
    scores: np.ndarray


def attend_row(query: np.ndarray, keys: np.ndarray, values: np.ndarray, key_block: int, scale: float) -> SparseRow:
    """query `[dim]`; keys, values `[context, dim]`: all that it sees."""
    logits = keys @ query * scale
    weights = np.exp(logits - logits.max())
    cuts = np.arange(key_block, len(logits), key_block)
    scores = np.array([logits.max() + np.log(part.sum()) for part in np.split(weights, cuts)])
    return SparseRow(weights @ values / weights.sum(), float(logits.max() + np.log(weights.sum())), scores)


def top(scores: np.ndarray, k: int) -> set[int]:
    """The k largest; of equal ones the earlier."""
    return set(np.argsort(-scores, kind="stable")[:k].tolist())


def unite(chosen: list[dict[int, float]], lses: list[float], below: int, most: int) -> list[int]:
    """Key blocks that a query block reads besides its own, heaviest first behind the sink, of one head.

    chosen: each sparse row's blocks and their scores; below: the query block's first key block; most: of the list.
    """
    if below == 0:
        return []
    weights: dict[int, float] = {}
    for blocks, lse in zip(chosen, lses, strict=True):
        for block, score in blocks.items():
            if 0 < block < below:
                weights[block] = weights.get(block, 0.0) + float(np.exp(score - lse)) / len(chosen)
    return [0, *sorted(weights, key=lambda block: (-weights[block], block))[: most - 1]]


def attend_listed(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, blocks: list[int], query_block: int,
    key_block: int, scale: float,
) -> tuple[np.ndarray, float]:  # fmt: skip
    """One query of one head over listed key blocks and the tokens of its own query block up to itself."""
    first = position // query_block * query_block
    tokens = [token for block in blocks for token in range(block * key_block, (block + 1) * key_block)]
    tokens += range(first, position + 1)
    row = attend_row(query, keys[tokens], values[tokens], len(tokens), scale)
    return row.out, row.lse
