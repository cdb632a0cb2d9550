"""Add LoRA adapters to a matrix's product, for rows with different adapters at once, in two kernels for few rows.

All adapters of the matrix stand below each other in `down` and in `up`; a row keeps the columns of its own adapter
(LoRA, arXiv 2106.09685). The kernels read each row's own columns and nothing else, as Punica's do (arXiv 2310.18547).
Floor: the bytes of the adapters that rows have, a row each.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, runs_on_triton

MOST_TOKENS = 16  # more are left to the library's products
_INNER_BLOCK, _ROW_BLOCK = 256, 256
_MOST_SPLITS = 16  # of the inner dimension, whose sums the second kernel adds


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """All adapters of one matrix. down `[columns, inner]`; up `[columns, rows]`, multiplied by the adapters' gains;
    owners int64 `[columns]`: the adapter of each column, numbered from 1 on; begins int32 `[adapters + 2]`: columns
    `[begins[n], begins[n + 1])` are adapter n's, and 0 has none; most: the most columns of one adapter.
    """

    down: Tensor
    up: Tensor
    owners: Tensor
    begins: Tensor
    most: int


def add_adapters_reference(made: Tensor, x: Tensor, adapters: StackedAdapters, ids: Tensor) -> Tensor:
    """Compute `add_adapters` in plain torch."""
    middle = (x.to(adapters.down.dtype) @ adapters.down.T).masked_fill_(adapters.owners != ids, 0)
    return made.addmm_(middle, adapters.up)


@triton.jit
def _adapter_down_kernel(
    x, down, begins, ids, middle, x_stride, num_tokens, INNER: tl.constexpr, SPLIT: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, split = tl.program_id(0), tl.program_id(1)
    own = tl.load(ids + token)
    first = tl.load(begins + own)
    column = tl.arange(0, COLUMNS)
    num_columns = tl.load(begins + own + 1) - first
    if num_columns > 0:
        total = tl.zeros((COLUMNS, BLOCK), tl.float32)
        for at in tl.static_range(0, SPLIT, BLOCK):
            inner = split * SPLIT + at + tl.arange(0, BLOCK)
            rows = tl.load(x + token.to(tl.int64) * x_stride + inner, mask=inner < INNER, other=0.0)
            weights = tl.load(
                down + (first + column)[:, None].to(tl.int64) * INNER + inner[None],
                mask=(column < num_columns)[:, None] & (inner < INNER)[None], other=0.0,
            )  # fmt: skip
            total += weights.to(tl.float32) * rows.to(down.dtype.element_ty).to(tl.float32)[None]
        place = (split * num_tokens + token) * COLUMNS + column
        tl.store(middle + place, tl.sum(total, 1))


@triton.jit
def _adapter_up_kernel(
    made, middle, up, begins, ids, made_stride, num_tokens, num_rows, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + token)
    first = tl.load(begins + own)
    column = tl.arange(0, COLUMNS)
    num_columns = tl.load(begins + own + 1) - first
    if num_columns > 0:
        split = tl.arange(0, SPLITS)
        parts = tl.load(middle + (split[:, None] * num_tokens + token) * COLUMNS + column[None])
        summed = tl.sum(parts, 0).to(up.dtype.element_ty).to(tl.float32)
        weights = tl.load(
            up + (first + column)[:, None].to(tl.int64) * num_rows + row[None],
            mask=(column < num_columns)[:, None] & (row < num_rows)[None], other=0.0,
        )  # fmt: skip
        place = made + token.to(tl.int64) * made_stride + row
        before = tl.load(place, mask=row < num_rows, other=0.0).to(tl.float32)
        added = tl.sum(tl.where((column < num_columns)[:, None], weights.to(tl.float32) * summed[:, None], 0.0), 0)
        tl.store(place, (before + added).to(made.dtype.element_ty), mask=row < num_rows)


def add_adapters(made: Tensor, x: Tensor, adapters: StackedAdapters, ids: Tensor) -> Tensor:
    """Add to `made` in place what each token's adapter makes of `x`; return it.

    made `[tokens, rows]`, its last axis contiguous; x `[tokens, inner]`, likewise, of any float dtype; ids int64
    `[tokens, 1]`: each token's adapter, 0: none.

    Raises ValueError for another shape, dtype or device.
    """
    down, up, device = adapters.down, adapters.up, adapters.down.device
    (tokens, rows), (columns, inner) = made.shape, down.shape
    op = "add_adapters"
    check(op, "made", made, (tokens, rows), made.dtype, device)
    check(op, "x", x, (tokens, inner), x.dtype, device)
    check(op, "up", up, (columns, rows), down.dtype, device)
    check(op, "owners", adapters.owners, (columns,), torch.int64, device)
    check(op, "ids", ids, (tokens, 1), torch.int64, device)
    if not runs_on_triton(made) or not 0 < tokens <= MOST_TOKENS:
        return add_adapters_reference(made, x, adapters, ids)
    width = triton.next_power_of_2(adapters.most)
    splits = min(_MOST_SPLITS, triton.next_power_of_2(triton.cdiv(inner, _INNER_BLOCK)))
    split = triton.cdiv(triton.cdiv(inner, splits), _INNER_BLOCK) * _INNER_BLOCK
    middle = torch.empty(splits, tokens, width, dtype=torch.float32, device=device)
    _adapter_down_kernel[(tokens, splits)](
        x, down, adapters.begins, ids, middle, x.stride(0), tokens, INNER=inner, SPLIT=split, COLUMNS=width,
        BLOCK=_INNER_BLOCK, num_warps=8,
    )  # fmt: skip
    _adapter_up_kernel[(triton.cdiv(rows, _ROW_BLOCK), tokens)](
        made, middle, up, adapters.begins, ids, made.stride(0), tokens, rows, SPLITS=splits, COLUMNS=width,
        BLOCK=_ROW_BLOCK, num_warps=4,
    )  # fmt: skip
    return made
