"""Convert rows to 8 bits that carry their own scale, in the bytes of fbgemm's fused row-wise operators.

A row is its codes, uint8 `[dim]`, followed by a float32 scale and a float32 bias, in the machine's byte order. bias =
min x, scale = (max x - bias) / 255, and code = (x - bias) * (255 / (max x - bias + 1e-8)), rounded to nearest, ties to
even. The row is read as code * scale + bias. CUDA writes the same bytes as fbgemm on the CPU. A row with an element
that is not finite is refused on the CPU. On CUDA, where a check would stall, its scale becomes NaN, which the owner of
the bytes finds in host memory. Bytes moved: rows read once and written once.
"""

import importlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import INTERPRETED, check, check_contiguous, check_dtype, runs_on_triton

TAIL_BYTES = 8  # scale and bias
WORD_BYTES = 4
BLOCK_ROWS = 16


def fuse_rows_reference(rows: Tensor) -> Tensor:
    """Run fbgemm's operator: float32 `[..., dim]` on the CPU to uint8 `[..., dim + 8]`. It turns NaN into numbers."""
    return _fbgemm().FloatOrHalfToFused8BitRowwiseQuantized(rows.contiguous())


def widen_rows_reference(fused: Tensor) -> Tensor:
    """Run fbgemm's inverse: uint8 `[..., dim + 8]` on the CPU to float32 `[..., dim]`."""
    return _fbgemm().Fused8BitRowwiseQuantizedToFloat(fused.contiguous())


def _fbgemm() -> Any:
    """Import fbgemm, which registers its operators with torch, and return them. CUDA does not need them."""
    try:
        importlib.import_module("fbgemm_gpu")
    except ImportError as error:
        raise RuntimeError(
            f"int8 rows on the CPU: fbgemm cannot be imported ({error}); pip install '.[cpu]'"
        ) from error
    return torch.ops.fbgemm


@triton.jit
def _fuse_kernel(
    rows, codes, words, num_rows, num_heads, row_token, row_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    element = tl.arange(0, BLOCK_DIM)[None, :]
    is_row = row < num_rows
    inside = is_row[:, None] & (element < DIM)
    begin = (row // num_heads) * row_token + (row % num_heads) * row_head
    x = tl.load(rows + begin[:, None] + element, mask=inside, other=0.0).to(tl.float32)
    low = tl.min(tl.where(element < DIM, x, float("inf")), 1)
    span = tl.max(tl.where(element < DIM, x, float("-inf")), 1) - low
    scale = tl.div_rn(span, tl.full([BLOCK_ROWS], 255.0, tl.float32))
    inverse = tl.div_rn(tl.full([BLOCK_ROWS], 255.0, tl.float32), span + 1e-8)
    steps = (x - low[:, None]) * inverse[:, None]
    whole = tl.floor(steps)
    rest = steps - whole
    is_odd = (whole * 0.5) != tl.floor(whole * 0.5)
    code = tl.where((rest > 0.5) | ((rest == 0.5) & is_odd), whole + 1.0, whole)  # to the nearest, ties to even
    num_broken = tl.sum(tl.where((x - x) == 0.0, 0, 1), 1)  # inf and NaN
    code = tl.where((code >= 0.0) & (code <= 255.0), code, 0.0)
    scale = tl.where(num_broken > 0, float("nan"), scale)
    tl.store(codes + row[:, None] * (DIM + 8) + element, code.to(tl.int32).to(tl.uint8), mask=inside)
    tail = words + row * (DIM // 4 + 2) + DIM // 4
    tl.store(tail, scale, mask=is_row)
    tl.store(tail + 1, low, mask=is_row)


def fuse_rows(rows: Tensor, fused: Tensor) -> None:
    """Write rows `[tokens, heads, dim]` to `fused`, uint8 `[tokens, heads, dim + 8]`, contiguous.

    rows: tokens and heads strided, bf16 or float32; `dim` is a multiple of 4. Raises ValueError for another shape,
    dtype or device, and on the CPU for a row that is not finite, which the message names.
    """
    _check("fuse_rows", rows, fused)
    if rows.numel() == 0:
        return
    if not runs_on_triton(rows):
        fused.copy_(fuse_rows_reference(rows.float()))
        _require_storable(rows, fused)
        return
    tokens, heads, dim = rows.shape
    _fuse_kernel[(triton.cdiv(tokens * heads, BLOCK_ROWS),)](
        rows, fused, fused.view(torch.float32), tokens * heads, heads, rows.stride(0), rows.stride(1), DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_ROWS=BLOCK_ROWS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    if INTERPRETED and not rows.is_cuda:
        _require_storable(rows, fused)


@triton.jit
def _widen_kernel(
    codes, words, rows, num_rows, num_heads, row_token, row_head,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    element = tl.arange(0, BLOCK_DIM)[None, :]
    is_row = row < num_rows
    inside = is_row[:, None] & (element < DIM)
    code = tl.load(codes + row[:, None] * (DIM + 8) + element, mask=inside, other=0).to(tl.float32)
    tail = words + row * (DIM // 4 + 2) + DIM // 4
    scale = tl.load(tail, mask=is_row, other=0.0)[:, None] + tl.zeros_like(code)
    bias = tl.load(tail + 1, mask=is_row, other=0.0)[:, None] + tl.zeros_like(code)
    begin = (row // num_heads) * row_token + (row % num_heads) * row_head
    x = tl.fma(code, scale, bias)  # rounded once, as fbgemm does
    tl.store(rows + begin[:, None] + element, x.to(rows.dtype.element_ty), mask=inside)


def widen_rows(fused: Tensor, rows: Tensor) -> None:
    """Undo `fuse_rows`, within half a scale: fill rows `[tokens, heads, dim]`, bf16 or float32, strided."""
    _check("widen_rows", rows, fused)
    if not runs_on_triton(rows) or rows.numel() == 0:
        rows.copy_(widen_rows_reference(fused))
        return
    tokens, heads, dim = rows.shape
    _widen_kernel[(triton.cdiv(tokens * heads, BLOCK_ROWS),)](
        fused, fused.view(torch.float32), rows, tokens * heads, heads, rows.stride(0), rows.stride(1), DIM=dim,
        BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_ROWS=BLOCK_ROWS, num_warps=4,
    )  # fmt: skip


def find_unstorable(fused: Tensor) -> tuple[int, int] | None:
    """Return token and head of the first row whose scale or bias is not finite, or None.

    fused: uint8 `[tokens, heads, dim + 8]`.
    """
    tails = fused.view(torch.float32)[..., -2:]
    broken = (~tails.isfinite().all(-1)).nonzero()
    return (int(broken[0, 0]), int(broken[0, 1])) if len(broken) else None


def _require_storable(rows: Tensor, fused: Tensor) -> None:
    """Raise ValueError for a row that is not finite. Runs on the CPU, where fbgemm hides a NaN."""
    broken = (~rows.isfinite().all(-1)).nonzero().tolist()
    place = tuple(broken[0]) if broken else find_unstorable(fused)
    if place is not None:
        raise ValueError(
            f"fuse_rows: the row of token {place[0]}, head {place[1]} has an element that is not finite, or spans more "
            "than float32 holds; wanted finite rows: keep these in bf16"
        )


def _check(op: str, rows: Tensor, fused: Tensor) -> None:
    tokens, heads, dim = rows.shape
    if dim % WORD_BYTES:
        raise ValueError(f"{op}: rows have {dim} elements; wanted a multiple of {WORD_BYTES}")
    check_dtype(op, rows)
    check(op, "rows", rows, (tokens, heads, dim), rows.dtype, fused.device)
    check(op, "fused", fused, (tokens, heads, dim + TAIL_BYTES), torch.uint8, rows.device)
    check_contiguous(op, "fused", fused)
