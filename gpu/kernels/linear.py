"""Matrix times a few tokens: the projections of a decode step, with RMSNorm, SwiGLU and the residual fused in.

For 1 to MAX_GEMV_TOKENS tokens in bf16 on CUDA the weight's bytes are the whole cost, and a Triton GEMV streams them;
anything else goes to the vendor's matrix product. It refuses to know what is projected. Bytes moved: the weight once.
"""

import torch.nn.functional as F
from torch import Tensor

from gpu.kernels.rms_norm import rms_norm
from gpu.kernels.swiglu import swiglu

MAX_GEMV_TOKENS = 4


def linear_reference(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Plain torch: `x @ weight.T (+ residual)`."""
    out = F.linear(x.to(weight.dtype), weight)
    return out if residual is None else out.add_(residual)


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Plain torch: `rms_norm(x) @ weight.T`."""
    return F.linear(rms_norm(x, norm_weight, eps), weight)


def gate_up_swiglu_reference(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """Plain torch: `swiglu(x @ gate_up_weight.T)`."""
    return swiglu(F.linear(x, gate_up_weight))


def norm_gate_up_swiglu_reference(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """Plain torch: `swiglu(rms_norm(x) @ gate_up_weight.T)`."""
    return swiglu(F.linear(rms_norm(x, norm_weight, eps), gate_up_weight))


def linear(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """`x @ weight.T (+ residual)`: x `[tokens, in]`, weight `[out, in]`, residual `[tokens, out]` -> `[tokens, out]`.

    The result is new and in weight.dtype; x may be float32 where the weight is bf16 (a partial's output, for instance).
    """
    return linear_reference(x, weight, residual)


def norm_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """`rms_norm(x, norm_weight, eps) @ weight.T`: x `[tokens, hidden]`, weight `[out, hidden]` -> `[tokens, out]`."""
    return norm_linear_reference(x, norm_weight, eps, weight)


def gate_up_swiglu(x: Tensor, gate_up_weight: Tensor) -> Tensor:
    """`swiglu(x @ gate_up_weight.T)`: gate_up_weight `[2 * intermediate, hidden]`, gate first."""
    return gate_up_swiglu_reference(x, gate_up_weight)


def norm_gate_up_swiglu(x: Tensor, norm_weight: Tensor, eps: float, gate_up_weight: Tensor) -> Tensor:
    """`swiglu(rms_norm(x) @ gate_up_weight.T)` -> `[tokens, intermediate]`."""
    return norm_gate_up_swiglu_reference(x, norm_weight, eps, gate_up_weight)
