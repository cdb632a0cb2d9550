"""Compute SwiGLU, silu(gate) * up, or GeGLU, gelu(gate) * up with tanh, over one buffer whose first half is the gate.

The clamped form, with gate <= 7 and |up| <= 7, is gate * sigmoid(1.702 gate) * (up + 1). Without a gate the result is
relu(up)**2. Bytes moved per token: 3 * intermediate * itemsize, or 2 without a gate.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpu.model.spec import Activation, is_gated
from gpu.operations.arguments import check, check_dtype, runs_on_triton
from transfer.model_constants import CLAMPED_GAIN, CLAMPED_LIMIT

BLOCK = 1024

_GAIN, _LIMIT = tl.constexpr(CLAMPED_GAIN), tl.constexpr(CLAMPED_LIMIT)


def swiglu_reference(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute `swiglu` in plain torch."""
    if not is_gated(activation):
        return F.relu(gate_up).square_()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=CLAMPED_LIMIT)
        return (gate * CLAMPED_GAIN).sigmoid_().mul_(gate).mul_(up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT) + 1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


@triton.jit
def activated(gate, up, ACTIVATION: tl.constexpr):
    """Return activation(gate) * up in float32; for `relu2` relu(gate)**2. NaN stays NaN where it is clamped.

    tanh(z) is computed as 2 * sigmoid(2 z) - 1.
    """
    inner = gate
    if ACTIVATION == "relu2":
        gate = tl.where(gate < 0.0, 0.0, gate)
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
        inner = gate * _GAIN
    elif ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * gate if ACTIVATION == "relu2" else gate * tl.sigmoid(inner) * up


@triton.jit
def _swiglu_kernel(
    gate_up, out, row_stride, INTERMEDIATE: tl.constexpr, BLOCK: tl.constexpr, GATES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INTERMEDIATE
    gate = tl.load(gate_up + token * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = gate
    if GATES:
        up = tl.load(gate_up + token * row_stride + INTERMEDIATE + column, mask=inside, other=0.0).to(tl.float32)
    made = activated(gate, up, ACTIVATION)
    tl.store(out + token * INTERMEDIATE + column, made.to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up, `[tokens, intermediate]` in the same dtype.

    gate_up: `[tokens, 2 * intermediate]`, gate first; `[tokens, intermediate]` for an activation without a gate. Raises
    ValueError if the last axis of gate and up is odd or not contiguous.
    """
    gates = is_gated(activation)
    if gate_up.ndim != 2 or (gates and gate_up.shape[1] % 2):
        wanted = "[tokens, 2 * intermediate]" if gates else "[tokens, intermediate]"
        raise ValueError(f"swiglu: gate_up is {tuple(gate_up.shape)}; wanted {wanted}")
    if not runs_on_triton(gate_up) or gate_up.numel() == 0:
        return swiglu_reference(gate_up, activation)
    check_dtype("swiglu", gate_up)
    tokens, width = gate_up.shape
    check("swiglu", "gate_up", gate_up, (tokens, width), gate_up.dtype, gate_up.device)
    columns = width // (1 + gates)
    out = torch.empty(tokens, columns, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu_kernel[(tokens, triton.cdiv(columns, BLOCK))](
        gate_up,
        out,
        gate_up.stride(0),
        INTERMEDIATE=columns,
        BLOCK=BLOCK,
        GATES=gates,
        ACTIVATION=activation,
        num_warps=4,
    )
    return out
