"""Multiply and widen packed matrices on the CPU, for a few tokens, outside of the compiled step.

A call is one parallel region, with as many threads as torch has. A product equals that of the compiled step to the last
bit; a widened number is rounded once. Bytes moved: words and scales once; a widened matrix is also written.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from gpu.model.matrix_format import MULTIPLIED_COLUMNS, MULTIPLIED_GROUP
from gpu.operations.linear.numba_linear import (
    AHEAD_BYTES,
    INNER,
    ROWS,
    TABLE_COLUMNS,
    UNIT,
    count_items,
    prepared,
    project,
    rows_an_item,
)
from gpu.operations.linear.numba_matrix_table import SOURCES, Kind, gains_room, kind_of_rows, table_row, token_room
from gpu.operations.linear.packed_matrix import Packed
from transfer.host_pages import advise_huge_pages
from transfer.matrix_rows import KINDS
from transfer.simd import team
from transfer.simd.features import HAS_VECTORS
from transfer.simd.inner import inner
from transfer.simd.packed_gains import GAINS, MATRIX_COLUMNS, ROW_BYTES, fill_gains
from transfer.simd.packed_gains import ROWS as FIRST_ROW
from transfer.simd.packed_rows import packed_kind, widen_row
from transfer.simd.region import call_rows, pointer_to, start, version
from transfer.simd.row_tiles import copy_row
from transfer.simd.team import COUNTER_INT64, Team, claim, end_stage, new_counters

# The context of a region: addresses, strides and counts.
(MATRIX, NUM_ROWS, X, X_STRIDE, TOKENS, OUT, OUT_STRIDE, SCRATCH, ROOM, COUNTERS, WIDEN, ROUNDED, ROUNDED_STRIDE,
 CONTEXT_INT64) = range(14)  # fmt: skip
STAGES = 2  # tokens are rounded, if needed, and then multiplied
_LINE_FLOATS = 16  # of a cache line: threads write to different lines


def multiplies(packed: Packed) -> bool:
    """Return whether this module supports the matrix."""
    if not HAS_VECTORS or packed.device.type != "cpu" or packed.rows < ROWS or packed.inner % MULTIPLIED_COLUMNS:
        return False
    return packed.scales.shape[1] == 1 or packed.group % MULTIPLIED_GROUP == 0


def packed_product(x: Tensor, packed: Packed) -> Tensor:
    """Return `x @ packed.T`, float32 `[tokens, rows]`. `multiplies` must hold for the matrix.

    x: float32 `[tokens, inner]`, contiguous, columns in the matrix's order.
    """
    out = torch.empty(len(x), packed.rows)
    room = -(-token_room(packed) // _LINE_FLOATS) * _LINE_FLOATS if packed.in_tiles else 0
    rounded = torch.empty(len(x), room)
    _run(_compile_products(version(*SOURCES, team)), packed, {
        X: x.data_ptr(), X_STRIDE: x.shape[1], TOKENS: len(x), OUT: out.data_ptr(), OUT_STRIDE: packed.rows,
        ROUNDED: rounded.data_ptr(), ROUNDED_STRIDE: room,
    })  # fmt: skip
    return out


def widen_packed(packed: Packed) -> Tensor:
    """Return the matrix as `[rows, inner]` of packed.dtype, columns in its own order. `multiplies` must hold for it."""
    out = torch.empty(packed.rows, packed.inner, dtype=packed.dtype)
    advise_huge_pages(out.data_ptr(), out.nbytes)
    _run(_compile_widening(version(*SOURCES, team)), packed, {
        WIDEN: widen_address(packed, packed.dtype), OUT: out.data_ptr(),
        OUT_STRIDE: packed.inner * packed.dtype.itemsize,
    })  # fmt: skip
    return out


def widen_address(packed: Packed, dtype: torch.dtype) -> int:
    """Return the address of a C function that widens rows of such a matrix to `dtype`; `call_rows` calls it.

    It widens `tokens` rows from one on to `out`, whose rows are `out_stride` bytes apart.
    """
    return int(_compile_rows(Kind(kind_of_rows(packed)), Kind(KINDS[dtype](0)), version(*SOURCES)).address)


def widened_kinds(matrices: Iterable[object]) -> list[tuple[str, int]]:
    """Return the kinds of packed rows among these matrices, in the form that `compile_widening` takes."""
    return sorted({(one.kind, len(kind_of_rows(one))) for one in matrices if isinstance(one, Packed)})


def compile_widening(number: str, gains_per_unit: int, dtype: torch.dtype) -> None:
    """Compile the widening of a kind of rows (`packed_kind`) to `dtype`, into numba's cache."""
    _compile_widening(version(*SOURCES, team))
    _compile_rows(Kind(packed_kind(number, gains_per_unit)), Kind(KINDS[dtype](0)), version(*SOURCES))


def _run(work: Any, packed: Packed, given: dict[int, int]) -> None:
    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    room = -(-gains_room(packed) // _LINE_FLOATS) * _LINE_FLOATS
    matrix, counters = np.array(table_row(packed), np.int64), new_counters(STAGES, threads)
    scratch, context = np.empty((threads, room), np.float32), np.zeros(CONTEXT_INT64, np.int64)
    for column, value in given.items():
        context[column] = value
    context[[MATRIX, NUM_ROWS, SCRATCH, ROOM, COUNTERS]] = (
        matrix.ctypes.data, packed.rows, scratch.ctypes.data, room, counters.ctypes.data,
    )  # fmt: skip
    start(work.address, threads, context.ctypes.data)


@inner
def _team(c, me, threads):
    return Team(numba.carray(pointer_to(c[COUNTERS]), (STAGES, threads + 1, COUNTER_INT64), np.int64), me, threads)


@inner
def _given(context):
    """Return the context, and the matrix's row of the table."""
    c = numba.carray(pointer_to(context), (CONTEXT_INT64,), np.int64)
    return c, numba.carray(pointer_to(c[MATRIX]), (TABLE_COLUMNS,), np.int64)


@inner
def _round(team, matrix, x, rounded):
    """Round all tokens, each by one thread."""
    items, done = len(x), 0
    token = claim(team, 0, items)
    while token >= 0:
        prepared(matrix, x[token : token + 1], 1, rounded[token : token + 1])
        done += 1
        token = claim(team, 0, items)
    end_stage(team, 0, items, done)


@cache
def _compile_products(version: int) -> Any:
    """Compile the C function of a product, which gets the address of its context.

    `version` represents the sources of all functions that it calls, which numba's file cache does not check.
    """

    @numba.cfunc("void(int64, int64, int64)", cache=True)
    def work(me, threads, context):  # type: ignore[no-untyped-def]
        if version < 0:
            return
        c, matrix = _given(context)
        x = numba.carray(pointer_to(c[X]), (c[TOKENS], c[X_STRIDE]), np.float32)
        out = numba.carray(pointer_to(c[OUT]), (c[TOKENS], c[OUT_STRIDE]), np.float32)
        gains = numba.carray(pointer_to(c[SCRATCH] + 4 * c[ROOM] * me), (c[ROOM],), np.float32)
        ours = _team(c, me, threads)
        if matrix[UNIT] != 0:
            rounded = numba.carray(pointer_to(c[ROUNDED]), (c[TOKENS], c[ROUNDED_STRIDE]), np.float32)
            _round(ours, matrix, x, rounded)
            x = rounded
        project(ours, 1, matrix, c[NUM_ROWS], x, c[TOKENS], gains, out)

    return work


@cache
def _compile_widening(version: int) -> Any:
    """Compile the C function that widens a whole matrix; see `_compile_products`."""

    @numba.cfunc("void(int64, int64, int64)", cache=True)
    def work(me, threads, context):  # type: ignore[no-untyped-def]
        if version < 0:
            return
        c, matrix = _given(context)
        rows, row_bytes, ours = c[NUM_ROWS], matrix[ROW_BYTES], _team(c, me, threads)
        items, step, done = count_items(rows, row_bytes), rows_an_item(row_bytes), 0
        item = claim(ours, 0, items)
        while item >= 0:
            first, end = item * step, min(rows, (item + 1) * step)
            call_rows(c[WIDEN], c[MATRIX], first, 0, 0, end - first, c[OUT] + first * c[OUT_STRIDE], c[OUT_STRIDE],
                      c[SCRATCH] + 4 * c[ROOM] * me)  # fmt: skip
            done += 1
            item = claim(ours, 0, items)
        end_stage(ours, 0, items, done)

    return work


@cache
def _compile_rows(rows: Kind, numbers: Kind, version: int) -> Any:
    """Compile `widen_row` for several rows, from one kind to another; see `_compile_products`."""
    kind, out_kind = rows.value, numbers.value

    @numba.cfunc("void(int64, int64, int64, int64, int64, int64, int64, int64)", cache=True)
    def widen(matrix, row, _x, _x_stride, count, out, out_bytes, gains):  # type: ignore[no-untyped-def]
        if version < 0:
            return
        m = numba.carray(pointer_to(matrix), (TABLE_COLUMNS,), np.int64)
        offsets = gains + 4 * m[GAINS]
        alone = numba.carray(pointer_to(offsets + 4 * m[GAINS]), (MATRIX_COLUMNS,), np.int64)
        for own in range(count):
            if m[UNIT] != 0:
                copy_row(m, row + own, alone)
                fill_gains(alone, 0, 1, gains, offsets)
                words = alone[FIRST_ROW]
            else:
                fill_gains(m, row + own, 1, gains, offsets)
                words = m[FIRST_ROW] + (row + own) * m[ROW_BYTES]
            widen_row(kind, out_kind, words, gains, offsets, m[INNER], out + own * out_bytes, AHEAD_BYTES)

    return widen
