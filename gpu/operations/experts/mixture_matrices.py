"""What the products of a layer's experts read: both matrices, where experts lie, biases and gains."""

from dataclasses import dataclass

from torch import Tensor

from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.linear.packed_matrix import Stored


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts of a layer.

    gate_up, down: as in `weights.ExpertWeights`.
    far: of the experts that lie elsewhere; None: none do.
    gate_up_bias, down_bias: of the rows of all experts, of the model's dtype, or None.
    gains: float32 `[experts]`, factors of each one's output; None: 1.
    """

    gate_up: Stored
    down: Stored
    far: FarExperts | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gains: Tensor | None = None
