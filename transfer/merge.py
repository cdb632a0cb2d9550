"""Merges two softmax partials over disjoint token sets: plain torch and one Triton kernel.

    lse = logaddexp(lse_a, lse_b)      out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

It refuses to know which tokens the two cover. Invariant: a side with lse = -inf contributes exactly nothing (even where
its `out` is NaN), and two such sides give (0, -inf). Bytes moved: 3 * 4 * tokens * heads * (dim + 1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_MASS = float("-inf")
ROWS_PER_PROGRAM = 4


def merge_outputs_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Plain torch, any floating dtype. out `[tokens, heads, dim]`, lse `[tokens, heads]` natural log; both new."""
    top = torch.maximum(lse_a, lse_b).clamp_min_(torch.finfo(lse_a.dtype).min)
    mass_a, mass_b = (lse_a - top).exp_(), (lse_b - top).exp_()  # [tokens, heads]
    mass = mass_a + mass_b
    scale = mass.clamp_min(torch.finfo(mass.dtype).tiny)
    out = torch.where((mass_a == 0).unsqueeze(-1), 0.0, out_a * (mass_a / scale).unsqueeze(-1))
    out += torch.where((mass_b == 0).unsqueeze(-1), 0.0, out_b * (mass_b / scale).unsqueeze(-1))
    return out, mass.log_().add_(top)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _merge_kernel(  # type: ignore[no-untyped-def]
    out_a, lse_a, out_b, lse_b, out, lse, rows, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    inside = row < rows
    lse_left = tl.load(lse_a + row, mask=inside, other=float("-inf"))
    lse_right = tl.load(lse_b + row, mask=inside, other=float("-inf"))
    top = tl.maximum(lse_left, lse_right)
    top = tl.where(top == float("-inf"), 0.0, top)
    mass_left, mass_right = tl.exp(lse_left - top), tl.exp(lse_right - top)
    mass = mass_left + mass_right
    scale = 1.0 / tl.where(mass == 0.0, 1.0, mass)
    address = row[:, None] * DIM + column[None, :]
    reads = inside[:, None] & (column < DIM)[None, :]
    left = tl.load(out_a + address, mask=reads & (mass_left != 0.0)[:, None], other=0.0)
    right = tl.load(out_b + address, mask=reads & (mass_right != 0.0)[:, None], other=0.0)
    merged = left * (mass_left * scale)[:, None] + right * (mass_right * scale)[:, None]
    tl.store(out + address, merged, mask=reads)
    tl.store(lse + row, top + tl.log(mass), mask=inside)


def _is_reached(first: Tensor, second: Tensor) -> bool:
    return first.device == second.device or (first.is_cuda and second.is_pinned())


def merge_outputs(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge float32 out `[tokens, heads, dim]` and lse `[tokens, heads]`; new tensors on the same device.

    The second side may lie in pinned host memory where the first is on CUDA: it is read over the link, by the kernel.
    Raises ValueError where shapes, dtypes or devices differ, or where lse does not belong to out.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        got = f"out {tuple(out_a.shape)} and {tuple(out_b.shape)}, lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        raise ValueError(f"merge: {got}; wanted equal [tokens, heads, dim] and equal [tokens, heads]")
    if not out_a.dtype == out_b.dtype == lse_a.dtype == lse_b.dtype:
        raise ValueError(f"merge: {out_a.dtype}, {lse_a.dtype}, {out_b.dtype}, {lse_b.dtype}; wanted one dtype")
    if lse_a.device != out_a.device or not all(_is_reached(out_a, tensor) for tensor in (out_b, lse_b)):
        raise ValueError(f"merge: on {out_a.device}, {lse_a.device}, {out_b.device}, {lse_b.device}; wanted one device")
    if not (out_a.is_cuda or triton.knobs.runtime.interpret) or out_a.numel() == 0:
        return merge_outputs_reference(out_a, lse_a, out_b, lse_b)
    if out_a.dtype != torch.float32:
        raise ValueError(f"merge: dtype is {out_a.dtype}; on {out_a.device} wanted torch.float32")
    out_a, lse_a, out_b, lse_b = (tensor.contiguous() for tensor in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    rows, dim = lse.numel(), out.shape[-1]
    _merge_kernel[(triton.cdiv(rows, ROWS_PER_PROGRAM),)](
        out_a, lse_a, out_b, lse_b, out, lse, rows,
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), BLOCK_ROWS=ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return out, lse
