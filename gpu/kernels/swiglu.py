"""SwiGLU: silu(gate) * up over one buffer whose first half is the gate.

It refuses to know the projections. Bytes moved per token: 3 * intermediate * itemsize.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu.kernels.arguments import check, check_dtype, runs_on_triton

BLOCK = 1024


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Plain torch. gate_up `[tokens, 2 * intermediate]` -> `[tokens, intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def _swiglu_kernel(gate_up, out, row_stride, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    gate = tl.load(gate_up + token * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * row_stride + INTERMEDIATE + column, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + token * INTERMEDIATE + column, product.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up `[tokens, 2 * intermediate]`, gate first -> `[tokens, intermediate]`, same dtype.

    Raises ValueError for an odd last axis or one that is not contiguous.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up is {tuple(gate_up.shape)}; wanted [tokens, 2 * intermediate]")
    if not runs_on_triton(gate_up) or gate_up.numel() == 0:
        return swiglu_reference(gate_up)
    check_dtype("swiglu", gate_up)
    tokens, width = gate_up.shape
    check("swiglu", "gate_up", gate_up, (tokens, width), gate_up.dtype, gate_up.device)
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(tokens, triton.cdiv(width // 2, BLOCK))](
        gate_up, out, gate_up.stride(0), INTERMEDIATE=width // 2, BLOCK=BLOCK, num_warps=4
    )
    return out
