"""Describe matrices in host memory to the CPU's kernels: addresses, and the format of their rows.

A matrix is MATRIX_COLUMNS int64, whatever its format.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from transfer.expert_exchange import PackedRows
from transfer.simd.packed_gains import (
    BFLOAT16,
    EXPONENT,
    FLOAT16,
    FLOAT32,
    GAINS,
    GROUPS,
    MATRIX_COLUMNS,
    MIDDLE,
    NO_OFFSET,
    NUM_RUNS,
    ROW_BLOCK,
    ROW_BYTES,
    ROWS,
    RUNS,
    SCALE_TYPE,
    SCALES,
    ZEROS,
)
from transfer.simd.packed_rows import LEAST_GROUP, RUN, packed_kind, unit_columns
from transfer.simd.rounded_rows import rounded_kind
from transfer.simd.row_tiles import NUMBERS

Rows = Tensor | PackedRows

KINDS: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16, torch.float32: np.float32}
SCALE_TYPES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32, torch.uint8: EXPONENT}
MIDDLES = {"int4": 8, "int8": 128, "fp8": 0, "fp4": NO_OFFSET}


def inner_of(matrix: Rows) -> int:
    """Return the number of columns."""
    return matrix.inner if isinstance(matrix, PackedRows) else matrix.shape[1]


def nbytes_of(matrix: Rows) -> int:
    tensors = matrix.tensors if isinstance(matrix, PackedRows) else [matrix]
    return sum(tensor.nbytes for tensor in tensors)


def is_in_integers(matrix: Rows) -> bool:
    """Return whether rows have a format that can be multiplied in integers (`transfer.simd.rounded_rows`)."""
    return isinstance(matrix, PackedRows) and matrix.number in NUMBERS


def kind_of(matrix: Rows, in_integers: bool = False) -> Any:
    """Return the value whose numba type stands for the matrix's rows (`transfer.simd.rounded_rows.any_products`)."""
    if not isinstance(matrix, PackedRows):
        return KINDS[matrix.dtype](0)
    kind = packed_kind(matrix.number, unit_columns(matrix.number) // _columns_a_gain(matrix))
    return rounded_kind(kind) if in_integers and is_in_integers(matrix) else kind


def scale_dtypes(matrix: PackedRows) -> tuple[torch.dtype, ...]:
    """Return the dtypes that scales without runs may have: floats, and for FP4 also exponents."""
    return tuple(dtype for dtype, kind in SCALE_TYPES.items() if kind != EXPONENT or matrix.number == "fp4")


def columns_of(matrix: Rows) -> list[int]:
    """Return the matrix as MATRIX_COLUMNS of `transfer.simd.packed_gains`."""
    found = [0] * MATRIX_COLUMNS
    if not isinstance(matrix, PackedRows):
        found[ROWS], found[ROW_BYTES] = matrix.data_ptr(), matrix.shape[1] * matrix.itemsize
        return found
    words, scales = matrix.words, matrix.scales
    found[ROWS], found[ROW_BYTES], found[SCALES] = words.data_ptr(), words.shape[1] * words.itemsize, scales.data_ptr()
    found[GROUPS], found[ROW_BLOCK], found[GAINS] = scales.shape[1], matrix.row_block, num_gains(matrix)
    if matrix.runs is not None:
        found[RUNS], found[NUM_RUNS] = matrix.runs.data_ptr(), matrix.runs.shape[1]
        return found
    found[SCALE_TYPE] = SCALE_TYPES[scales.dtype]
    found[ZEROS] = 0 if matrix.zeros is None else matrix.zeros.data_ptr()
    found[MIDDLE] = MIDDLES[matrix.number]
    return found


def num_gains(matrix: Rows) -> int:
    """Return the gains of a row, with room for whole groups; 0 for plain rows."""
    if not isinstance(matrix, PackedRows):
        return 0
    groups, each = matrix.scales.shape[1], _columns_a_gain(matrix)
    return -(-matrix.inner // each) if groups == 1 else groups * (matrix.group // each)


def _columns_a_gain(matrix: PackedRows) -> int:
    """Return the most columns that may share a gain."""
    unit = unit_columns(matrix.number)
    if matrix.scales.shape[1] == 1:
        return unit
    return next(columns for columns in (unit, RUN, LEAST_GROUP) if matrix.group % columns == 0)
