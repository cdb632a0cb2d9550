"""Describe a matrix, plain or packed, to the compiled products: a row of TABLE_COLUMNS int64.

Each kind of rows has its own function, compiled once per machine and called by its address. Addresses are those of
tensors that the caller keeps alive.
"""

from functools import cache
from typing import Any

import numba

from gpu.operations.linear import numba_linear as product
from gpu.operations.linear.numba_linear import (
    GROUP,
    INNER,
    MULTIPLY,
    ORDER,
    ROWS,
    TABLE_COLUMNS,
    TOGETHER,
    UNIT,
    multiply_rows,
    multiply_tile,
)
from gpu.operations.linear.packed_matrix import Packed, Stored
from transfer.expert_exchange import PackedRows
from transfer.matrix_rows import Rows, columns_of, inner_of, kind_of, num_gains
from transfer.model_constants import TILE
from transfer.simd import emission, memory, packed_gains, packed_rows, region, row_tiles, values, vectors
from transfer.simd.packed_gains import EQUAL_PAIRS, GAINS, MATRIX_COLUMNS, SCALE_TYPE
from transfer.simd.packed_rows import packed_kind, unit_columns
from transfer.simd.region import version
from transfer.simd.row_tiles import GROUP_COLUMNS, token_floats

SOURCES = (product, emission, memory, packed_gains, packed_rows, region, row_tiles, values, vectors)


def rows_of(stored: Stored) -> Rows:
    """Return the rows as kernels need them; the order of columns is left out."""
    if not isinstance(stored, Packed):
        return stored
    return PackedRows(
        stored.kind, stored.inner, stored.group, stored.row_block, stored.words, stored.scales, stored.zeros,
        stored.runs,
    )  # fmt: skip


def table_row(stored: Stored) -> list[int]:
    """Return a matrix's row of TABLE_COLUMNS. `multiplies` must hold for a packed matrix."""
    rows, row = rows_of(stored), [0] * TABLE_COLUMNS
    tensors = [rows] if not isinstance(rows, PackedRows) else rows.tensors
    assert all(tensor.is_contiguous() for tensor in tensors), "compiled products read whole, contiguous tensors"
    row[:MATRIX_COLUMNS] = columns_of(rows)
    row[INNER], row[TOGETHER] = inner_of(rows), ROWS
    if isinstance(stored, Packed) and stored.in_tiles:
        row[TOGETHER], row[GAINS] = TILE, _num_gains(stored)
        row[UNIT], row[GROUP] = unit_columns(stored.kind), tile_group(stored)
        if stored.has_equal_pairs:
            row[SCALE_TYPE] = EQUAL_PAIRS
    row[MULTIPLY] = multiply_address(kind_of_rows(stored), row[UNIT] != 0)
    if isinstance(stored, Packed) and stored.order is not None:
        row[ORDER] = stored.order.data_ptr()
    return row


def gains_room(stored: Stored) -> int:
    """Return how many float32 a thread needs for the gains and offsets of rows that are multiplied together.

    For rows in tiles that includes the room to copy one of them (`copy_row`).
    """
    rows, count = rows_of(stored), _num_gains(stored)
    if isinstance(rows, PackedRows) and isinstance(stored, Packed) and stored.in_tiles:
        row_bytes = 8 * MATRIX_COLUMNS + sum(part.shape[1] * part.itemsize for part in rows.tensors)
        return max(2 * TILE * count, 2 * count + -(-row_bytes // 4))
    return 2 * ROWS * count


def _num_gains(stored: Stored) -> int:
    """Return the number of a row's gains, with room for whole groups; 0 for plain rows."""
    if isinstance(stored, Packed) and stored.in_tiles:
        return stored.scales.shape[1] * (stored.group // tile_group(stored))
    return num_gains(rows_of(stored))


def kind_of_rows(stored: Stored) -> Any:
    """Return the value whose type represents the matrix's rows in numba code."""
    if isinstance(stored, Packed) and stored.in_tiles:
        return packed_kind(stored.kind, unit_columns(stored.kind) // tile_group(stored))
    return kind_of(rows_of(stored))


def tile_group(packed: Packed) -> int:
    """Return the number of columns that share a gain in tiles."""
    return next(columns for columns in GROUP_COLUMNS if packed.group % columns == 0)


def token_room(stored: Stored) -> int:
    """Return how many float32 a thread needs to prepare a token for the matrix; 0: the token is taken as it is."""
    if not isinstance(stored, Packed):
        return 0
    if stored.in_tiles:
        return int(token_floats.py_func(stored.inner, unit_columns(stored.kind), tile_group(stored)))
    return 0 if stored.order is None else stored.inner


class Kind:
    """A kind of rows as a key: unlike plain values, zeros of different types are different keys."""

    def __init__(self, value: Any) -> None:
        self.value, self._type = value, str(numba.typeof(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._type == other._type

    def __hash__(self) -> int:
        return hash(self._type)


def multiply_address(kind: Any, in_tiles: bool) -> int:
    """Return the address of the C function `multiply_rows`, or `multiply_tile`, for such rows."""
    return int((_compile_tile if in_tiles else _compile)(Kind(kind), version(*SOURCES)).address)


@cache
def _compile(key: Kind, version: int) -> Any:
    """Compile `multiply_rows` for a kind.

    `version` represents the sources of all functions that it calls, which numba's file cache does not check.
    """
    kind = key.value

    @numba.cfunc("void(int64, int64, int64, int64, int64, int64, int64, int64)", cache=True)
    def multiply(matrix, row, x, x_stride, tokens, out, out_stride, gains):  # type: ignore[no-untyped-def]
        if version >= 0:
            multiply_rows(kind, matrix, row, x, x_stride, tokens, out, out_stride, gains)

    return multiply


@cache
def _compile_tile(key: Kind, version: int) -> Any:
    """Compile `multiply_tile` for a kind; see `_compile`."""
    kind = key.value

    @numba.cfunc("void(int64, int64, int64, int64, int64, int64, int64, int64)", cache=True)
    def multiply(matrix, row, x, x_stride, tokens, out, out_stride, gains):  # type: ignore[no-untyped-def]
        if version >= 0:
            multiply_tile(kind, matrix, row, x, x_stride, tokens, out, out_stride, gains)

    return multiply
