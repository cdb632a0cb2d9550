"""The matrix products of a layer, with the norms, activation and residuals around them.

Norms of hidden states are applied here, by `ExpertMlp`, and by the compiled step of the CPU; norms of heads by
`rope_kv_write`.
Bytes moved: the weights once for each call. On the CPU a library repacks them in every call, which prefill does not
notice; small decode batches go through `gpu.cpu_step.cpu_step` there.
"""

from torch import Tensor

from gpu.exchange.device_experts import ExpertExchange
from gpu.layers.expert_mlp import ExpertMlp
from gpu.layers.staged_experts import StagedExperts
from gpu.layers.widened import Widened
from gpu.model.matrix_formats import OF_EXPERTS, widened_bytes
from gpu.model.spec import Architecture
from gpu.operations.head_norm import HeadNorms
from gpu.operations.linear.packed_matrix import Stored
from gpu.operations.rms_norm import rms_norm, rms_norm_add
from gpu.operations.swiglu import swiglu
from gpu.weights.host_experts import tensors_of
from gpu.weights.matrix import Matrix, as_matrix
from gpu.weights.weights import Weights


class Projections:
    """Hidden states `[tokens, hidden]` in and out; results are new tensors.

    One kernel launch for each method but `mlp` (two; of experts see `expert_mlp`) and `logits` (two), and one
    more for each norm behind a product and each bias but that of `qkv`.
    """

    def __init__(self, weights: Weights, architecture: Architecture) -> None:
        self.weights = weights
        self.eps = architecture.rms_norm_eps
        self._activations = [spec.activation for spec in architecture.layers]
        size = widened_bytes(architecture, weights.embedding.element_size())
        widened = Widened(size, weights.embedding.device)
        self._matrices = [
            {name: as_matrix(stored, widened) for name, stored in layer.matrices.items() if name not in OF_EXPERTS}
            for layer in weights.layers
        ]
        self.staged = _stage(weights, architecture)
        self._experts = [
            None if layer.experts is None or spec.experts is None
            else ExpertMlp(layer.experts, spec.experts, spec.activation, index, self.staged)
            for index, (layer, spec) in enumerate(zip(weights.layers, architecture.layers, strict=True))
        ]  # fmt: skip
        self._logits = as_matrix(weights.logits)

    def warm_up(self, most_tokens: int) -> None:
        """Compile what depends on how many tokens there are, up to so many: products of experts, of each kind."""
        kinds = {}
        for experts, layer in zip(self._experts, self.weights.layers, strict=True):
            if experts is not None:
                formats = _format_of(experts.weights.gate_up), _format_of(experts.weights.down)
                kinds.setdefault(formats, (experts, layer.mlp_norm))
        for experts, norm in kinds.values():
            experts.warm_up(most_tokens, norm)

    def qkv(self, layer: int, hidden: Tensor) -> Tensor:
        """Return norm and QKV: `[tokens, (heads + 2 * kv_heads) * dim]`, before norms of heads."""
        weights = self.weights.layers[layer]
        return self._matrices[layer]["qkv"].norm_linear(hidden, weights.attention_norm, self.eps, weights.qkv_bias)

    def head_norms(self, layer: int) -> HeadNorms | None:
        """Return the norms of query and key heads, which `rope_kv_write` applies; None: there are none."""
        weights = self.weights.layers[layer]
        if weights.query_norm is None or weights.key_norm is None:
            return None
        return HeadNorms(weights.query_norm, weights.key_norm, self.eps)

    def output(self, layer: int, attended: Tensor, hidden: Tensor) -> Tensor:
        """Return attention's output, `[tokens, heads * dim]` of any float type, projected and added to `hidden`."""
        weights = self.weights.layers[layer]
        matrix = self._matrices[layer]["output"]
        return self._add(attended, matrix, weights.output_bias, weights.attention_post_norm, hidden)

    def mlp(self, layer: int, hidden: Tensor, slots: Tensor | None = None,
            exchange: ExpertExchange | None = None) -> Tensor:  # fmt: skip
        """Return norm and MLP added to `hidden`. slots: int32 `[tokens]`, -1 in rows that are not in use; None: all
        are. exchange: see `ExpertMlp`.
        """
        weights, experts = self.weights.layers[layer], self._experts[layer]
        if experts is not None:
            return experts(hidden, weights.mlp_norm, self.eps, slots, exchange)
        gate_up, down = self._matrices[layer]["gate_up"], self._matrices[layer]["down"]
        activation, bias = self._activations[layer], weights.gate_up_bias
        if bias is None:
            product = gate_up.norm_gate_up(hidden, weights.mlp_norm, self.eps, activation)
        else:
            product = swiglu(gate_up.norm_linear(hidden, weights.mlp_norm, self.eps, bias), activation)
        return self._add(product, down, weights.down_bias, weights.mlp_post_norm, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return final norm and logits, float32 `[tokens, vocab]`."""
        return self._logits.logits(self.final_norm(hidden))

    def final_norm(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weights.final_norm, self.eps)

    def _add(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, post_norm: Tensor | None, hidden: Tensor
    ) -> Tensor:  # fmt: skip
        product = matrix.linear(x, hidden if post_norm is None else None)
        if bias is not None:
            product.add_(bias)
        return product if post_norm is None else rms_norm_add(product, post_norm, self.eps, hidden)


def _format_of(stored: Stored) -> tuple[object, ...]:
    """Return what kernels are compiled for: runs and zero points show in the types of its tensors."""
    return (getattr(stored, "kind", None), getattr(stored, "group", None), *(one.dtype for one in tensors_of(stored)))


def _stage(weights: Weights, architecture: Architecture) -> StagedExperts | None:
    """Return what brings experts in host memory to the card, if any lie there."""
    hosts = [layer.experts and layer.experts.host for layer in weights.layers]
    if not any(hosts):
        return None
    counts = [spec.experts.num_experts if spec.experts is not None else 0 for spec in architecture.layers]
    on_card = [count - (host.count if host else 0) for count, host in zip(counts, hosts, strict=True)]
    return StagedExperts(hosts, on_card, weights.embedding.device)
