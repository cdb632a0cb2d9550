"""Weights on the device: how a layer's are laid out, and random ones for a named shape.

A matrix is a tensor, or packed in few bits. It refuses to know how they are used, beyond that Q, K and V are one matrix
and gate and up another, and where checkpoints have them (`gpu.model.checkpoint`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu.kernels.packed import BITS, Packed
from gpu.kernels.packed_linear import unpack
from gpu.kernels.words import pack_words
from gpu.model.matrix_format import MatrixFormat, num_words
from gpu.model.matrix_formats import layer_formats, matrix_shapes, output_format
from gpu.model.spec import Architecture, LayerSpec
from transfer.host_pages import ask_huge_pages

RANDOM_LOGIT_SPREAD = 3.0  # standard deviation of random weights' logits: neither flat nor one-hot

RANDOM_BIAS_SPREAD = 0.1  # of random weights' biases: seen in every result, and no larger than what they are added to

# Of random numbers of few bits: the standard deviation of what a scale multiplies.
RANDOM_STEPS = {"int4": 2.7, "int8": 40.0, "fp8": 16.0}

UNSET = -1  # of a column's place, until a checkpoint has said

Progress = Callable[[float], None]
Stored = Tensor | Packed


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """attention_norm, mlp_norm `[hidden]`; qkv `[(heads + 2 kv_heads) * dim, hidden]`; output `[hidden, heads * dim]`;
    gate_up `[2 * intermediate, hidden]`, gate first; down `[hidden, intermediate]`. Where the layer's spec has them:
    qkv_bias, of qkv's rows; query_norm, key_norm `[dim]`; attention_post_norm, mlp_post_norm `[hidden]`. Norms that a
    checkpoint stores less one are float32: what they lack of one would be rounded away.
    """

    attention_norm: Tensor
    qkv: Stored
    output: Stored
    mlp_norm: Tensor
    gate_up: Stored
    down: Stored
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
    logits: Stored

    @property
    def is_packed(self) -> bool:
        """Whether any matrix is."""
        matrices = (matrix for layer in self.layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return isinstance(self.logits, Packed) or any(isinstance(matrix, Packed) for matrix in matrices)


def unpacked(weights: Weights) -> Weights:
    """All matrices as tensors. Takes the layers out of `weights` as it goes: two copies are of one layer alone."""
    layers = [_unpacked_layer(weights.layers.pop(0)) for _ in range(len(weights.layers))]
    return Weights(weights.embedding, layers, weights.final_norm, _unpacked(weights.logits))


def _unpacked_layer(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer, qkv=_unpacked(layer.qkv), output=_unpacked(layer.output), gate_up=_unpacked(layer.gate_up),
        down=_unpacked(layer.down),
    )  # fmt: skip


def _unpacked(stored: Stored) -> Tensor:
    return unpack(stored) if isinstance(stored, Packed) else stored


def random_weights(architecture: Architecture, seed: int, dtype: torch.dtype, device: torch.device,
                   on_progress: Progress) -> Weights:  # fmt: skip
    """Draw weights on the device: activations stay of order one, and logits have a spread of RANDOM_LOGIT_SPREAD.

    Matrices of few bits are drawn as such, all scales alike; on the CPU they are unpacked.
    """
    weights = allocate_weights(architecture, dtype, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    residual_scale = (2 * architecture.num_layers) ** -0.5

    def draw(matrix: Stored, scale: float) -> None:
        if isinstance(matrix, Packed):
            return _draw_packed(matrix, scale * matrix.inner**-0.5, generator)
        matrix.normal_(0.0, scale * matrix.shape[-1] ** -0.5, generator=generator)
        return None

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
    return unpacked(weights) if device.type == "cpu" and architecture.quantisation is not None else weights


def _draw_packed(matrix: Packed, spread: float, generator: torch.Generator) -> None:
    """Numbers of this standard deviation, normal but for their rounding."""
    step = RANDOM_STEPS[matrix.kind]
    for words in matrix.words.split(4096):
        drawn = torch.empty(len(words), matrix.inner, device=words.device).normal_(0.0, step, generator=generator)
        if matrix.kind == "fp8":
            numbers = drawn.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            numbers = drawn.add_(matrix.middle).round_().clamp_(0, 2**matrix.bits - 1).to(torch.uint8)
        words.copy_(pack_words(numbers, matrix.bits))
    if matrix.runs is not None:
        _fill_runs(matrix, spread / step)
        return
    matrix.scales.fill_(spread / step)
    if matrix.zeros is not None:
        matrix.zeros.fill_(matrix.middle)


def _fill_runs(matrix: Packed, step: float) -> None:
    """The same scale for all groups, and the offset that puts the middle number at 0, of at most a signed byte."""
    assert matrix.runs is not None, "the caller has seen them"
    sign = 1 if matrix.middle < 128 else -1
    pair = torch.tensor([1, sign * matrix.middle], dtype=torch.int8)
    run = torch.tensor([step, sign * step], dtype=torch.float16)
    matrix.scales.fill_(int(pair.view(torch.int16)))
    matrix.runs.fill_(int(run.view(torch.int32)))


def allocate_weights(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, scales: torch.dtype = torch.bfloat16
) -> Weights:
    """Not yet filled. scales: of integers, 16 bits. On the CPU in huge pages, which are there four times as soon."""
    a = architecture
    shapes = matrix_shapes(a)

    def empty(*shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            ask_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def norm(width: int) -> Tensor:
        return torch.empty(width, dtype=torch.float32 if a.norm_offset else dtype, device=device)

    def matrix(rows: int, inner: int, stored: MatrixFormat | None) -> Stored:
        return empty(rows, inner) if stored is None else allocate_packed(rows, inner, stored, dtype, device, scales)

    def layer(index: int, spec: LayerSpec) -> LayerWeights:
        width = (a.num_heads + 2 * a.num_kv_heads) * a.dim
        formats = layer_formats(a, index)
        return LayerWeights(
            attention_norm=norm(a.hidden),
            qkv=matrix(*shapes["qkv"], formats["qkv"]),
            output=matrix(*shapes["output"], formats["output"]),
            mlp_norm=norm(a.hidden),
            gate_up=matrix(*shapes["gate_up"], formats["gate_up"]),
            down=matrix(*shapes["down"], formats["down"]),
            qkv_bias=empty(width) if spec.qkv_bias else None,
            query_norm=norm(a.dim) if spec.qk_norm else None,
            key_norm=norm(a.dim) if spec.qk_norm else None,
            attention_post_norm=norm(a.hidden) if spec.post_norms else None,
            mlp_post_norm=norm(a.hidden) if spec.post_norms else None,
        )

    embedding = empty(a.vocab_size, a.hidden)
    layers = [layer(index, spec) for index, spec in enumerate(a.layers)]
    logits = embedding if a.tied_embeddings else matrix(a.vocab_size, a.hidden, output_format(a))
    return Weights(embedding, layers, norm(a.hidden), logits)


def allocate_packed(
    rows: int, inner: int, stored: MatrixFormat, dtype: torch.dtype, device: torch.device, scales: torch.dtype
) -> Packed:
    """Not yet filled. scales: of 16 bits, where they have so many."""
    group = stored.group or inner
    shape = (-(-rows // stored.row_block), -(-inner // group))
    if stored.run is not None:
        scales = torch.int16
    return Packed(
        kind=stored.kind, dtype=dtype, inner=inner, group=group, row_block=stored.row_block,
        words=torch.empty(rows, num_words(inner, BITS[stored.kind]), dtype=torch.int32, device=device),
        scales=torch.empty(shape, dtype=torch.float32 if stored.scale_bytes == 4 else scales, device=device),
        zeros=torch.empty(shape, dtype=torch.uint8, device=device) if stored.has_zeros else None,
        order=torch.full((inner,), UNSET, dtype=torch.int64, device=device) if stored.has_order else None,
        runs=None if stored.run is None else torch.empty(rows, inner // stored.run, dtype=torch.int32, device=device),
    )  # fmt: skip
