"""Weights on the device: how a layer's are laid out, and random ones for a named shape.

It refuses to know how they are used, beyond that Q, K and V are one matrix and gate and up another, and where
checkpoints have them (`gpu.model.checkpoint`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.model.spec import Architecture, LayerSpec

RANDOM_LOGIT_SPREAD = 3.0  # standard deviation of random weights' logits: neither flat nor one-hot

RANDOM_BIAS_SPREAD = 0.1  # of random weights' biases: seen in every result, and no larger than what they are added to

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """attention_norm, mlp_norm `[hidden]`; qkv `[(heads + 2 kv_heads) * dim, hidden]`; output `[hidden, heads * dim]`;
    gate_up `[2 * intermediate, hidden]`, gate first; down `[hidden, intermediate]`. Where the layer's spec has them:
    qkv_bias, of qkv's rows; query_norm, key_norm `[dim]`; attention_post_norm, mlp_post_norm `[hidden]`. Norms that a
    checkpoint stores less one are float32: what they lack of one would be rounded away.
    """

    attention_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """embedding, logits `[vocab, hidden]` (one tensor if they are tied); final_norm `[hidden]`."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    logits: Tensor


def random_weights(architecture: Architecture, seed: int, dtype: torch.dtype, device: torch.device,
                   on_progress: Progress) -> Weights:  # fmt: skip
    """Draw weights on the device: activations stay of order one, and logits have a spread of RANDOM_LOGIT_SPREAD."""
    weights = allocate_weights(architecture, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    residual_scale = (2 * architecture.num_layers) ** -0.5

    def draw(matrix: Tensor, scale: float) -> None:
        matrix.normal_(0.0, scale * matrix.shape[-1] ** -0.5, generator=generator)

    for index, layer in enumerate(weights.layers):
        for norm in (layer.attention_norm, layer.mlp_norm, layer.key_norm):
            if norm is not None:
                norm.fill_(1.0)
        if layer.query_norm is not None:
            layer.query_norm.fill_(architecture.query_gain)
        for norm in (layer.attention_post_norm, layer.mlp_post_norm):
            if norm is not None:
                norm.fill_(residual_scale)
        if layer.qkv_bias is not None:
            layer.qkv_bias.normal_(0.0, RANDOM_BIAS_SPREAD, generator=generator)
        draw(layer.qkv, 1.0)
        draw(layer.output, residual_scale)
        draw(layer.gate_up, 1.0)
        draw(layer.down, residual_scale)
        on_progress((index + 1) / (architecture.num_layers + 1))
    scale = architecture.embedding_scale
    gain = 1.0 if scale == 1 else RANDOM_LOGIT_SPREAD * scale  # or a token's own embedding would be what comes next
    weights.final_norm.fill_(gain)
    draw(weights.logits, RANDOM_LOGIT_SPREAD / gain)
    if not architecture.tied_embeddings:
        weights.embedding.normal_(0.0, 1.0, generator=generator)
    on_progress(1.0)
    return weights


def allocate_weights(architecture: Architecture, dtype: torch.dtype, device: torch.device) -> Weights:
    """Not yet filled."""
    a = architecture

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def norm(width: int) -> Tensor:
        return torch.empty(width, dtype=torch.float32 if a.norm_offset else dtype, device=device)

    def layer(spec: LayerSpec) -> LayerWeights:
        width = (a.num_heads + 2 * a.num_kv_heads) * a.dim
        return LayerWeights(
            attention_norm=norm(a.hidden),
            qkv=empty(width, a.hidden),
            output=empty(a.hidden, a.num_heads * a.dim),
            mlp_norm=norm(a.hidden),
            gate_up=empty(2 * a.intermediate, a.hidden),
            down=empty(a.hidden, a.intermediate),
            qkv_bias=empty(width) if spec.qkv_bias else None,
            query_norm=norm(a.dim) if spec.qk_norm else None,
            key_norm=norm(a.dim) if spec.qk_norm else None,
            attention_post_norm=norm(a.hidden) if spec.post_norms else None,
            mlp_post_norm=norm(a.hidden) if spec.post_norms else None,
        )

    embedding = empty(a.vocab_size, a.hidden)
    layers = [layer(spec) for spec in a.layers]
    logits = embedding if a.tied_embeddings else empty(a.vocab_size, a.hidden)
    return Weights(embedding, layers, norm(a.hidden), logits)
