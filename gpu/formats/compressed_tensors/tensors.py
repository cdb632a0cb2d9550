"""Name and pack the tensors of compressed-tensors modules."""

import torch
from torch import Tensor

from gpu.model.matrix_format import BITS, MatrixFormat
from gpu.weights.stored import (
    INTEGER,
    SCALES,
    WIDE_SCALES,
    ModuleRows,
    StoredError,
    StoredTensor,
    fp8_weight,
    group_order,
    input_scale,
    row_scales,
    unpack_numbers,
    with_group_axis,
)


def stored_tensors(scheme: str, stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of a module: words along the columns, or a byte a number."""
    return (_packed if scheme == "pack-quantized" else _compressed)(stored, part, row_block)


def _packed(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    rows, inner, groups, bits = part.rows, part.packed.inner, part.num_groups, BITS[stored.kind]
    planes = 32 // bits

    def check_shape(shape: Tensor) -> None:
        if shape.tolist() != [rows, inner]:
            raise StoredError(f"says {shape.tolist()}; wanted {[rows, inner]}")

    def fill_zeros(words: Tensor) -> None:  # [rows / planes, groups], signed numbers from the middle
        part.put_zeros(unpack_numbers(words.t().contiguous(), bits)[:, :rows].t())

    tensors = {
        ".weight_packed": StoredTensor(
            ((rows, -(-inner // planes)),),
            INTEGER,
            lambda words: part.put_numbers(unpack_numbers(words, bits)[:, :inner]),
        ),
        ".weight_scale": row_scales(stored, part, row_block, SCALES),
        ".weight_shape": StoredTensor(((2,),), ("I64", "I32"), check_shape, is_needed=False),
        ".weight_g_idx": group_order(stored, part),
    }
    if stored.has_zeros:
        tensors[".weight_zero_point"] = StoredTensor(((-(-rows // planes), groups),), INTEGER, fill_zeros)
    return tensors


def _compressed(stored: MatrixFormat, part: ModuleRows, row_block: int) -> dict[str, StoredTensor]:
    """Return the tensors of bytes: FP8 numbers, or signed integers."""
    is_float = stored.kind == "fp8"

    def fill_zeros(zeros: Tensor) -> None:
        part.put_zeros(_from_middle(with_group_axis(zeros)))

    tensors = {
        ".weight": fp8_weight(part) if is_float else StoredTensor(
            ((part.rows, part.packed.inner),), ("I8",),
            lambda weight: part.put_numbers(_from_middle(weight)),
        ),
        ".weight_scale": row_scales(stored, part, row_block, WIDE_SCALES if is_float else SCALES),
    }  # fmt: skip
    if stored.has_zeros:
        shapes = tensors[".weight_scale"].shapes
        tensors[".weight_zero_point"] = StoredTensor(shapes, ("I8",), fill_zeros)
    return tensors | input_scale()


def _from_middle(numbers: Tensor) -> Tensor:
    """Return int8 as uint8, of which 128 is 0."""
    return numbers.view(torch.uint8) ^ 128
