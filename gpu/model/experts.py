"""The MLP of a layer with experts: routing, the products of those that are taken, their sum and the residual.

It refuses to know attention, and how matrices are stored. Invariant: experts that no token takes are not read.
"""

from torch import Tensor

from gpu.kernels.experts_reference import experts_reference, route_reference
from gpu.kernels.rms_norm import rms_norm
from gpu.model.spec import Activation, Experts
from gpu.model.weights import ExpertWeights


class ExpertMlp:
    """Of one layer."""

    def __init__(self, weights: ExpertWeights, experts: Experts, activation: Activation) -> None:
        self.weights = weights
        self.experts = experts
        self.activation = activation

    def __call__(self, hidden: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Norm and experts, added to `hidden`, `[tokens, hidden]` -> the same, new."""
        weights, normed = self.weights, rms_norm(hidden, norm, eps)
        ids, shares = route_reference(normed, weights.router, self.experts)
        return hidden + experts_reference(
            normed, ids, shares, weights.gate_up, weights.down, self.experts, self.activation
        )
