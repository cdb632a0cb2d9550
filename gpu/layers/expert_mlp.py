"""The MLP of a layer with experts: routing, the products of the experts that are taken, their sum and the residual.

Experts that no token takes are not read. Where they lie changes no bit, as long as the card computes them. The products
of a layer depend on the number of tokens alone, so a graph holds them. Launches: three for up to MOST_ALONE tokens
where no matrix is packed, else four for up to LEAST_PAIRS, and six beyond, or more where experts are widened in parts.
Where some experts are in host memory: two more, or one, and one for each tensor that is fetched. Where the CPU computes
these: four more, or three; its request goes out before the card's own products and is awaited behind them.
"""

import torch
from torch import Tensor

from gpu.exchange.device_experts import ExpertExchange
from gpu.layers.staged_experts import StagedExperts
from gpu.model.spec import Activation, Experts
from gpu.operations.arguments import runs_on_triton
from gpu.operations.experts.expert_rows import down_rows, gate_up_rows
from gpu.operations.experts.expert_tiles import (
    FEWEST_PAIRS,
    LEAST_PAIRS,
    down_tiles,
    gate_up_tiles,
    pair_few,
    pair_up,
    sizes_of_tiles,
)
from gpu.operations.experts.experts_reference import experts_reference, route_reference
from gpu.operations.experts.far_experts import FarExperts
from gpu.operations.experts.fetch_experts import list_experts
from gpu.operations.experts.mixture_matrices import ExpertMatrices
from gpu.operations.experts.routing import MOST_ROUTED, choose, fold_choice, router_logits
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.rms_norm import rms_norm
from gpu.weights.weights import ExpertWeights

# Tokens whose products are of vectors: of more, experts that several take are read too often. Experts of few bits, of
# which either matrix may be, are multiplied in tiles whatever the number of tokens.
MOST_ALONE = 4


class ExpertMlp:
    """The MLP of one layer with experts. staged: brings those in host memory to the card, by the layer's number; None:
    none lie there. adds: what it makes is added to hidden states, or else to zeros: another device adds these.
    """

    def __init__(self, weights: ExpertWeights, experts: Experts, activation: Activation, layer: int = 0,
                 staged: StagedExperts | None = None, adds: bool = True) -> None:  # fmt: skip
        self.weights = weights
        self.experts = experts
        self.activation = activation
        self._layer = layer
        self._staged = staged
        self._adds = adds and weights.beside is None
        gain, num_experts = experts.gain, experts.num_experts
        self._gains = None if gain == 1 else torch.full((num_experts,), gain, device=weights.router.device)

    def __call__(self, hidden: Tensor, norm: Tensor, eps: float, slots: Tensor | None = None,
                 exchange: ExpertExchange | None = None) -> Tensor:  # fmt: skip
        """Return norm and experts added to `hidden`, `[tokens, hidden]`, new; where an MLP stands beside them, without
        `hidden`. slots: int32 `[tokens]`, -1 in rows that are not in use, for which nothing is fetched; None: all are.
        exchange: where the CPU computes experts in host memory; None: they are fetched.
        """
        return self.with_norm(hidden, norm, eps, slots, exchange)[0]

    def with_norm(self, hidden: Tensor, norm: Tensor, eps: float, slots: Tensor | None,
                  exchange: ExpertExchange | None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what a call returns, and the norm, `[tokens, hidden]`."""
        if self.weights.host is None or len(hidden) == 0:
            exchange = None
        made, normed = self._make(hidden, norm, eps, slots, exchange)
        return made if exchange is None else exchange.add(made, hidden.dtype), normed

    def _make(
        self, hidden: Tensor, norm: Tensor, eps: float, slots: Tensor | None, exchange: ExpertExchange | None
    ) -> tuple[Tensor, Tensor]:
        """Return what the card computes, added to `hidden`: all experts, or those that the CPU does not compute; and
        the norm.
        """
        weights, experts, beside = self.weights, self.experts, self.weights.beside
        base = hidden if self._adds else torch.zeros_like(hidden)
        if not runs_on_triton(hidden) or len(hidden) == 0:
            normed = rms_norm(hidden, norm, eps)
            to_route = normed if beside is None else rms_norm(hidden, beside.router_norm, eps)
            ids, shares = route_reference(
                to_route, weights.router, experts, weights.router_bias, weights.correction
            )  # fmt: skip
            far = self._find_far(normed, ids.int(), shares, slots, exchange)
            made = experts_reference(normed, ids, shares, self._matrices(far), experts, self.activation)
            return made.add_(base), normed
        by = norm if beside is None else beside.router_norm
        normed, logits = router_logits(hidden, by, eps, weights.router, weights.router_bias)
        if beside is not None:
            normed = rms_norm(hidden, norm, eps)
        if experts.is_folded:
            logits = fold_choice(logits, experts, weights.correction)
        taken, is_few = None, len(hidden) <= LEAST_PAIRS  # tiles of few tokens find their pairs in the logits
        if weights.host is not None or not is_few:
            taken = choose(logits, experts)
        far = None if taken is None else self._find_far(normed, *taken, slots, exchange)
        matrices = self._matrices(far)
        has_packed = isinstance(weights.gate_up, Packed) or isinstance(weights.down, Packed)
        if not has_packed and len(hidden) <= MOST_ALONE:
            product, ids, shares = gate_up_rows(normed, logits, matrices, experts, self.activation)
            return down_rows(product, ids, shares, matrices, base, experts), normed
        if is_few or taken is None:
            is_packed = isinstance(weights.gate_up, Packed) and isinstance(weights.down, Packed)
            tiles = pair_few(logits, experts, is_packed)
        else:
            tiles = pair_up(*taken, experts, has_packed, far is not None)
        product = gate_up_tiles(normed, tiles, matrices, experts, self.activation)
        return down_tiles(product, tiles, matrices, base, experts), normed

    def _matrices(self, far: FarExperts | None) -> ExpertMatrices:
        """Return what this layer's products read. far: of experts in host memory, or None."""
        weights, beside = self.weights, self.weights.beside
        gains = self._gains if beside is None else beside.gains
        return ExpertMatrices(weights.gate_up, weights.down, far, weights.gate_up_bias, weights.down_bias, gains)

    def warm_up(self, most_tokens: int, norm: Tensor) -> None:
        """Run every kernel that up to `most_tokens` at once may meet, on zeros: what is compiled is compiled now."""
        counts = [
            1,
            2,
            MOST_ALONE + 1,
            FEWEST_PAIRS,
            FEWEST_PAIRS + 1,
            LEAST_PAIRS,
            LEAST_PAIRS + 1,
            MOST_ROUTED + 1,
            *sizes_of_tiles(self.experts, most_tokens),
        ]
        for tokens in sorted({min(most_tokens, count) for count in counts}):
            self(norm.new_zeros(tokens, len(norm), dtype=self.weights.router.dtype), norm, 1e-6)

    def _find_far(
        self, normed: Tensor, ids: Tensor, shares: Tensor, slots: Tensor | None, exchange: ExpertExchange | None
    ) -> FarExperts | None:
        """Fetch the experts in host memory, or ask the CPU for them."""
        host = self.weights.host
        if exchange is None or host is None:
            return self._fetch(ids, slots)
        assert self._staged is not None, "experts in host memory: something knows their places"
        shares = shares if self._gains is None else shares * self.experts.gain
        exchange.request(self._layer, normed, ids, shares, self.experts.num_experts - host.count, slots)
        return self._staged.without_experts(self._layer)

    def _fetch(self, ids: Tensor, slots: Tensor | None) -> FarExperts | None:
        """Fetch the experts in host memory that some token takes. If there are at least as many choices as experts,
        nearly all experts are taken, and all are copied.
        """
        host, num_experts, num_pairs = self.weights.host, self.experts.num_experts, ids.numel()
        if host is None or num_pairs == 0:
            return None
        assert self._staged is not None, "experts in host memory: something brings them to the card"
        if num_pairs >= num_experts and self._staged.is_kept:
            return self._staged.copy_layer(self._layer)
        listed = list_experts(ids, num_experts - host.count, num_experts, min(host.count, num_pairs), slots,
                              self._staged.num_listed)  # fmt: skip
        return self._staged.fetch_listed(self._layer, listed)
