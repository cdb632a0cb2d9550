"""SwiGLU, silu(gate) * up, or GeGLU, gelu(gate) * up by its tanh, over one buffer whose first half is the gate.

Bytes moved per token: 3 * intermediate * itemsize.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Activation
from gpu.operations.arguments import check, check_dtype, runs_on_triton

BLOCK = 1024


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """Apply the activation in plain torch."""
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def swiglu_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute `swiglu` in plain torch: gate_up `[tokens, 2 * intermediate]` -> `[tokens, intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation).mul_(up)


@triton.jit
def gated(gate, up, GELU: tl.constexpr):
    """Return activation(gate) * up in float32; tanh(z) is 2 * sigmoid(2 z) - 1."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner) * up


@triton.jit
def _swiglu_kernel(gate_up, out, row_stride, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    gate = tl.load(gate_up + token * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * row_stride + INTERMEDIATE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * INTERMEDIATE + column, gated(gate, up, GELU).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up: gate_up `[tokens, 2 * intermediate]`, gate first -> `[tokens, intermediate]`, same
    dtype.

    Raises ValueError for an odd last axis or one that is not contiguous.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"swiglu: gate_up is {tuple(gate_up.shape)}; wanted [tokens, 2 * intermediate]")
    if not runs_on_triton(gate_up) or gate_up.numel() == 0:
        return swiglu_reference(gate_up, activation)
    check_dtype("swiglu", gate_up)
    tokens, width = gate_up.shape
    check("swiglu", "gate_up", gate_up, (tokens, width), gate_up.dtype, gate_up.device)
    out = torch.empty(tokens, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(tokens, triton.cdiv(width // 2, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        INTERMEDIATE=width // 2,
        BLOCK=BLOCK,
        GELU=activation == "gelu_tanh",
        num_warps=4,
    )
    return out
