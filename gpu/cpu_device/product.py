"""Matrix products of the compiled decode step, for a few tokens at a time, with what follows each of them.

Row vectors are float32 `[tokens, inner]`, matrices `[rows, inner]` at an address, of float32 or bf16. It refuses to
know layers. Invariant: an output is one dot product over its own row and token, in one order, whatever the batch and
the number of threads. Bytes moved: a matrix once for all tokens; four of its rows stay in the cache for that long.
"""

import numba
import numpy as np

from transfer.simd.exp import exp
from transfer.simd.features import LANES
from transfer.simd.team import claim, end_stage
from transfer.simd.vectors import address_of, dot_block, size_of

ROWS = 4  # of a matrix, taken together
ITEM_BYTES = 32_768  # of a matrix, a thread's claim
AHEAD_BYTES = 6144  # how far before its use a weight is fetched
FINITE_OR_NOT = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; NaN and infinity stay what they are

_WIDE = 8 if LANES == 16 else 4  # tokens in the largest block; registers hold its sums, and rows, and a vector
_WIDE_ROWS = 2
_dot_wide = dot_block(_WIDE_ROWS, _WIDE)
_dot_four = dot_block(ROWS, 4)
_dot_two = dot_block(ROWS, 2)
_dot_one = dot_block(ROWS, 1)


@numba.njit(nogil=True)
def product(kind, matrix, inner, x, x_stride, tokens, out, out_stride, ahead):
    """`out[token, 0 .. 4]` of the four rows at `matrix`, for all tokens. Addresses; strides in float32 elements."""
    token = 0
    while tokens - token >= _WIDE:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        for row in range(0, ROWS, _WIDE_ROWS):
            row_at = matrix + row * inner * size_of(kind)
            _dot_wide(kind, row_at, inner, x_at, x_stride, inner, out_at + 4 * row, out_stride, ahead)
        token += _WIDE
    if tokens - token >= 4:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _dot_four(kind, matrix, inner, x_at, x_stride, inner, out_at, out_stride, ahead)
        token += 4
    if tokens - token >= 2:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _dot_two(kind, matrix, inner, x_at, x_stride, inner, out_at, out_stride, ahead)
        token += 2
    if tokens - token >= 1:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _dot_one(kind, matrix, inner, x_at, x_stride, inner, out_at, out_stride, ahead)


@numba.njit(nogil=True)
def rows_an_item(row_bytes):
    return max(ROWS, ITEM_BYTES // row_bytes // ROWS * ROWS)


@numba.njit(nogil=True)
def count_items(rows, row_bytes):
    """Claims that a matrix is cut into."""
    return -(-rows // rows_an_item(row_bytes))


@numba.njit(nogil=True)
def project(team, stage, kind, matrix, rows, inner, x, tokens, out):
    """`out[:, :rows] = x @ matrix.T`; `rows` at least four."""
    row_bytes = inner * size_of(kind)
    items, step = count_items(rows, row_bytes), rows_an_item(row_bytes)
    x_at, out_at, done = address_of(x), address_of(out), 0
    item = claim(team, stage, items)
    while item >= 0:
        for begin in range(item * step, min(rows, (item + 1) * step), ROWS):
            row = min(begin, rows - ROWS)  # the last block of an odd vocabulary computes some rows twice
            product(
                kind, matrix + row * row_bytes, inner, x_at, x.shape[1], tokens,
                out_at + 4 * row, out.shape[1], AHEAD_BYTES,
            )  # fmt: skip
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@numba.njit(nogil=True)
def project_and_add(team, stage, kind, matrix, rows, inner, x, tokens, tile, out):
    """`out[:, :rows] += x @ matrix.T`; `rows` a multiple of four; tile: float32 `[2, tokens, 4]` of this thread."""
    row_bytes = inner * size_of(kind)
    items, step = count_items(rows, row_bytes), rows_an_item(row_bytes)
    x_at, tile_at, done = address_of(x), address_of(tile), 0
    item = claim(team, stage, items)
    while item >= 0:
        for row in range(item * step, min(rows, (item + 1) * step), ROWS):
            product(
                kind, matrix + row * row_bytes, inner, x_at, x.shape[1], tokens, tile_at, ROWS, AHEAD_BYTES
            )  # fmt: skip
            for token in range(tokens):
                for r in range(ROWS):
                    out[token, row + r] += tile[0, token, r]
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@numba.njit(nogil=True)
def project_gated(team, stage, kind, matrix, rows, inner, x, tokens, tile, out):
    """`out = silu(gate) * up` of `matrix`, `[2 * rows, inner]` with gates first; `rows` a multiple of four."""
    row_bytes = inner * size_of(kind)
    items, step = count_items(rows, 2 * row_bytes), rows_an_item(2 * row_bytes)
    x_at, gate_at, up_at = address_of(x), address_of(tile[0]), address_of(tile[1])
    done = 0
    item = claim(team, stage, items)
    while item >= 0:
        for row in range(item * step, min(rows, (item + 1) * step), ROWS):
            gates, ups = matrix + row * row_bytes, matrix + (rows + row) * row_bytes
            product(kind, gates, inner, x_at, x.shape[1], tokens, gate_at, ROWS, AHEAD_BYTES)
            product(kind, ups, inner, x_at, x.shape[1], tokens, up_at, ROWS, AHEAD_BYTES)
            _gate(tile, tokens, row, out)
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@numba.njit(nogil=True)
def _gate(tile, tokens, row, out):
    for token in range(tokens):
        for r in range(ROWS):
            gate = tile[0, token, r]
            out[token, row + r] = gate / (np.float32(1.0) + exp(-gate)) * tile[1, token, r]


@numba.njit(nogil=True, fastmath=FINITE_OR_NOT)
def normalise(x, weight, eps, tokens, out):
    """RMSNorm of rows: `out[:, :hidden] = weight * x / rms(x)`; weight float32 `[hidden]`."""
    hidden = weight.shape[0]
    for token in range(tokens):
        squares = np.float32(0.0)
        for i in range(hidden):
            squares += x[token, i] * x[token, i]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + eps)
        for i in range(hidden):
            out[token, i] = x[token, i] * scale * weight[i]
