"""Compute the MLP of a layer with experts: routing, the products of the chosen experts, their sum and the residual.

Experts that no token chooses are not read. As long as the card computes them, their place in memory changes no bit. The
kernels depend on the number of tokens alone, so a graph can hold them. Launches: three for up to MOST_ALONE tokens
where no matrix is packed, else four for up to LEAST_PAIRS, and six beyond, or more where experts are widened in parts.
If some experts are in host memory: one or two more, and one for each tensor that is fetched. If the CPU computes these:
three or four more; the request is sent before the card's own products and awaited after them.
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

# Up to so many tokens are multiplied as vectors. With more, experts that several choose are read too often. Packed
# experts (either matrix may be packed) are multiplied in tiles whatever the number of tokens.
MOST_ALONE = 4


class ExpertMlp:
    """The MLP of one layer with experts.

    staged: brings experts from host memory to the card; None: none are there. layer: the layer's number in `staged`.
    adds: whether the output is added to the hidden states. If not, another device adds them.
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
        """Return the norm's and the experts' output added to `hidden`, `[tokens, hidden]`, as a new tensor.

        `hidden` is not added where an MLP runs beside the experts. slots: int32 `[tokens]`, -1 in rows that are not in
        use, for which nothing is fetched; None: all are in use. exchange: where the CPU computes experts in host
        memory; None: they are fetched.
        """
        return self.with_norm(hidden, norm, eps, slots, exchange)[0]

    def with_norm(self, hidden: Tensor, norm: Tensor, eps: float, slots: Tensor | None,
                  exchange: ExpertExchange | None, overwrites: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what a call returns, and the normed hidden states, `[tokens, hidden]`. overwrites: the sum may be
        written over `hidden`.
        """
        if self.weights.host is None or len(hidden) == 0:
            exchange = None
        made, normed = self._compute_on_card(hidden, norm, eps, slots, exchange, overwrites)
        return made if exchange is None else exchange.add(made, hidden.dtype), normed

    def _compute_on_card(
        self, hidden: Tensor, norm: Tensor, eps: float, slots: Tensor | None, exchange: ExpertExchange | None,
        overwrites: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what the card computes, added to `hidden`, and the norm: all experts, or those that the CPU does not
        compute.
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
        is_ours = overwrites or base is not hidden
        return down_tiles(product, tiles, matrices, base, experts, overwrites=is_ours), normed

    def _matrices(self, far: FarExperts | None) -> ExpertMatrices:
        """Return the matrices that the products read. far: experts in host memory, or None."""
        weights, beside = self.weights, self.weights.beside
        gains = self._gains if beside is None else beside.gains
        return ExpertMatrices(weights.gate_up, weights.down, far, weights.gate_up_bias, weights.down_bias, gains)

    def warm_up(self, most_tokens: int, norm: Tensor) -> None:
        """Run every kernel that up to `most_tokens` tokens may need on zeros, so that all are compiled."""
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
        """Fetch the chosen experts from host memory, or request their outputs of the CPU."""
        host = self.weights.host
        if exchange is None or host is None:
            return self._fetch(ids, slots)
        assert self._staged is not None, "experts in host memory: `staged` knows their places"
        shares = shares if self._gains is None else shares * self.experts.gain
        exchange.request(self._layer, normed, ids, shares, self.experts.num_experts - host.count, slots)
        return self._staged.without_experts(self._layer)

    def _fetch(self, ids: Tensor, slots: Tensor | None) -> FarExperts | None:
        """Fetch the experts in host memory that some token chooses.

        With at least as many choices as experts nearly all are needed, and the whole layer is copied. A copy that was
        started with the layer in front is used for fewer choices as well, as a prompt's last layer has.
        """
        host, num_experts, num_pairs = self.weights.host, self.experts.num_experts, ids.numel()
        if host is None or num_pairs == 0:
            return None
        assert self._staged is not None, "experts in host memory: `staged` brings them to the card"
        takes_all = num_pairs >= num_experts
        if self._staged.is_kept and (takes_all or self._staged.is_copied_next(self._layer)):
            return self._staged.copy_layer(self._layer, starts_next=takes_all)
        listed = list_experts(ids, num_experts - host.count, num_experts, min(host.count, num_pairs), slots,
                              self._staged.num_listed)  # fmt: skip
        return self._staged.fetch_listed(self._layer, listed)
