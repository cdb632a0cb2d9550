"""Check that the CPU's kernels support a matrix of experts, and name in one line what they do not support."""

import torch
from torch import Tensor

from transfer.expert_exchange import PackedRows
from transfer.matrix_rows import KINDS, Rows, scale_dtypes
from transfer.simd.packed_rows import LEAST_GROUP, RUN, unit_columns
from transfer.simd.vectors import LINE_BYTES


def check_matrix(name: str, matrix: Rows, rows: int, inner: int) -> None:
    """Raise ValueError for a matrix that the kernels do not support, or one of another size or place."""
    if isinstance(matrix, PackedRows):
        _check_packed(name, matrix, rows, inner)
        return
    if matrix.dtype not in KINDS:
        raise ValueError(f"experts on the CPU: {name} is {matrix.dtype}; wanted torch.bfloat16, or torch.float32")
    line = LINE_BYTES // matrix.itemsize
    if inner % line:
        raise ValueError(f"experts on the CPU: {name} has rows of {inner}; wanted a multiple of {line}")
    _check_tensor(name, matrix, (rows, inner), (matrix.dtype,))


def check_bias(name: str, bias: Tensor | None, rows: int) -> None:
    """Raise ValueError for a bias of another size, place or dtype."""
    if bias is not None:
        _check_tensor(name, bias, (rows,), (torch.float32,))


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
        _check_tensor(f"{name}'s scales", matrix.scales, shape, scale_dtypes(matrix))
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
