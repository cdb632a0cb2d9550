"""What LoRA adapters add to a matrix's product, for rows with different adapters at once: two kernels for few rows.

All adapters of the matrix stand below each other in `down` and beside each other in `up`; a row keeps the columns of
its own adapter (LoRA, arXiv 2106.09685). Floor: the bytes of both, read once. In torch's own calls the four matrices of
an 8B's layer are some fourteen launches, of which each takes longer than its bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, runs_on_triton

MOST_TOKENS = 16  # more are left to the library's products
COLUMN_BLOCK, INNER_BLOCK, ROW_BLOCK = 16, 256, 64
_PROGRAMS = 64  # of the first kernel at least: fewer leave memory idle


def add_adapters_reference(made: Tensor, x: Tensor, down: Tensor, up: Tensor, owners: Tensor, ids: Tensor) -> Tensor:
    """Compute `add_adapters` in plain torch."""
    middle = (x.to(down.dtype) @ down.T).masked_fill_(owners != ids, 0)
    return made.addmm_(middle, up.T)


@triton.jit
def _adapter_down_kernel(
    x, down, middle, x_stride, num_tokens, num_columns, SPLIT: tl.constexpr, INNER: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1) * SPLIT
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for at in range(0, SPLIT, BLOCK):
        inner = begin + at + tl.arange(0, BLOCK)
        inside = (inner < INNER) & (at + tl.arange(0, BLOCK) < SPLIT)
        rows = tl.load(
            x + token[:, None].to(tl.int64) * x_stride + inner[None],
            mask=(token < num_tokens)[:, None] & inside[None], other=0.0,
        )  # fmt: skip
        weights = tl.load(
            down + column[:, None].to(tl.int64) * INNER + inner[None],
            mask=(column < num_columns)[:, None] & inside[None], other=0.0,
        )  # fmt: skip
        total += tl.dot(rows.to(weights.dtype), tl.trans(weights), input_precision="ieee")
    place = (tl.program_id(1) * num_tokens + token[:, None]).to(tl.int64) * num_columns + column[None]
    tl.store(middle + place, total, mask=(token < num_tokens)[:, None] & (column < num_columns)[None])


@triton.jit
def _adapter_up_kernel(
    made, middle, up, owners, ids, made_stride, num_tokens, num_rows, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.load(ids + token, mask=token < num_tokens, other=0)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for at in range(0, COLUMNS, BLOCK):
        column = at + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        owner = tl.load(owners + column, mask=inside, other=-1)
        kept = (token < num_tokens)[:, None] & (own[:, None] == owner[None])
        summed = tl.zeros((TOKENS, BLOCK), tl.float32)
        for split in tl.static_range(SPLITS):
            place = (split * num_tokens + token[:, None]) * COLUMNS + column[None]
            summed += tl.load(middle + place, mask=kept, other=0.0)
        weights = tl.load(
            up + row[:, None].to(tl.int64) * COLUMNS + column[None],
            mask=(row < num_rows)[:, None] & inside[None], other=0.0,
        )  # fmt: skip
        total += tl.dot(summed.to(weights.dtype), tl.trans(weights), input_precision="ieee")
    place = made + token[:, None].to(tl.int64) * made_stride + row[None]
    inside = (token < num_tokens)[:, None] & (row < num_rows)[None]
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (before + total).to(made.dtype.element_ty), mask=inside)


def add_adapters(made: Tensor, x: Tensor, down: Tensor, up: Tensor, owners: Tensor, ids: Tensor) -> Tensor:
    """Add to `made` in place what each token's adapter makes of `x`; return it.

    made `[tokens, rows]`, its last axis contiguous; x `[tokens, inner]`, likewise, of any float dtype; down `[columns,
    inner]`; up `[rows, columns]`, multiplied by the adapters' gains; owners int64 `[columns]`: the adapter of each
    column; ids int64 `[tokens, 1]`: each token's adapter, 0: none.

    Raises ValueError for another shape, dtype or device.
    """
    (tokens, rows), (columns, inner) = made.shape, down.shape
    op = "add_adapters"
    check(op, "made", made, (tokens, rows), made.dtype, down.device)
    check(op, "x", x, (tokens, inner), x.dtype, down.device)
    check(op, "up", up, (rows, columns), down.dtype, down.device)
    check(op, "owners", owners, (columns,), torch.int64, down.device)
    check(op, "ids", ids, (tokens, 1), torch.int64, down.device)
    if not runs_on_triton(made) or not 0 < tokens <= MOST_TOKENS:
        return add_adapters_reference(made, x, down, up, owners, ids)
    blocks = triton.cdiv(columns, COLUMN_BLOCK)
    splits = max(1, min(8, _PROGRAMS // blocks, triton.cdiv(inner, INNER_BLOCK)))
    split = triton.cdiv(triton.cdiv(inner, splits), INNER_BLOCK) * INNER_BLOCK
    splits = triton.cdiv(inner, split)
    middle = torch.empty(splits, tokens, columns, dtype=torch.float32, device=made.device)
    _adapter_down_kernel[(blocks, splits)](
        x, down, middle, x.stride(0), tokens, columns, SPLIT=split, INNER=inner,
        TOKENS=MOST_TOKENS, COLUMNS=COLUMN_BLOCK, BLOCK=INNER_BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    _adapter_up_kernel[(triton.cdiv(rows, ROW_BLOCK),)](
        made, middle, up, owners, ids, made.stride(0), tokens, rows, SPLITS=splits, COLUMNS=columns,
        TOKENS=MOST_TOKENS, ROWS=ROW_BLOCK, BLOCK=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    return made
