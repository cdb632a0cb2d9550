"""Compute matrix products in the compiled decode step, for a few tokens at a time, with the operation after each of
them.

Row vectors are float32 `[tokens, inner]`, matrices `[rows, inner]` of float32, bf16 or packed. A matrix is described by
TABLE_COLUMNS int64: what `transfer.simd.packed_gains` needs, and the address of the function that multiplies rows of
its kind, so that one compiled step serves all mixtures of kinds. Rows in tiles are multiplied in integers
(`transfer.simd.row_tiles`). An output is one dot product over its own row and token, in one order, whatever the batch
and the number of threads. Bytes moved: a matrix once for all tokens; four or TILE of its rows stay in the cache for
that long.
"""

import numba
import numpy as np

from gpu.operations.arguments import FINITE_OR_NOT
from transfer.model_constants import TILE
from transfer.simd.exp import exp
from transfer.simd.features import LANES
from transfer.simd.inner import inner
from transfer.simd.packed_gains import GAINS, MATRIX_COLUMNS, ROW_BYTES, fill_gains
from transfer.simd.packed_gains import ROWS as FIRST_ROW
from transfer.simd.packed_rows import is_packed, product_block
from transfer.simd.region import call_rows, pointer_to
from transfer.simd.row_tiles import fill_tile_gains, round_token, tile_products
from transfer.simd.team import claim, end_stage
from transfer.simd.vectors import address_of

ROWS = 4  # rows of a matrix that are multiplied together
ITEM_BYTES = 32_768  # of a matrix, which a thread claims at once
AHEAD_BYTES = 6144  # how far before its use a weight is fetched

_WIDE = 8 if LANES == 16 else 4  # tokens of the largest block; registers hold its sums, its rows and a vector
_WIDE_ROWS = 2
_dot_wide = product_block(_WIDE_ROWS, _WIDE)
_dot_four = product_block(ROWS, 4)
_dot_two = product_block(ROWS, 2)
_dot_one = product_block(ROWS, 1)

_tile_wide = tile_products(_WIDE)
_tile_four = tile_products(4)
_tile_two = tile_products(2)
_tile_one = tile_products(1)

# Columns of a matrix's row, behind those of `packed_gains`: its columns; the C function that multiplies some of its
# rows (`multiply_rows`, `multiply_tile`); the address of its columns' order, int64 `[inner]`, 0: they are in order; the
# number of rows multiplied together; and, if rows are in tiles and tokens rounded, the columns of a unit and of a gain,
# else 0.
INNER, MULTIPLY, ORDER, TOGETHER, UNIT, GROUP, TABLE_COLUMNS = range(MATRIX_COLUMNS, MATRIX_COLUMNS + 7)


@inner
def multiply_rows(kind, matrix, row, x, x_stride, tokens, out, out_stride, gains):
    """Compute `product` of four rows of a matrix, from `row` on.

    matrix: address of its TABLE_COLUMNS. gains: room for those of four rows (`num_gains`).
    """
    m = numba.carray(pointer_to(matrix), (TABLE_COLUMNS,), np.int64)
    if is_packed(kind):
        fill_gains(m, row, ROWS, gains, gains + 4 * ROWS * m[GAINS])
    rows = m[FIRST_ROW] + row * m[ROW_BYTES]
    product(kind, rows, m[ROW_BYTES], gains, m[GAINS], m[INNER], x, x_stride, tokens, out, out_stride, AHEAD_BYTES)


@inner
def multiply_tile(kind, matrix, row, x, x_stride, tokens, out, out_stride, gains):
    """Compute products of a tile, which begins with `row`, with the arguments of `multiply_rows`.

    x: rounded tokens. gains: room for those of TILE rows.
    """
    m = numba.carray(pointer_to(matrix), (TABLE_COLUMNS,), np.int64)
    offsets, tile, columns = gains + 4 * TILE * m[GAINS], m[FIRST_ROW] + row * m[ROW_BYTES], m[INNER]
    fill_tile_gains(m, row, gains, offsets)
    token = 0
    while tokens - token >= _WIDE:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _tile_wide(kind, tile, gains, offsets, x_at, x_stride, columns, out_at, out_stride, AHEAD_BYTES)
        token += _WIDE
    if tokens - token >= 4:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _tile_four(kind, tile, gains, offsets, x_at, x_stride, columns, out_at, out_stride, AHEAD_BYTES)
        token += 4
    if tokens - token >= 2:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _tile_two(kind, tile, gains, offsets, x_at, x_stride, columns, out_at, out_stride, AHEAD_BYTES)
        token += 2
    if tokens - token >= 1:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _tile_one(kind, tile, gains, offsets, x_at, x_stride, columns, out_at, out_stride, AHEAD_BYTES)


@inner
def product(kind, rows, row_bytes, gains, room, inner, x, x_stride, tokens, out, out_stride, ahead):
    """Compute `out[token, 0 .. 4]` of the four rows at `rows`, for all tokens.

    All arguments are addresses; strides are in float32 elements. gains, room: for packed rows (`product_block`).
    """
    token, offsets = 0, gains + 4 * ROWS * room
    while tokens - token >= _WIDE:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        for row in range(0, ROWS, _WIDE_ROWS):
            row_at, behind = rows + row * row_bytes, 4 * room * row
            _dot_wide(kind, row_at, gains + behind, offsets + behind, room, x_at, x_stride, inner, out_at + 4 * row,
                      out_stride, ahead)  # fmt: skip
        token += _WIDE
    if tokens - token >= 4:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _dot_four(kind, rows, gains, offsets, room, x_at, x_stride, inner, out_at, out_stride, ahead)
        token += 4
    if tokens - token >= 2:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _dot_two(kind, rows, gains, offsets, room, x_at, x_stride, inner, out_at, out_stride, ahead)
        token += 2
    if tokens - token >= 1:
        x_at, out_at = x + 4 * token * x_stride, out + 4 * token * out_stride
        _dot_one(kind, rows, gains, offsets, room, x_at, x_stride, inner, out_at, out_stride, ahead)


@inner
def rows_an_item(row_bytes):
    return max(TILE, ITEM_BYTES // row_bytes // TILE * TILE)


@inner
def count_items(rows, row_bytes):
    """Return how many items a matrix is cut into; a thread claims one at a time."""
    return -(-rows // rows_an_item(row_bytes))


@inner
def prepared(matrix, x, tokens, ordered):
    """Return x as the matrix takes it, with its columns in order or rounded: x itself, or `ordered`, filled.

    ordered: float32 of this thread with enough room.
    """
    if matrix[UNIT] != 0:
        for token in range(tokens):
            round_token(
                address_of(x[token]), matrix[INNER], matrix[UNIT], matrix[GROUP], address_of(ordered[token])
            )  # fmt: skip
        return ordered
    if matrix[ORDER] == 0:
        return x
    order = numba.carray(pointer_to(matrix[ORDER]), (matrix[INNER],), np.int64)
    for token in range(tokens):
        for i in range(len(order)):
            ordered[token, i] = x[token, order[i]]
    return ordered


@inner
def project(team, stage, matrix, rows, x, tokens, gains, out):
    """Compute `out[:, :rows] = x @ matrix.T`; `rows` is at least four.

    x: `prepared`, here and below. gains: float32 `[num_gains]` of this thread.
    """
    row_bytes, at, multiply, gains_at = matrix[ROW_BYTES], address_of(matrix), matrix[MULTIPLY], address_of(gains)
    together = matrix[TOGETHER]
    items, step = count_items(rows, row_bytes), rows_an_item(row_bytes)
    x_at, out_at, done = address_of(x), address_of(out), 0
    item = claim(team, stage, items)
    while item >= 0:
        for begin in range(item * step, min(rows, (item + 1) * step), together):
            row = min(begin, rows - together)  # the last block of an odd vocabulary computes some rows twice
            call_rows(multiply, at, row, x_at, x.shape[1], tokens, out_at + 4 * row, out.shape[1], gains_at)
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@inner
def project_and_add(team, stage, matrix, rows, x, tokens, gains, tile, out):
    """Compute `out[:, :rows] += x @ matrix.T`; `rows` is a multiple of those multiplied together.

    tile: float32 `[2, tokens, TILE]` of this thread.
    """
    row_bytes, at, multiply, gains_at = matrix[ROW_BYTES], address_of(matrix), matrix[MULTIPLY], address_of(gains)
    together = matrix[TOGETHER]
    items, step = count_items(rows, row_bytes), rows_an_item(row_bytes)
    x_at, tile_at, done = address_of(x), address_of(tile), 0
    item = claim(team, stage, items)
    while item >= 0:
        for row in range(item * step, min(rows, (item + 1) * step), together):
            call_rows(multiply, at, row, x_at, x.shape[1], tokens, tile_at, TILE, gains_at)
            for token in range(tokens):
                for r in range(together):
                    out[token, row + r] += tile[0, token, r]
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@inner
def project_gated(team, stage, matrix, rows, x, tokens, gains, tile, out):
    """Compute `out = silu(gate) * up` of `matrix`, `[2 * rows, inner]`, gates first.

    `rows` is a multiple of those multiplied together.
    """
    row_bytes, at, multiply, gains_at = matrix[ROW_BYTES], address_of(matrix), matrix[MULTIPLY], address_of(gains)
    together = matrix[TOGETHER]
    items, step = count_items(rows, 2 * row_bytes), rows_an_item(2 * row_bytes)
    x_at, gate_at, up_at = address_of(x), address_of(tile[0]), address_of(tile[1])
    done = 0
    item = claim(team, stage, items)
    while item >= 0:
        for row in range(item * step, min(rows, (item + 1) * step), together):
            call_rows(multiply, at, row, x_at, x.shape[1], tokens, gate_at, TILE, gains_at)
            call_rows(multiply, at, rows + row, x_at, x.shape[1], tokens, up_at, TILE, gains_at)
            _gate(tile, tokens, row, together, out)
        done += 1
        item = claim(team, stage, items)
    end_stage(team, stage, items, done)


@inner
def _gate(tile, tokens, row, together, out):
    for token in range(tokens):
        for r in range(together):
            gate = tile[0, token, r]
            out[token, row + r] = gate / (np.float32(1.0) + exp(-gate)) * tile[1, token, r]


@inner(fastmath=FINITE_OR_NOT)
def normalise(x, weight, eps, tokens, out):
    """Compute RMSNorm of rows: `out[:, :hidden] = weight * x / rms(x)`. weight: float32 `[hidden]`."""
    hidden = weight.shape[0]
    for token in range(tokens):
        squares = np.float32(0.0)
        for i in range(hidden):
            squares += x[token, i] * x[token, i]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(hidden) + eps)
        for i in range(hidden):
            out[token, i] = x[token, i] * scale * weight[i]
