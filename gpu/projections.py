"""The matrix products of a layer, with the norms, activation and residuals around them: the part that weights decide.

It refuses to know attention and positions. Two implementations of one arithmetic: fused kernels over plain weights,
and, for small float32 models on the CPU, weights packed for oneDNN, which reads them once for a whole batch of rows
where a plain product repacks them in every call. Bytes moved: the weights once for each call.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.architecture import Architecture
from gpu.kernels.linear import linear, logits_linear, norm_gate_up_swiglu, norm_linear
from gpu.kernels.rms_norm import rms_norm
from gpu.kernels.swiglu import swiglu
from gpu.weights import LayerWeights, Weights

PACKED_BYTES_LIMIT = 2**30  # packing keeps a second copy of the weights: only where that is small
PACKED_ROWS = 8  # the batch that the packed layout is chosen for; it serves every other one too


class Projections(Protocol):
    """Hidden states `[tokens, hidden]` in and out; results are new tensors."""

    def qkv(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm and QKV: `[tokens, (heads + 2 * kv_heads) * dim]`."""

    def output(self, layer: int, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attention's output, `[tokens, heads * dim]` of any float type, projected and added to `hidden`."""

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        """Norm and MLP, added to `hidden`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and logits, float32 `[tokens, vocab]`."""


def projections_for(architecture: Architecture, weights: Weights) -> Projections:
    """Packed for small float32 models on the CPU, fused otherwise."""
    matrix = weights.logits
    fits = 4 * architecture.num_weights <= PACKED_BYTES_LIMIT
    if matrix.device.type == "cpu" and matrix.dtype == torch.float32 and fits and torch.backends.mkldnn.is_available():
        return PackedProjections(weights, architecture.rms_norm_eps)
    return FusedProjections(weights, architecture.rms_norm_eps)


class FusedProjections:
    """One kernel launch for each method but `mlp` (two) and `logits` (two)."""

    def __init__(self, weights: Weights, eps: float) -> None:
        self.weights = weights
        self.eps = eps

    def qkv(self, layer: int, hidden: Tensor) -> Tensor:
        weights = self.weights.layers[layer]
        return norm_linear(hidden, weights.attention_norm, self.eps, weights.qkv)

    def output(self, layer: int, attended: Tensor, hidden: Tensor) -> Tensor:
        return linear(attended, self.weights.layers[layer].output, hidden)

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        weights = self.weights.layers[layer]
        return linear(norm_gate_up_swiglu(hidden, weights.mlp_norm, self.eps, weights.gate_up), weights.down, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_linear(rms_norm(hidden, self.weights.final_norm, self.eps), self.weights.logits)


class _PackedMatrix:
    """A float32 matrix `[out, in]`: as it is for one row, packed for more."""

    def __init__(self, matrix: Tensor) -> None:
        self.plain = matrix
        self.packed = torch.ops.mkldnn._reorder_linear_weight(matrix, PACKED_ROWS)

    def product(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return F.linear(x, self.plain)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")

    def product_and_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        if len(x) == 1:
            return torch.addmm(residual, x, self.plain.t())
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, None, "add")


class _PackedLayer:
    def __init__(self, weights: LayerWeights) -> None:
        self.qkv = _PackedMatrix(weights.qkv)
        self.output = _PackedMatrix(weights.output)
        self.gate_up = _PackedMatrix(weights.gate_up)
        self.down = _PackedMatrix(weights.down)


class PackedProjections:
    """Float32 on the CPU."""

    def __init__(self, weights: Weights, eps: float) -> None:
        self.weights = weights
        self.eps = eps
        self.layers = [_PackedLayer(layer) for layer in weights.layers]
        self.head = _PackedMatrix(weights.logits)

    def qkv(self, layer: int, hidden: Tensor) -> Tensor:
        return self.layers[layer].qkv.product(self._norm(hidden, self.weights.layers[layer].attention_norm))

    def output(self, layer: int, attended: Tensor, hidden: Tensor) -> Tensor:
        return self.layers[layer].output.product_and_sum(attended, hidden)

    def mlp(self, layer: int, hidden: Tensor) -> Tensor:
        packed = self.layers[layer]
        normed = self._norm(hidden, self.weights.layers[layer].mlp_norm)
        return packed.down.product_and_sum(swiglu(packed.gate_up.product(normed)), hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.product(self._norm(hidden, self.weights.final_norm))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.eps)
