"""The matrix products of a layer, with the norms, activation and residuals around them: the part that weights decide.

It refuses to know attention and positions. Bytes moved: the weights once for each call. On the CPU a library repacks
them in every call, which prefill does not notice; small decode batches go through `gpu.cpu_device.step` there.
"""

from torch import Tensor

from gpu.kernels.head_norm import head_norm
from gpu.kernels.linear import linear, logits_linear, norm_gate_up_swiglu, norm_linear
from gpu.kernels.rms_norm import rms_norm, rms_norm_add
from gpu.model.spec import Architecture
from gpu.model.weights import Weights


class Projections:
    """Hidden states `[tokens, hidden]` in and out; results are new tensors.

    One kernel launch for each method but `mlp` (two) and `logits` (two), and one more for norms of heads and for each
    norm behind a product.
    """

    def __init__(self, weights: Weights, architecture: Architecture) -> None:
        self.weights = weights
        self.eps = architecture.rms_norm_eps
        self._heads = architecture.num_heads, architecture.num_kv_heads
        self._activations = [spec.activation for spec in architecture.layers]

    def qkv(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm, QKV, and the norms of query and key heads: `[tokens, (heads + 2 * kv_heads) * dim]`."""
        weights = self.weights.layers[layer]
        qkv = norm_linear(hidden, weights.attention_norm, self.eps, weights.qkv, weights.qkv_bias)
        if weights.query_norm is not None and weights.key_norm is not None:
            head_norm(qkv, weights.query_norm, weights.key_norm, self.eps, *self._heads)
        return qkv

    def output(self, layer: int, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attention's output, `[tokens, heads * dim]` of any float type, projected and added to `hidden`."""
        weights = self.weights.layers[layer]
        return self._add(attended, weights.output, weights.attention_post_norm, hidden)

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm and MLP, added to `hidden`."""
        weights = self.weights.layers[layer]
        product = norm_gate_up_swiglu(
            hidden, weights.mlp_norm, self.eps, weights.gate_up, self._activations[layer]
        )  # fmt: skip
        return self._add(product, weights.down, weights.mlp_post_norm, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and logits, float32 `[tokens, vocab]`."""
        return logits_linear(self.final_norm(hidden), self.weights.logits)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weights.final_norm, self.eps)

    def _add(self, x: Tensor, matrix: Tensor, post_norm: Tensor | None, hidden: Tensor) -> Tensor:
        if post_norm is None:
            return linear(x, matrix, hidden)
        return rms_norm_add(linear(x, matrix), post_norm, self.eps, hidden)
