"""SwiGLU: silu(gate) * up over one buffer whose first half is the gate.

It refuses to know the projections. Bytes moved per token: 3 * intermediate * itemsize.
"""

import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Plain torch. gate_up `[tokens, 2 * intermediate]` -> `[tokens, intermediate]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: gate_up `[tokens, 2 * intermediate]`, gate first -> `[tokens, intermediate]`, same dtype."""
    return swiglu_reference(gate_up)
