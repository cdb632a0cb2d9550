"""RMSNorm, alone and after a residual addition.

Arithmetic of Hugging Face's LlamaRMSNorm: float32 inside, rounded to x.dtype, then times the weight. It refuses to know
what the hidden states are. Bytes moved per token: 2 * hidden * itemsize, and 4 * hidden * itemsize with the residual.
"""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain torch. x `[tokens, hidden]`, weight `[hidden]` -> `[tokens, hidden]`. float64 stays float64."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Plain torch. `residual += x` in place, then its norm."""
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / rms(x): x `[tokens, hidden]`, weight `[hidden]`, one dtype and device -> `[tokens, hidden]`."""
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual += x` in place (kept in x.dtype), then `(rms_norm(residual), residual)`; all `[tokens, hidden]`."""
    return add_rms_norm_reference(x, residual, weight, eps)
