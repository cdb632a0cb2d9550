"""Describe a matrix, plain or of few bits, to the compiled products: a row of TABLE_COLUMNS int64.

Each kind of rows has a function of its own, compiled once a machine and called by its address. Addresses are those of
tensors that the caller keeps alive.
"""

from functools import cache
from typing import Any

import numba

from gpu.operations.linear import numba_linear as product
from gpu.operations.linear.numba_linear import INNER, MULTIPLY, ORDER, ROWS, TABLE_COLUMNS, multiply_rows
from gpu.operations.linear.packed_matrix import Packed, Stored
from transfer.expert_exchange import PackedRows
from transfer.matrix_rows import Rows, columns_of, inner_of, kind_of, num_gains
from transfer.simd import emission, memory, packed_gains, packed_rows, region, vectors
from transfer.simd.packed_gains import MATRIX_COLUMNS
from transfer.simd.region import version

SOURCES = (product, emission, memory, packed_gains, packed_rows, region, vectors)


def rows_of(stored: Stored) -> Rows:
    """Return the rows as kernels need them, without the order of the columns."""
    if not isinstance(stored, Packed):
        return stored
    return PackedRows(
        stored.kind, stored.inner, stored.group, stored.row_block, stored.words, stored.scales, stored.zeros,
        stored.runs,
    )  # fmt: skip


def table_row(stored: Stored) -> list[int]:
    """Return a row of TABLE_COLUMNS. A packed matrix is one that `multiplies` serves."""
    rows, row = rows_of(stored), [0] * TABLE_COLUMNS
    tensors = [rows] if not isinstance(rows, PackedRows) else rows.tensors
    assert all(tensor.is_contiguous() for tensor in tensors), "compiled products read whole, contiguous tensors"
    row[:MATRIX_COLUMNS] = columns_of(rows)
    row[INNER], row[MULTIPLY] = inner_of(rows), multiply_address(kind_of(rows))
    if isinstance(stored, Packed) and stored.order is not None:
        row[ORDER] = stored.order.data_ptr()
    return row


def gains_room(stored: Stored) -> int:
    """Return how many float32 a thread needs for the gains and offsets of rows that are taken together."""
    return 2 * ROWS * num_gains(rows_of(stored))


class Kind:
    """A kind of rows as a key: a zero of one type equals that of another."""

    def __init__(self, value: Any) -> None:
        self.value, self._type = value, str(numba.typeof(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self._type == other._type

    def __hash__(self) -> int:
        return hash(self._type)


def multiply_address(kind: Any) -> int:
    """Return the address of a C function `multiply_rows` for such rows."""
    return int(_compile(Kind(kind), version(*SOURCES)).address)


@cache
def _compile(key: Kind, version: int) -> Any:
    """Compile `multiply_rows` for a kind. `version` stands for the sources of all that is called, which numba's file
    cache does not look at.
    """
    kind = key.value

    @numba.cfunc("void(int64, int64, int64, int64, int64, int64, int64, int64)", cache=True)
    def multiply(matrix, row, x, x_stride, tokens, out, out_stride, gains):  # type: ignore[no-untyped-def]
        if version >= 0:
            multiply_rows(kind, matrix, row, x, x_stride, tokens, out, out_stride, gains)

    return multiply
