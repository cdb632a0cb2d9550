"""Tensors of MXFP4 experts: blocks of 32 numbers in 16 bytes, the first of two in the lower bits, and exponents."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu.model.matrix_format import MatrixFormat
from gpu.weights.stored import ModuleRows, StoredTensor


def stacked_tensors(
    stored: MatrixFormat, experts: Sequence[ModuleRows], is_transposed: bool
) -> dict[str, StoredTensor]:
    """Return the tensors of all experts, `[experts, rows, groups, 16]` and `[experts, rows, groups]` of bytes, whatever
    the layout of plain ones is.
    """
    shape = (len(experts), experts[0].rows, experts[0].num_groups)

    def tensor(shape: tuple[int, ...], put: Callable[[ModuleRows, Tensor], None]) -> StoredTensor:
        def fill_rows(begin: int, stored: Tensor) -> None:
            for part, one in zip(experts[begin : begin + len(stored)], stored, strict=True):
                put(part, one)

        return StoredTensor((shape,), ("U8",), lambda stored: fill_rows(0, stored), fill_rows=fill_rows, rows_at_once=1)

    return {
        "_blocks": tensor((*shape, 16), lambda part, blocks: part.put_numbers(unpack_blocks(blocks))),
        "_scales": tensor(shape, lambda part, exponents: part.put_exponents(exponents)),
    }


def unpack_blocks(blocks: Tensor) -> Tensor:
    """Unpack uint8 `[rows, groups, 16]` to uint8 `[rows, groups * 32]` of codes."""
    return torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
