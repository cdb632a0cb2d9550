"""The MLP of a layer with experts: routing, the products of those that are taken, their sum and the residual.

It refuses to know attention, and how matrices are stored. Invariant: experts that no token takes are not read. Which
products depends on the number of tokens alone, so a graph holds them: three launches for up to MOST_ALONE, and six.
"""

from torch import Tensor

from gpu.kernels.arguments import runs_on_triton
from gpu.kernels.expert_rows import down_rows, gate_up_rows
from gpu.kernels.expert_tiles import down_tiles, gate_up_tiles, pair_up, sizes_of_tiles
from gpu.kernels.experts_reference import experts_reference, route_reference
from gpu.kernels.packed import Packed
from gpu.kernels.rms_norm import rms_norm
from gpu.kernels.routing import MOST_ROUTED, choose, router_logits
from gpu.model.spec import Activation, Experts
from gpu.model.weights import ExpertWeights

MOST_ALONE = 4  # tokens whose products are of vectors: of more, experts that several take are read too often


class ExpertMlp:
    """Of one layer."""

    def __init__(self, weights: ExpertWeights, experts: Experts, activation: Activation) -> None:
        self.weights = weights
        self.experts = experts
        self.activation = activation

    def __call__(self, hidden: Tensor, norm: Tensor, eps: float) -> Tensor:
        """Norm and experts, added to `hidden`, `[tokens, hidden]` -> the same, new."""
        weights, experts = self.weights, self.experts
        if not runs_on_triton(hidden) or len(hidden) == 0:
            normed = rms_norm(hidden, norm, eps)
            routed = route_reference(normed, weights.router, experts)
            made = experts_reference(normed, *routed, weights.gate_up, weights.down, experts, self.activation)
            return made.add_(hidden)
        normed, logits = router_logits(hidden, norm, eps, weights.router)
        if len(hidden) <= MOST_ALONE:
            product, ids, shares = gate_up_rows(normed, logits, weights.gate_up, experts, self.activation)
            return down_rows(product, ids, shares, weights.down, hidden, experts)
        pairs = pair_up(*choose(logits, experts), experts, isinstance(weights.gate_up, Packed))
        product = gate_up_tiles(normed, pairs, weights.gate_up, experts, self.activation)
        return down_tiles(product, pairs, weights.down, hidden, experts)

    def warm_up(self, most_tokens: int, norm: Tensor) -> None:
        """Run every kernel that up to `most_tokens` at once may meet, on zeros: what is compiled is compiled now."""
        counts = [1, MOST_ALONE + 1, MOST_ROUTED + 1, *sizes_of_tiles(self.experts, most_tokens)]
        for tokens in sorted({min(most_tokens, count) for count in counts}):
            self(norm.new_zeros(tokens, len(norm), dtype=self.weights.router.dtype), norm, 1e-6)
