"""Attend exactly to all offloaded tokens of one KV head, from their rows in host memory, in the calling thread."""

import math

import numba
import numpy as np

import transfer.simd  # noqa: F401, it makes numba keep in memory what it cannot cache
from gpu.methods.indexed.host_rows import widen_rows
from gpu.operations.host_rows.host_bytes import bytes_at
from transfer import places
from transfer.tier_shape import Rows

BLOCK_ROWS = 2_048  # rows that are restored to float32 at once


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _score(rows, queries, logits, first):
    for row in range(rows.shape[0]):
        for head in range(queries.shape[0]):
            total = np.float32(0.0)
            for column in range(rows.shape[1]):
                total += rows[row, column] * queries[head, column]
            logits[head, first + row] = total


@numba.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def _add(rows, weights, first, out):
    for row in range(rows.shape[0]):
        for head in range(weights.shape[0]):
            weight = weights[head, first + row]
            for column in range(rows.shape[1]):
                out[head, column] += weight * rows[row, column]


def _floats_at(address: int, count: int) -> np.ndarray:
    return bytes_at(address, 4 * count).numpy().view(np.float32)


def _restored(address: int, row_bytes: int, count: int, dim: int, rows: Rows) -> np.ndarray:
    """Return stored rows as float32 `[count, dim]`, before scales of int8 and the centre are applied."""
    stored = bytes_at(address, count * row_bytes).view(count, row_bytes)
    return widen_rows(stored, dim, rows).numpy()


def attend_exactly(
    table: np.ndarray, kv_head: int, num_tokens: int, queries: np.ndarray, rows: Rows
) -> tuple[np.ndarray, np.ndarray]:
    """Return out, float32 `[group, dim]`, and lse, float64 `[group]`, over the first tokens of a run.

    table: int64 `[COLUMNS, pieces]`, of one layer (`transfer.places`). queries: float32 `[group, dim]`.
    """
    group, dim = queries.shape
    logits, out = np.empty((group, num_tokens), np.float32), np.zeros((group, dim), np.float32)
    scaled = np.ascontiguousarray(queries) * np.float32(1 / math.sqrt(dim))
    for piece, first, count in _blocks(table, num_tokens):
        address, head_bytes, row_bytes = piece[places.KEYS : places.KEYS + 3]
        at = address + kv_head * head_bytes + (first - piece[places.RUN_BEGIN]) * row_bytes
        _score(_restored(at, row_bytes, count, dim, rows), scaled, logits, first)
        own = logits[:, first : first + count]
        if rows == "int8":
            own *= _floats_at(piece[places.KEY_SCALE], kv_head + 1)[kv_head]
        centre = _floats_at(piece[places.CENTRE], (kv_head + 1) * dim)[-dim:]
        own += (scaled @ centre)[:, None]
    most = logits.max(1, keepdims=True)
    np.exp(logits - most, out=logits)
    mass = logits.sum(1, dtype=np.float64)
    for piece, first, count in _blocks(table, num_tokens):
        address, head_bytes, row_bytes = piece[places.VALUES : places.VALUES + 3]
        at = address + kv_head * head_bytes + (first - piece[places.RUN_BEGIN]) * row_bytes
        restored = _restored(at, row_bytes, count, dim, rows)
        if rows == "int8":
            restored *= _floats_at(piece[places.VALUE_SCALE], (kv_head + 1) * dim)[-dim:]
        _add(restored, logits, first, out)
    return out / mass[:, None].astype(np.float32), most[:, 0] + np.log(mass)


def _blocks(table: np.ndarray, num_tokens: int) -> list[tuple[list[int], int, int]]:
    """Cut the run's first tokens into blocks; return each block's piece, first token and number of tokens."""
    blocks = []
    for piece in table.T.tolist():
        end = min(piece[places.RUN_END], num_tokens)
        for first in range(piece[places.RUN_BEGIN], end, BLOCK_ROWS):
            blocks.append((piece, first, min(BLOCK_ROWS, end - first)))
    return blocks
