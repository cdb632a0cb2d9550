"""Weights on the device: how a layer's are laid out.

A matrix is a tensor, packed in few bits, or laid out as a library multiplies it. Q, K and V are one matrix, and gate
and up another.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu.model.humming_formats import describe_own
from gpu.model.matrix_format import BITS, MatrixFormat, num_words
from gpu.model.matrix_formats import LATENT_UP, OF_EXPERTS, layer_formats, matrix_shapes, output_format, why_unpacked
from gpu.model.spec import Architecture, Experts, LayerSpec, Recurrent
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.operations.recurrent.delta_net import RecurrentWeights
from gpu.weights.host_experts import HostExperts, in_host_memory
from gpu.weights.humming_matrix import HummingMatrix
from gpu.weights.matrix import Held, as_matrix
from transfer.host_pages import advise_huge_pages
from transfer.simd.features import HAS_VECTORS

log = logging.getLogger(__name__)

_SCALE_DTYPES = {1: torch.uint8, 4: torch.float32}  # by their bytes; of two bytes there are several types

UNSET = -1  # of a column's place, until a checkpoint has said

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class BesideWeights:
    """What a layer has that adds up its MLP and experts: norms `[hidden]` before the router, before the experts and
    behind them, and behind the MLP; gains, float32 `[experts]`, of each expert's output.
    """

    router_norm: Tensor
    norm: Tensor
    post_norm: Tensor
    mlp_post_norm: Tensor
    gains: Tensor


@dataclass(frozen=True, slots=True)
class LayerInputWeights:
    """What a layer makes of its inputs: gate `[width, hidden]`, projection `[hidden, width]`, norm `[hidden]`."""

    gate: Tensor
    projection: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class InputWeights:
    """What layers' inputs are made of: table `[vocab, layers * width]`, projection `[layers * width, hidden]`, norm
    `[width]`.
    """

    table: Tensor
    projection: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer. Of all experts of a layer: router `[experts, hidden]`; gate_up `[experts *
    2 * intermediate, hidden]`, one after another, of each its gate first, or, without gates, `[experts * intermediate,
    hidden]`; down `[experts * hidden, intermediate]`.
    host: the last ones, if they lie in host memory; the two matrices then have the first ones alone. Biases, where they
    are, are of all experts, in the order of the rows, and on the card. beside, shared_share `[1,
    hidden]`: of a layer that has an MLP as well (`spec.Experts`). correction: float32 `[experts]`, of a router by
    sigmoids.
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
    """What a layer with latent attention has beside qkv, `[first columns + row, hidden]`, and output, `[hidden, heads *
    value]`. up: `[heads * (plain + value), rank]`, of each head what makes its keys, then its values; norm: `[rank]`;
    query_up `[heads * query_dim, query_rank]` and query_norm `[query_rank]`, where queries are made of a latent.
    """

    up: Held
    norm: Tensor
    query_up: Held | None
    query_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a layer, None where its spec has no such part. attention_norm, mlp_norm `[hidden]`; qkv `[(heads +
    2 kv_heads) * dim, hidden]`, without values or keys that have no projection; output `[hidden, heads * dim]`;
    gate_up `[2 * intermediate, hidden]`, gate first, or, without gates, `[intermediate, hidden]`; down `[hidden,
    intermediate]`; or, in place of these two or beside them, experts. Where the layer's spec has them: qkv_bias,
    output_bias, gate_up_bias and down_bias, of the matrix's rows; query_norm, key_norm `[dim]`, or of all heads
    together `[heads * dim]` and `[kv_heads * dim]`; attention_post_norm, mlp_post_norm `[hidden]`; sinks `[heads]`,
    logits of each query head's softmax that have no value; inputs; scale `[1]`, of its output; latent. Norms that
    are changed as they are loaded are float32: what they lack of one would be rounded away. A layer that has the
    keys of another one has its key_norm, too. recurrent: of a recurrent layer, whose qkv has rows of queries, keys,
    values and the output's gates, in this order, and which has no norms of heads.
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
        """Return a matrix, and behind it those of its rows that lie in host memory."""
        host = None if self.experts is None else self.experts.host
        far = {} if host is None else {"experts_gate_up": host.gate_up, "experts_down": host.down}
        return [self.matrices[name], *([far[name]] if name in far else [])]

    @property
    def mlp(self) -> tuple[Held, Held]:
        """Return gate_up and down of a layer that has its one MLP."""
        assert self.gate_up is not None, "the layer has an MLP"
        assert self.down is not None, "the layer has an MLP"
        return self.gate_up, self.down

    def changed(self, change: Callable[[Held], Held]) -> "LayerWeights":
        """Return the layer with every matrix as `change` makes it."""
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
    """What a head that drafts has beside its layer: mix `[hidden, 2 * hidden]`, of embedding and hidden state, and
    norms `[hidden]` of these two, and behind the layer.
    """

    mix: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model. embedding, logits `[vocab, hidden]`, one if tied; final_norm `[hidden]`; inputs: what
    layers' inputs are made of, if they have some; draft: of a head that drafts, whose layer is the last one, or None.
    Of a device's share, logits are its rows of them.
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
        """Return whether any matrix is of few bits."""
        return not all(isinstance(matrix, Tensor) for matrix in self.matrices)


def unpacked(weights: Weights) -> Weights:
    """Return all matrices as tensors. Layers leave `weights` on the way, so one layer is held twice."""
    layers = [weights.layers.pop(0).changed(_unpacked) for _ in range(len(weights.layers))]
    logits = _unpacked(weights.logits)
    is_tied = weights.embedding is weights.logits
    return replace(weights, layers=layers, logits=logits, embedding=logits if is_tied else weights.embedding)


def served(weights: Weights, architecture: Architecture, device: torch.device) -> Weights:
    """Return the weights as the device multiplies them: on a CPU that has no code for matrices of few bits as they are
    stored, all are unpacked, and the log says why; on a GPU those that a library multiplies are laid out for it, and
    the log says which are not. What makes keys and values of latents is unpacked anywhere.
    """
    for index, layer in enumerate(weights.layers):
        if layer.latent is not None and isinstance(layer.latent.up, Packed):
            weights.layers[index] = replace(layer, latent=replace(layer.latent, up=_unpacked(layer.latent.up)))
    reason = why_unpacked(architecture, HAS_VECTORS) if device.type == "cpu" else None
    if reason is not None:
        log.info("weights event=unpacked reason=%r", reason)
        return unpacked(weights)
    if architecture.quantisation is not None and architecture.quantisation.humming:
        log.info("products by=humming own=%r", describe_own(architecture))
        _lay_out(weights, architecture)
        torch.cuda.empty_cache()
    return weights


def _lay_out(weights: Weights, architecture: Architecture) -> None:
    """Lay out matrix by matrix for the library, in the place of the packed ones."""
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


def allocate_weights(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, scales: torch.dtype = torch.bfloat16,
    experts_on_card: int | None = None,
) -> Weights:  # fmt: skip
    """Allocate weights, not yet filled. scales: of integers, 16 bits. On the CPU in huge pages, which are there four
    times as soon.

    experts_on_card: of each layer's experts; the others lie in host memory, pinned for CUDA; None: all. Raises
    ModelError where the host refuses that memory.
    """
    a = architecture

    def empty(*shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor

    def norm(width: int) -> Tensor:
        return torch.empty(width, dtype=torch.float32 if a.has_wide_norms else dtype, device=device)

    def matrix(rows: int, inner: int, stored: MatrixFormat | None) -> Stored:
        return empty(rows, inner) if stored is None else allocate_packed(rows, inner, stored, dtype, device, scales)

    def on_host(index: int, spec: LayerSpec) -> HostExperts | None:
        """Return a layer's experts in host memory, on the meta device."""
        if spec.experts is None or experts_on_card is None or experts_on_card >= spec.experts.num_experts:
            return None
        count, made = spec.experts.num_experts - experts_on_card, []
        for name in OF_EXPERTS:
            (rows, inner), stored = matrix_shapes(a, spec)[name], layer_formats(a, index)[name]
            rows, meta = rows // spec.experts.num_experts * count, torch.device("meta")
            made.append(
                torch.empty(rows, inner, dtype=dtype, device=meta) if stored is None
                else allocate_packed(rows, inner, stored, dtype, meta, scales)
            )  # fmt: skip
        return HostExperts(count, *made)

    hosts = in_host_memory([on_host(index, spec) for index, spec in enumerate(a.layers)], device)

    def beside(held: Experts) -> BesideWeights:
        gains = torch.empty(held.num_experts, dtype=torch.float32, device=device)
        return BesideWeights(*(norm(a.hidden) for _ in range(4)), gains)

    def layer_inputs() -> LayerInputWeights | None:
        own = a.layer_inputs
        if own is None:
            return None
        return LayerInputWeights(empty(own.width, a.hidden), empty(a.hidden, own.width), norm(a.hidden))

    def recurrent(own: Recurrent) -> RecurrentWeights:
        conv, heads = empty(own.conv_width, 1, own.conv_tokens), own.value_heads if own.gate_rows else 0
        decay, time_bias, skip = (torch.empty(heads, dtype=torch.float32, device=device) for _ in range(3))
        gates = empty(0 if own.is_mamba else own.gate_rows, a.hidden)
        found = RecurrentWeights(gates, conv, decay, time_bias, empty(own.norm_width))
        return replace(found, conv_bias=torch.zeros_like(conv[:, 0, 0]), skip=skip) if own.is_mamba else found

    def layer(index: int, spec: LayerSpec) -> LayerWeights:
        heads = a.heads_of(spec)
        width = (a.num_heads + 2 * heads.count) * heads.dim
        formats, held, host = layer_formats(a, index), spec.experts, hosts[index]
        shapes = of_all = matrix_shapes(a, spec)
        if host is not None and held is not None:
            on_card = held.num_experts - host.count
            near = {name: (of_all[name][0] // held.num_experts * on_card, of_all[name][1]) for name in OF_EXPERTS}
            shapes = of_all | near
        made = {name: matrix(*shape, formats[name]) for name, shape in shapes.items()}
        experts = None
        if held is not None:
            biases = (held.num_experts, of_all["experts_gate_up"][0], of_all["experts_down"][0])
            experts = ExpertWeights(
                empty(held.num_experts, a.hidden), made["experts_gate_up"], made["experts_down"], host,
                *(empty(rows) if held.has_biases else None for rows in biases),
                beside=beside(held) if held.beside_mlp else None,
                shared_share=empty(1, a.hidden) if held.is_shared and not held.is_whole else None,
                correction=torch.empty(held.num_experts, dtype=torch.float32, device=device)
                if held.is_sigmoid else None,
            )  # fmt: skip
        latent = None
        if a.latent is not None:
            rank = a.latent.query_rank
            latent = LatentWeights(made[LATENT_UP], norm(a.latent.rank), made.get("query_up"), rank and norm(rank))
        return LayerWeights(
            attention_norm=norm(a.hidden) if spec.pre_norms and spec.has_mixer else None,
            qkv=made.get("qkv"),
            output=made.get("output"),
            mlp_norm=norm(a.hidden) if spec.pre_norms and spec.has_mlp else None,
            gate_up=made.get("gate_up"),
            down=made.get("down"),
            experts=experts,
            qkv_bias=empty(width) if spec.qkv_bias else None,
            output_bias=empty(a.hidden) if spec.output_bias else None,
            gate_up_bias=empty(spec.first_rows(a.intermediate)) if spec.mlp_bias else None,
            down_bias=empty(a.hidden) if spec.mlp_bias else None,
            query_norm=norm(a.num_heads * heads.dim)
            if spec.wide_qk_norm
            else norm(heads.dim)
            if spec.qk_norm
            else None,
            key_norm=None
            if not (spec.qk_norm or spec.wide_qk_norm)
            else norm(heads.count * heads.dim)
            if spec.wide_qk_norm
            else norm(heads.dim)
            if spec.kv_of is None
            else layers[spec.kv_of].key_norm,
            attention_post_norm=norm(a.hidden) if spec.post_norms else None,
            mlp_post_norm=norm(a.hidden) if spec.post_norms else None,
            sinks=empty(a.num_heads) if spec.sinks else None,
            inputs=layer_inputs(),
            scale=empty(1) if spec.is_scaled else None,
            recurrent=None if spec.recurrent is None else recurrent(spec.recurrent),
            latent=latent,
        )

    embedding = matrix(a.vocab_size, a.hidden, output_format(a) if a.tied_embeddings else None)
    layers: list[LayerWeights] = []
    for index, spec in enumerate(a.layers):
        made = layer(index, spec)
        if spec.plain_qk_norm and made.query_norm is not None and made.key_norm is not None:
            made.query_norm.fill_(a.query_gain)
            made.key_norm.fill_(1.0)
        layers.append(made)
    logits = embedding if a.tied_embeddings else matrix(a.logit_rows, a.hidden, output_format(a))
    if a.share is not None and isinstance(logits, Tensor) and len(logits) > a.logit_rows:
        logits = logits[a.share.rows(a.vocab_size)]
    inputs, own = None, a.layer_inputs
    if own is not None:
        width = a.num_layers * own.width
        inputs = InputWeights(empty(own.vocab_size, width), empty(width, a.hidden), norm(own.width))
    draft = None
    if a.draft_layers:
        draft = DraftWeights(empty(a.hidden, 2 * a.hidden), *(norm(a.hidden) for _ in range(3)))
    return Weights(embedding, layers, norm(a.hidden), logits, inputs, draft)


def allocate_packed(
    rows: int, inner: int, stored: MatrixFormat, dtype: torch.dtype, device: torch.device, scales: torch.dtype
) -> Packed:
    """Allocate a packed matrix, not yet filled. scales: of 16 bits, where they have so many."""
    group = stored.group or inner
    shape = (-(-rows // stored.row_block), -(-inner // group))
    words = torch.empty(rows, num_words(inner, BITS[stored.kind]), dtype=torch.int32, device=device)
    if device.type == "cpu":
        advise_huge_pages(words.data_ptr(), words.nbytes)
    if stored.run is not None:
        scales = torch.int16
    return Packed(
        kind=stored.kind, dtype=dtype, inner=inner, group=group, row_block=stored.row_block,
        words=words,
        scales=torch.empty(shape, dtype=_SCALE_DTYPES.get(stored.scale_bytes, scales), device=device),
        zeros=torch.empty(shape, dtype=torch.uint8, device=device) if stored.has_zeros else None,
        order=torch.full((inner,), UNSET, dtype=torch.int64, device=device) if stored.has_order else None,
        runs=None if stored.run is None else torch.empty(rows, inner // stored.run, dtype=torch.int32, device=device),
    )  # fmt: skip
