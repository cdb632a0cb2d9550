"""The matrix products of a layer, with the norms, activation and residuals around them: the part that weights decide.

It refuses to know attention and positions. Bytes moved: the weights once for each call. On the CPU a library repacks
them in every call, which prefill does not notice; small decode batches go through `gpu.cpu_device.step` there.
"""

from torch import Tensor

from gpu.kernels.linear import linear, logits_linear, norm_gate_up_swiglu, norm_linear
from gpu.kernels.rms_norm import rms_norm
from gpu.model.weights import Weights


class Projections:
    """Hidden states `[tokens, hidden]` in and out; results are new tensors.

    One kernel launch for each method but `mlp` (two) and `logits` (two).
    """

    def __init__(self, weights: Weights, eps: float) -> None:
        self.weights = weights
        self.eps = eps

    def qkv(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm and QKV: `[tokens, (heads + 2 * kv_heads) * dim]`."""
        weights = self.weights.layers[layer]
        return norm_linear(hidden, weights.attention_norm, self.eps, weights.qkv)

    def output(self, layer: int, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attention's output, `[tokens, heads * dim]` of any float type, projected and added to `hidden`."""
        return linear(attended, self.weights.layers[layer].output, hidden)

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm and MLP, added to `hidden`."""
        weights = self.weights.layers[layer]
        return linear(norm_gate_up_swiglu(hidden, weights.mlp_norm, self.eps, weights.gate_up), weights.down, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and logits, float32 `[tokens, vocab]`."""
        return logits_linear(rms_norm(hidden, self.weights.final_norm, self.eps), self.weights.logits)
