"""Define what the products of a layer's experts read: both matrices, the places of experts, biases and gains."""

from dataclasses import dataclass

from torch import Tensor

from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.linear.packed_matrix import Stored


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts of a layer.

    gate_up, down: as in `weights.ExpertWeights`.
    far: the experts that are stored elsewhere; None: none are.
    gate_up_bias, down_bias: for the rows of all experts, in the model's dtype, or None.
    gains: float32 `[experts]`, factors of the experts' outputs; None: 1.
    """

    gate_up: Stored
    down: Stored
    far: FarExperts | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gains: Tensor | None = None
