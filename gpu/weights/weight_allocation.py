"""Allocate a model's weights by the specs of its layers, without filling them."""

from dataclasses import replace

import torch
from torch import Tensor

from gpu.model.matrix_format import BITS, MatrixFormat, num_words
from gpu.model.matrix_formats import LATENT_UP, OF_EXPERTS, layer_formats, matrix_shapes, output_format
from gpu.model.spec import Architecture, Experts, LayerSpec, Recurrent
from gpu.operations.linear.packed_matrix import Packed, Stored
from gpu.operations.recurrent.delta_net import RecurrentWeights
from gpu.weights.host_experts import HostExperts, in_host_memory
from gpu.weights.weights import (
    BesideWeights,
    DraftWeights,
    ExpertWeights,
    InputWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Weights,
)
from transfer.host_pages import advise_huge_pages

UNSET = -1  # of a column's place, until a checkpoint has said

_SCALE_DTYPES = {1: torch.uint8, 4: torch.float32}  # by their bytes; of two bytes there are several types


def allocate_weights(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, scales: torch.dtype = torch.bfloat16,
    experts_on_card: int | None = None,
) -> Weights:  # fmt: skip
    """Allocate weights without filling them. On the CPU they are in huge pages, which are allocated four times as fast.

    scales: the 16-bit dtype of integers' scales. experts_on_card: how many of each layer's experts are on the card; the
    others are in host memory, pinned for CUDA. None: all. Raises ModelError if the host has no memory for them.
    """
    return _Allocation(architecture, dtype, device, scales, experts_on_card).weights()


class _Allocation:
    """The weights of a model under allocation; see `allocate_weights`."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, device: torch.device, scales: torch.dtype,
        experts_on_card: int | None,
    ) -> None:  # fmt: skip
        self._architecture = architecture
        self._dtype, self._device, self._scales = dtype, device, scales
        self._experts_on_card = experts_on_card
        self._layers: list[LayerWeights] = []

    def weights(self) -> Weights:
        a = self._architecture
        hosts = in_host_memory([self._host_experts(*layer) for layer in enumerate(a.layers)], self._device)
        embedding = self._matrix(a.vocab_size, a.hidden, output_format(a) if a.tied_embeddings else None)
        for index, (spec, host) in enumerate(zip(a.layers, hosts, strict=True)):
            self._layers.append(self._layer(index, spec, host))
        logits = embedding if a.tied_embeddings else self._matrix(a.logit_rows, a.hidden, output_format(a))
        if a.share is not None and isinstance(logits, Tensor) and len(logits) > a.logit_rows:
            logits = logits[a.share.rows(a.vocab_size)]
        inputs, own = None, a.layer_inputs
        if own is not None:
            width = a.num_layers * own.width
            inputs = InputWeights(
                self._empty(own.vocab_size, width), self._empty(width, a.hidden), self._norm(own.width)
            )
        draft = None
        if a.draft_layers:
            draft = DraftWeights(self._empty(a.hidden, 2 * a.hidden), *(self._norm(a.hidden) for _ in range(3)))
        return Weights(embedding, self._layers, self._norm(a.hidden), logits, inputs, draft)

    def _layer(self, index: int, spec: LayerSpec, host: HostExperts | None) -> LayerWeights:
        a, empty, norm = self._architecture, self._empty, self._norm
        made = self._matrices(index, spec, host)
        query_norm, key_norm = self._head_norms(spec)
        qkv_rows = (a.num_heads + 2 * a.heads_of(spec).count) * a.heads_of(spec).dim
        return LayerWeights(
            attention_norm=norm(a.hidden) if spec.pre_norms and spec.has_mixer else None,
            qkv=made.get("qkv"),
            output=made.get("output"),
            mlp_norm=norm(a.hidden) if spec.pre_norms and spec.has_mlp else None,
            gate_up=made.get("gate_up"),
            down=made.get("down"),
            experts=None if spec.experts is None else self._experts(spec.experts, spec, made, host),
            qkv_bias=empty(qkv_rows) if spec.qkv_bias else None,
            output_bias=empty(a.hidden) if spec.output_bias else None,
            gate_up_bias=empty(spec.first_rows(a.intermediate)) if spec.mlp_bias else None,
            down_bias=empty(a.hidden) if spec.mlp_bias else None,
            query_norm=query_norm,
            key_norm=key_norm,
            attention_post_norm=norm(a.hidden) if spec.post_norms else None,
            mlp_post_norm=norm(a.hidden) if spec.post_norms else None,
            sinks=empty(a.num_heads) if spec.sinks else None,
            inputs=self._layer_inputs(),
            scale=empty(1) if spec.is_scaled else None,
            recurrent=None if spec.recurrent is None else self._recurrent(spec.recurrent),
            latent=self._latent(made),
        )

    def _matrices(self, index: int, spec: LayerSpec, host: HostExperts | None) -> dict[str, Stored]:
        """Return a layer's matrices by name, with only the experts on the card."""
        shapes, formats = matrix_shapes(self._architecture, spec), layer_formats(self._architecture, index)
        if host is not None and spec.experts is not None:
            total = spec.experts.num_experts
            near = {name: (shapes[name][0] // total * (total - host.count), shapes[name][1]) for name in OF_EXPERTS}
            shapes = shapes | near
        return {name: self._matrix(*shape, formats[name]) for name, shape in shapes.items()}

    def _experts(
        self, held: Experts, spec: LayerSpec, made: dict[str, Stored], host: HostExperts | None
    ) -> ExpertWeights:
        hidden, of_all = self._architecture.hidden, matrix_shapes(self._architecture, spec)
        biases = (held.num_experts, of_all["experts_gate_up"][0], of_all["experts_down"][0])
        return ExpertWeights(
            self._empty(held.num_experts, hidden), made["experts_gate_up"], made["experts_down"], host,
            *(self._empty(rows) if held.has_biases else None for rows in biases),
            beside=self._beside(held) if held.beside_mlp else None,
            shared_share=self._empty(1, hidden) if held.is_shared and not held.is_whole else None,
            correction=self._wide(held.num_experts) if held.is_sigmoid else None,
        )  # fmt: skip

    def _host_experts(self, index: int, spec: LayerSpec) -> HostExperts | None:
        """Return a layer's experts in host memory, on the meta device."""
        on_card = self._experts_on_card
        if spec.experts is None or on_card is None or on_card >= spec.experts.num_experts:
            return None
        shapes, formats = matrix_shapes(self._architecture, spec), layer_formats(self._architecture, index)
        count, made, meta = spec.experts.num_experts - on_card, [], torch.device("meta")
        for name in OF_EXPERTS:
            (rows, inner), stored = shapes[name], formats[name]
            rows = rows // spec.experts.num_experts * count
            made.append(
                torch.empty(rows, inner, dtype=self._dtype, device=meta) if stored is None
                else allocate_packed(rows, inner, stored, self._dtype, meta, self._scales)
            )  # fmt: skip
        return HostExperts(count, *made)

    def _head_norms(self, spec: LayerSpec) -> tuple[Tensor | None, Tensor | None]:
        """Return the norms of queries and keys. Plain ones are filled with ones, since no checkpoint has them."""
        a, heads = self._architecture, self._architecture.heads_of(spec)
        if not (spec.qk_norm or spec.wide_qk_norm):
            return None, None
        query = self._norm(a.num_heads * heads.dim if spec.wide_qk_norm else heads.dim)
        key: Tensor | None
        if spec.wide_qk_norm:
            key = self._norm(heads.count * heads.dim)
        else:
            key = self._norm(heads.dim) if spec.kv_of is None else self._layers[spec.kv_of].key_norm
        if spec.plain_qk_norm and key is not None:
            query.fill_(a.query_gain)
            key.fill_(1.0)
        return query, key

    def _latent(self, made: dict[str, Stored]) -> LatentWeights | None:
        own = self._architecture.latent
        if own is None:
            return None
        rank = own.query_rank
        return LatentWeights(made[LATENT_UP], self._norm(own.rank), made.get("query_up"), rank and self._norm(rank))

    def _beside(self, held: Experts) -> BesideWeights:
        norms = (self._norm(self._architecture.hidden) for _ in range(4))
        return BesideWeights(*norms, self._wide(held.num_experts))

    def _layer_inputs(self) -> LayerInputWeights | None:
        own, hidden = self._architecture.layer_inputs, self._architecture.hidden
        if own is None:
            return None
        return LayerInputWeights(self._empty(own.width, hidden), self._empty(hidden, own.width), self._norm(hidden))

    def _recurrent(self, own: Recurrent) -> RecurrentWeights:
        conv, heads = self._empty(own.conv_width, 1, own.conv_tokens), own.value_heads if own.gate_rows else 0
        decay, time_bias, skip = (self._wide(heads) for _ in range(3))
        gates = self._empty(0 if own.is_mamba else own.gate_rows, self._architecture.hidden)
        found = RecurrentWeights(gates, conv, decay, time_bias, self._empty(own.norm_width))
        return replace(found, conv_bias=torch.zeros_like(conv[:, 0, 0]), skip=skip) if own.is_mamba else found

    def _matrix(self, rows: int, inner: int, stored: MatrixFormat | None) -> Stored:
        if stored is None:
            return self._empty(rows, inner)
        return allocate_packed(rows, inner, stored, self._dtype, self._device, self._scales)

    def _norm(self, width: int) -> Tensor:
        dtype = torch.float32 if self._architecture.has_wide_norms else self._dtype
        return torch.empty(width, dtype=dtype, device=self._device)

    def _wide(self, width: int) -> Tensor:
        """Return a vector in float32, whatever the dtype of weights."""
        return torch.empty(width, dtype=torch.float32, device=self._device)

    def _empty(self, *shape: int) -> Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if self._device.type == "cpu":
            advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor


def allocate_packed(
    rows: int, inner: int, stored: MatrixFormat, dtype: torch.dtype, device: torch.device, scales: torch.dtype
) -> Packed:
    """Allocate a packed matrix without filling it. scales: dtype of scales that have 16 bits."""
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
        rounds_tokens=stored.rounds_tokens,
    )  # fmt: skip
