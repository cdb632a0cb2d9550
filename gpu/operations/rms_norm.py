"""Apply RMSNorm, alone or followed by a residual addition.

The arithmetic is that of Hugging Face's LlamaRMSNorm: float32 inside, rounded to x.dtype, then multiplied by the
weight. If the weight is float32 and x is not, it is that of Gemma3RMSNorm: multiplied by the weight, then rounded.
Bytes moved per token: 2 * hidden * itemsize, and half as many more with a residual.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.operations.arguments import check, check_contiguous, check_dtype, runs_on_triton


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in plain torch: x `[tokens, hidden]`, weight `[hidden]`; float64 stays float64."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    if weight.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        return (wide * scale).mul_(weight).to(x.dtype)
    return (wide * scale).to(x.dtype).mul_(weight)


def rms_norm_add_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Compute `residual + rms_norm(x)` in plain torch."""
    return rms_norm_reference(x, weight, eps).add_(residual)


@triton.jit
def normed_row(row, gain, eps, HIDDEN: tl.constexpr):
    """Return a row after the norm, times `gain`, in its dtype. The row is 0 behind HIDDEN numbers."""
    wide = row.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / HIDDEN + eps)
    if gain.dtype == row.dtype:
        normed = normed.to(row.dtype).to(tl.float32)
    return (normed * gain.to(tl.float32)).to(row.dtype)


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, x_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADDS_AFTER: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    row = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    result = normed_row(row, tl.load(weight + column, mask=inside, other=0.0), eps, HIDDEN)
    if ADDS_AFTER:
        before = tl.load(residual + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        result = (before + result.to(tl.float32)).to(row.dtype)
    tl.store(out + token * HIDDEN + column, result, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weight * x / rms(x): x `[tokens, hidden]`, weight `[hidden]` of x.dtype or float32 -> `[tokens, hidden]`.

    Raises ValueError for a weight of another shape, dtype or device.
    """
    check_norm("rms_norm", "weight", weight, x)
    if not runs_on_triton(x) or x.numel() == 0:
        return rms_norm_reference(x, weight, eps)
    return _launch("rms_norm", x, None, weight, eps)


def rms_norm_add(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> Tensor:
    """Return `residual + rms_norm(x, weight, eps)`, new: x, residual `[tokens, hidden]` of one dtype.

    Raises ValueError for a weight or residual of another shape, dtype or device, or a residual that is not contiguous.
    """
    check_norm("rms_norm_add", "weight", weight, x)
    check("rms_norm_add", "residual", residual, tuple(x.shape), x.dtype, x.device)
    if not runs_on_triton(x) or x.numel() == 0:
        return rms_norm_add_reference(x, weight, eps, residual)
    check_contiguous("rms_norm_add", "residual", residual)
    return _launch("rms_norm_add", x, residual, weight, eps)


def check_norm(op: str, name: str, weight: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `weight` is a norm's weight for rows of x: of x.dtype, or float32."""
    dtype = torch.float32 if weight.dtype == torch.float32 else x.dtype
    check(op, name, weight, (x.shape[-1],), dtype, x.device)


def _launch(op: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    check_dtype(op, x)
    tokens, hidden = x.shape
    check(op, "x", x, (tokens, hidden), x.dtype, weight.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x, x if residual is None else residual, weight, out, x.stride(0), eps,
        HIDDEN=hidden, BLOCK=block, ADDS_AFTER=residual is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
