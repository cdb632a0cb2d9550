"""Matrices of experts in host memory as the kernels are told of them: addresses, and what their rows are made of.

It refuses to know layers and asks. Invariant: what the kernels have no code for is named here in one line, and nothing
else reaches them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cpu.packed_gains import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GAINS,
    GROUPS,
    MATRIX_COLUMNS,
    MIDDLE,
    NUM_RUNS,
    ROW_BLOCK,
    ROW_BYTES,
    ROWS,
    RUNS,
    SCALE_TYPE,
    SCALES,
    ZEROS,
)
from transfer.expert_exchange import PackedRows
from transfer.simd.packed_rows import BITS, LEAST_GROUP, RUN, packed_kind, unit_columns
from transfer.simd.vectors import LINE_BYTES

Rows = Tensor | PackedRows

_KINDS: dict[torch.dtype, Any] = {torch.bfloat16: np.uint16, torch.float32: np.float32}
_SCALE_TYPES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


def inner_of(matrix: Rows) -> int:
    """Columns."""
    return matrix.inner if isinstance(matrix, PackedRows) else matrix.shape[1]


def nbytes_of(matrix: Rows) -> int:
    tensors = matrix.tensors if isinstance(matrix, PackedRows) else [matrix]
    return sum(tensor.nbytes for tensor in tensors)


def kind_of(matrix: Rows) -> Any:
    """What stands for its rows in numba code (`transfer.simd.packed_rows.product_block`)."""
    if isinstance(matrix, PackedRows):
        return packed_kind(matrix.number, unit_columns(matrix.number) // _columns_a_gain(matrix))
    return _KINDS[matrix.dtype](0)


def columns_of(matrix: Rows) -> list[int]:
    """Of `cpu.packed_gains`, MATRIX_COLUMNS."""
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
    found[SCALE_TYPE] = _SCALE_TYPES[scales.dtype]
    found[ZEROS] = 0 if matrix.zeros is None else matrix.zeros.data_ptr()
    found[MIDDLE] = 0 if matrix.number == "fp8" else 2 ** (BITS[matrix.number] - 1)
    return found


def num_gains(matrix: Rows) -> int:
    """Of a row, with room for whole groups; 0 of plain rows."""
    if not isinstance(matrix, PackedRows):
        return 0
    groups, each = matrix.scales.shape[1], _columns_a_gain(matrix)
    return -(-matrix.inner // each) if groups == 1 else groups * (matrix.group // each)


def _columns_a_gain(matrix: PackedRows) -> int:
    """As many as can be."""
    unit = unit_columns(matrix.number)
    if matrix.scales.shape[1] == 1:
        return unit
    return next(columns for columns in (unit, RUN, LEAST_GROUP) if matrix.group % columns == 0)


def check_matrix(name: str, matrix: Rows, rows: int, inner: int) -> None:
    """Raises ValueError for what the kernels have no code for, and for another size or place."""
    if isinstance(matrix, PackedRows):
        _check_packed(name, matrix, rows, inner)
        return
    if matrix.dtype not in _KINDS:
        raise ValueError(f"experts on the CPU: {name} is {matrix.dtype}; wanted torch.bfloat16, or torch.float32")
    line = LINE_BYTES // matrix.itemsize
    if inner % line:
        raise ValueError(f"experts on the CPU: {name} has rows of {inner}; wanted a multiple of {line}")
    _check_tensor(name, matrix, (rows, inner), (matrix.dtype,))


def _check_packed(name: str, matrix: PackedRows, rows: int, inner: int) -> None:
    if inner % RUN:
        raise ValueError(f"experts on the CPU: {name} has rows of {inner}; wanted a multiple of {RUN}")
    groups = -(-inner // matrix.group)
    if groups > 1 and matrix.group % LEAST_GROUP:
        raise ValueError(
            f"experts on the CPU: {name} has groups of {matrix.group} columns; wanted a multiple of {LEAST_GROUP}"
        )
    units = -(-inner // unit_columns(matrix.number))
    _check_tensor(f"{name}'s words", matrix.words, (rows, units * LINE_BYTES // 4), (torch.int32,))
    shape = (-(-rows // matrix.row_block), groups)
    if matrix.runs is None:
        _check_tensor(f"{name}'s scales", matrix.scales, shape, tuple(_SCALE_TYPES))
        if matrix.zeros is not None:
            _check_tensor(f"{name}'s zero points", matrix.zeros, shape, (torch.uint8,))
        return
    _check_tensor(f"{name}'s scales", matrix.scales, (rows, groups), (torch.int16,))
    num_runs = matrix.runs.shape[1] if matrix.runs.ndim == 2 else 0
    if num_runs == 0 or groups % num_runs:
        raise ValueError(f"experts on the CPU: {name} has {num_runs} runs of {groups} groups; wanted whole ones")
    _check_tensor(f"{name}'s runs", matrix.runs, (rows, num_runs), (torch.int32,))


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(tensor.shape) != shape or tensor.device.type != "cpu" or not tensor.is_contiguous():
        got = f"{tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}"
        raise ValueError(f"experts on the CPU: {name} is {got}; wanted {shape} in host memory, contiguous")
    if tensor.dtype not in dtypes:
        wanted = ", or ".join(map(str, dtypes))
        raise ValueError(f"experts on the CPU: {name} is {tensor.dtype}; wanted {wanted}")
