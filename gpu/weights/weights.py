"""Hold the weights of a model on the device, by layer.

A matrix is a tensor, packed in few bits, or in the layout of a library. Q, K and V are one matrix, and gate and up are
another.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpu.model.humming_formats import describe_own
from gpu.model.matrix_formats import LATENT_UP, layer_formats, why_unpacked
from gpu.model.spec import Architecture
from gpu.operations.linear.packed_matrix import Packed, Stored, lay_in_tiles, why_not_in_tiles
from gpu.operations.recurrent.delta_net import RecurrentWeights
from gpu.weights.host_experts import HostExperts
from gpu.weights.humming_matrix import HummingMatrix
from gpu.weights.matrix import Held, as_matrix
from transfer.simd.features import HAS_VECTORS

log = logging.getLogger(__name__)

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """Further weights of a layer that adds up its MLP and experts: norms `[hidden]` before the router, before and after
    the experts, and after the MLP. gains: float32 `[experts]`, a factor of each expert's output.
    """

    router_norm: Tensor
    norm: Tensor
    post_norm: Tensor
    mlp_post_norm: Tensor
    gains: Tensor


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """A layer's weights for per-layer inputs: gate `[width, hidden]`, projection `[hidden, width]`, norm `[hidden]`."""

    gate: Tensor
    projection: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class InputWeights:
    """The weights that make per-layer inputs: table `[vocab, layers * width]`, projection `[layers * width, hidden]`,
    norm `[width]`.
    """

    table: Tensor
    projection: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer.

    router: `[experts, hidden]`.
    gate_up: `[experts * 2 * intermediate, hidden]`, expert after expert, each with its gate first; or, without gates,
        `[experts * intermediate, hidden]`.
    down: `[experts * hidden, intermediate]`.
    host: the last experts, if they are in host memory. Then gate_up and down have only the first experts.
    router_bias, gate_up_bias, down_bias: of all experts, in the order of the rows, on the card.
    beside, shared_share `[1, hidden]`: for a layer that has an MLP as well (`spec.Experts`).
    correction: float32 `[experts]`, for a router by sigmoids.
    """

    router: Tensor
    gate_up: Stored
    down: Stored
    host: HostExperts | None = None
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    beside: BesideWeights | None = None
    shared_share: Tensor | None = None
    correction: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Further weights of a layer with latent attention, whose qkv is `[first columns + row, hidden]` and output
    `[hidden, heads * value]`.

    up: `[heads * (plain + value), rank]`, for each head the rows that make its keys, then those for its values.
    norm: `[rank]`.
    query_up `[heads * query_dim, query_rank]`, query_norm `[query_rank]`: if queries are made of a latent, else None.
    """

    up: Held
    norm: Tensor
    query_up: Held | None
    query_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer. A field is None if the layer's spec has no such part.

    attention_norm, mlp_norm, attention_post_norm, mlp_post_norm: `[hidden]`.
    qkv: `[(heads + 2 kv_heads) * dim, hidden]`, without keys or values that have no projection. Of a recurrent layer:
        rows of queries, keys, values and the output's gates.
    output: `[hidden, heads * dim]`.
    gate_up: `[2 * intermediate, hidden]`, gate first; or, without gates, `[intermediate, hidden]`.
    down: `[hidden, intermediate]`.
    experts: in place of gate_up and down, or beside them.
    qkv_bias, output_bias, gate_up_bias, down_bias: one number for each row of the matrix.
    query_norm, key_norm: `[dim]`, or of all heads together `[heads * dim]` and `[kv_heads * dim]`. A layer that uses
        another layer's keys has that layer's key_norm. Recurrent layers have none.
    sinks: `[heads]`, a logit without a value in each query head's softmax.
    scale: `[1]`, a factor of the layer's output.

    Norms that are changed at load are float32, because their difference from one would be rounded away.
    """

    attention_norm: Tensor | None
    qkv: Held | None
    output: Held | None
    mlp_norm: Tensor | None
    gate_up: Held | None = None
    down: Held | None = None
    experts: ExpertWeights | None = None
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    attention_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None
    inputs: LayerInputWeights | None = None
    scale: Tensor | None = None
    recurrent: RecurrentWeights | None = None
    latent: LatentWeights | None = None

    @property
    def matrices(self) -> dict[str, Held]:
        """Return the matrices by name, as in `gpu.model.matrix_formats.matrix_shapes`."""
        experts, latent = self.experts, self.latent
        held = {"qkv": self.qkv, "output": self.output, LATENT_UP: latent and latent.up,
                "query_up": latent and latent.query_up, "gate_up": self.gate_up, "down": self.down,
                "experts_gate_up": experts and experts.gate_up, "experts_down": experts and experts.down}  # fmt: skip
        return {name: matrix for name, matrix in held.items() if matrix is not None}

    @property
    def biases(self) -> dict[str, Tensor]:
        """Return the biases by the names of their matrices."""
        experts = self.experts
        held = {"qkv": self.qkv_bias, "output": self.output_bias, "gate_up": self.gate_up_bias, "down": self.down_bias,
                "experts_gate_up": experts and experts.gate_up_bias,
                "experts_down": experts and experts.down_bias}  # fmt: skip
        return {name: bias for name, bias in held.items() if bias is not None}

    def stacks(self, name: str) -> list[Held]:
        """Return a matrix, followed by the matrix of its rows in host memory, if there is one."""
        host = None if self.experts is None else self.experts.host
        far = {} if host is None else {"experts_gate_up": host.gate_up, "experts_down": host.down}
        return [self.matrices[name], *([far[name]] if name in far else [])]

    @property
    def mlp(self) -> tuple[Held, Held]:
        """Return gate_up and down of a layer that has an MLP."""
        assert self.gate_up is not None, "the layer has an MLP"
        assert self.down is not None, "the layer has an MLP"
        return self.gate_up, self.down

    def changed(self, change: Callable[[Held], Held]) -> "LayerWeights":
        """Return the layer with `change` applied to every matrix."""
        made = {name: change(matrix) for name, matrix in self.matrices.items()}
        gate_up, down = made.pop("experts_gate_up", None), made.pop("experts_down", None)
        if self.latent is not None:
            up, query_up = made.pop(LATENT_UP), made.pop("query_up", None)
            made["latent"] = replace(self.latent, up=up, query_up=query_up)
        if self.experts is None or gate_up is None or down is None:
            return replace(self, **made)
        host = self.experts.host
        if host is not None:
            host = replace(host, gate_up=change(host.gate_up), down=change(host.down))
        return replace(self, **made, experts=replace(self.experts, gate_up=gate_up, down=down, host=host))


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The weights of a draft head beside its layer. mix: `[hidden, 2 * hidden]`, of embedding and hidden state. The
    norms are `[hidden]`: of these two inputs, and of the layer's output.
    """

    mix: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model.

    embedding, logits: `[vocab, hidden]`, one tensor if tied. In a device's share, logits are its own rows.
    final_norm: `[hidden]`.
    inputs: the weights that make per-layer inputs, or None.
    draft: the weights of a draft head, whose layer is the last one, or None.
    """

    embedding: Stored
    layers: list[LayerWeights]
    final_norm: Tensor
    logits: Stored
    inputs: InputWeights | None = None
    draft: DraftWeights | None = None

    @property
    def matrices(self) -> list[Held]:
        """Return the matrices of all layers, and the output matrix."""
        return [*(matrix for layer in self.layers for matrix in layer.matrices.values()), self.logits]

    @property
    def is_packed(self) -> bool:
        """Return whether any matrix has few bits."""
        return not all(isinstance(matrix, Tensor) for matrix in self.matrices)


def unpacked(weights: Weights) -> Weights:
    """Return all matrices as tensors. Layers are removed from `weights` one by one, so only one is held twice."""
    layers = [weights.layers.pop(0).changed(_unpacked) for _ in range(len(weights.layers))]
    logits = _unpacked(weights.logits)
    is_tied = weights.embedding is weights.logits
    return replace(weights, layers=layers, logits=logits, embedding=logits if is_tied else weights.embedding)


def served(weights: Weights, architecture: Architecture, device: torch.device) -> Weights:
    """Return the weights in the layout in which the device multiplies them.

    On a GPU, matrices that a library multiplies get its layout. On a CPU, matrices that are multiplied in integers are
    laid out in tiles; if the CPU has no code for packed matrices, all are unpacked. The log names the matrices left
    out, or the reason. The matrix that makes keys and values of latent rows is always unpacked.
    """
    for index, layer in enumerate(weights.layers):
        if layer.latent is not None and isinstance(layer.latent.up, Packed):
            weights.layers[index] = replace(layer, latent=replace(layer.latent, up=_unpacked(layer.latent.up)))
    reason = why_unpacked(architecture, HAS_VECTORS) if device.type == "cpu" else None
    if reason is not None:
        log.info("weights event=unpacked reason=%r", reason)
        return unpacked(weights)
    if device.type == "cpu" and architecture.quantisation is not None and architecture.quantisation.integers:
        return _in_tiles(weights)
    asked = "own" if architecture.quantisation is None else architecture.quantisation.products
    if asked in ("humming", "fp8"):
        log.info("products by=%s own=%r", asked, describe_own(architecture))
    if asked == "humming":
        _lay_out(weights, architecture)
        torch.cuda.empty_cache()
    return weights


def _in_tiles(weights: Weights) -> Weights:
    """Lay out matrix by matrix in tiles, replacing the packed ones."""
    reasons: Counter[str] = Counter()

    def lay(held: Held, experts: Sequence[Held] = (), num_experts: int = 1) -> Held:
        if not isinstance(held, Packed):
            return held
        parts = num_experts if any(held is one for one in experts) else 1
        reason = why_not_in_tiles(held, parts)
        reasons[reason or "none"] += 1
        return lay_in_tiles(held) if reason is None else held

    for index, layer in enumerate(weights.layers):
        own = layer.experts
        experts, count = ((), 1) if own is None else ((own.gate_up, own.down), len(own.router))
        weights.layers[index] = layer.changed(partial(lay, experts=experts, num_experts=count))
    logits = lay(weights.logits)
    assert isinstance(logits, Stored), "as it was"
    left = "; ".join(f"{count} matrices: {reason}" for reason, count in reasons.items() if reason != "none")
    log.info("products by=integers matrices=%d own=%r", reasons["none"], left)
    is_tied = weights.embedding is weights.logits
    return replace(weights, logits=logits, embedding=logits if is_tied else weights.embedding)


def _lay_out(weights: Weights, architecture: Architecture) -> None:
    """Lay out matrix by matrix for the library, replacing the packed ones."""
    for index in range(architecture.num_layers):
        for name, stored in layer_formats(architecture, index).items():
            if stored is not None and stored.humming:
                layer, laid_out = weights.layers[index], HummingMatrix(weights.layers[index].matrices[name])
                if name == "query_up" and layer.latent is not None:
                    weights.layers[index] = replace(layer, latent=replace(layer.latent, query_up=laid_out))
                    continue
                weights.layers[index] = replace(layer, **{name: laid_out})


def _unpacked(held: Held) -> Tensor:
    return as_matrix(held).unpack()
