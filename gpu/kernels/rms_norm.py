"""RMSNorm, alone and after a residual addition.

Arithmetic of Hugging Face's LlamaRMSNorm: float32 inside, rounded to x.dtype, then times the weight. It refuses to know
what the hidden states are. Bytes moved per token: 2 * hidden * itemsize, and 4 * hidden * itemsize with the residual.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, check_contiguous, check_dtype, runs_on_triton


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain torch. x `[tokens, hidden]`, weight `[hidden]` -> `[tokens, hidden]`. float64 stays float64."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain torch. `residual += x` in place, then its norm."""
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, x_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADDS_RESIDUAL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    dtype = x.dtype.element_ty
    row = tl.load(x + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS_RESIDUAL:
        row += tl.load(residual + token * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(dtype)
        tl.store(residual + token * HIDDEN + column, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / HIDDEN + eps)
    normed = (row * scale).to(dtype).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, (normed * gain).to(dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x): x `[tokens, hidden]`, weight `[hidden]`, one dtype and device -> `[tokens, hidden]`.

    Raises ValueError for a weight of another shape, dtype or device.
    """
    check("rms_norm", "weight", weight, (x.shape[-1],), x.dtype, x.device)
    if not runs_on_triton(x) or x.numel() == 0:
        return rms_norm_reference(x, weight, eps)
    return _launch("rms_norm", x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual += x` in place (kept in x.dtype), then `(rms_norm(residual), residual)`; all `[tokens, hidden]`.

    Raises ValueError for a weight or residual of another shape, dtype or device, or a residual that is not contiguous.
    """
    check("add_rms_norm", "weight", weight, (x.shape[-1],), x.dtype, x.device)
    check("add_rms_norm", "residual", residual, tuple(x.shape), x.dtype, x.device)
    if not runs_on_triton(x) or x.numel() == 0:
        return add_rms_norm_reference(x, residual, weight, eps)
    check_contiguous("add_rms_norm", "residual", residual)
    return _launch("add_rms_norm", x, residual, weight, eps), residual


def _launch(op: str, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    check_dtype(op, x)
    tokens, hidden = x.shape
    check(op, "x", x, (tokens, hidden), weight.dtype, weight.device)
    out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(tokens,)](
        x, x if residual is None else residual, weight, out, x.stride(0), eps,
        HIDDEN=hidden, BLOCK=block, ADDS_RESIDUAL=residual is not None, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
