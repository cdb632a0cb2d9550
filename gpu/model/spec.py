"""Describe a decoder's shape: its sizes, what each layer computes, and the byte and FLOP counts that follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from gpu.model.matrix_format import Quantisation

ROPE_TYPES = ("default", "llama3", "linear", "dynamic", "yarn", "longrope", "proportional")
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
LayerPart = Literal["whole", "mixer", "mlp"]
RecurrentKind = Literal["delta_net", "short_conv", "mamba2"]


def is_gated(activation: Activation) -> bool:
    """Return whether an MLP with this activation has a gate; `relu2`, which is relu(up)**2, has none."""
    return activation != "relu2"


def first_rows(activation: Activation, intermediate: int) -> int:
    """Return the rows of the first matrix of an MLP: gate rows, if it has gates, and then as many up rows."""
    return (1 + is_gated(activation)) * intermediate


class ModelError(Exception):
    """A model folder or shape that cannot be served; the message names file, key, value and what was wanted."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE frequencies. kind: one of ROPE_TYPES, or "none" (NO_ROTATION). settings: the other keys of the config."""

    kind: str
    theta: float
    settings: dict[str, Any] = field(hash=False)


NO_ROTATION = RopeScaling("none", 1.0, {})  # for layers whose queries and keys are not rotated


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer: MLPs of which each token is routed to the `per_token` with the largest router logits.

    intermediate: columns of one expert.
    is_normalised: the routing weights of a token's experts are scaled to sum to 1. They come from a softmax over all
        experts.
    has_biases: the router has a bias, and so have gate, up and down of each expert.
    beside_mlp: the layer also has its one MLP. Experts and MLP each have norms before and behind, the router has a
        norm, and the output of each expert has a factor.
    is_shared: the layer also has a shared expert, which reads the same normed rows as the experts. Its output is
        multiplied by the sigmoid of a logit that each token has for it, or by 1 if is_whole.
    is_sigmoid: experts are chosen by the sigmoid of their logit plus a correction for each expert, among the
        `groups_taken` of `groups` with the largest sum of their two best. The weights are the sigmoids alone.
    gain: factor of all routing weights.
    group_best: where a softmax chooses among groups, a group's score is the sum of so many of its largest shares.
    """

    num_experts: int
    per_token: int
    intermediate: int
    is_normalised: bool
    has_biases: bool = False
    beside_mlp: bool = False
    is_shared: bool = False
    is_whole: bool = False
    is_sigmoid: bool = False
    groups: int = 1
    groups_taken: int = 1
    group_best: int = 2
    gain: float = 1.0

    @property
    def is_folded(self) -> bool:
        """Return whether the experts are chosen by other scores than the logits of the softmax."""
        return self.is_sigmoid or self.groups > 1

    @property
    def keeps_weights(self) -> bool:
        """Return whether the scores of such a choice are the routing weights as they are, without normalisation."""
        return self.is_folded and not self.is_normalised

    @property
    def has_mlp(self) -> bool:
        """Return whether the layer has an MLP beside its experts."""
        return self.beside_mlp or self.is_shared

    def taken(self, num_tokens: int) -> float:
        """Return the expected number of experts that a step of `num_tokens` reads, if each token draws at random."""
        return self.num_experts * (1 - (1 - self.per_token / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class KvHeads:
    """The KV heads of a layer: how many, and the elements of each."""

    count: int
    dim: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with a state in place of attention (`gpu.operations.recurrent`).

    Instead of keys and values it keeps a state, `[value_heads, key_dim, value_dim]`, and the last inputs of its
    convolution, `[conv_tokens - 1, conv_width]`. Neighbouring value heads share a key head.

    kind: `delta_net`: a gated delta net. `mamba2`: a state space model. What its papers call C, B and x are queries,
        keys and values here; its groups are key heads; the checkpoint's one matrix also makes the time steps.
        `short_conv`: a short convolution with gates. Its state is empty: it has no key elements, and one value head as
        wide as hidden states.
    is_grouped: the checkpoint has one matrix of queries, keys, values and gates, in the order of key heads.
    has_grouped_gates: the checkpoint has one matrix of both gates of the state, in the order of key heads.
    is_tiled: value heads that share a key head are `key_heads` apart, instead of neighbours.
    norm_eps: epsilon of the norm of its output; None: the model's.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_tokens: int
    is_grouped: bool = False
    has_grouped_gates: bool = False
    is_tiled: bool = False
    kind: RecurrentKind = "delta_net"
    norm_eps: float | None = None

    @property
    def is_short(self) -> bool:
        return self.kind == "short_conv"

    @property
    def is_mamba(self) -> bool:
        return self.kind == "mamba2"

    @property
    def projected_width(self) -> int:
        """Return the width of a token's projection, without the state's gates."""
        return 3 * self.value_width if self.is_short else self.conv_width + self.value_width

    @property
    def matrix_rows(self) -> int:
        """Return the rows of the projection's matrix, which of `mamba2` also makes the state's gates."""
        return self.projected_width + self.is_mamba * self.gate_rows

    @property
    def gate_rows(self) -> int:
        """Return how many numbers of a token gate the state."""
        return {"delta_net": 2, "mamba2": 1, "short_conv": 0}[self.kind] * self.value_heads

    @property
    def norm_width(self) -> int:
        """Return how many weights the norm of its output has."""
        return {"delta_net": self.value_dim, "mamba2": self.value_width, "short_conv": 0}[self.kind]

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Return the elements of a token's queries, keys and values."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA, arXiv 2405.04434). A token leaves one row in each layer: a normed latent of
    `rank` numbers, and `rotated` numbers that RoPE rotates. Keys and values of all heads are made of this row.

    A head's key has `plain` numbers made of the latent, and the rotated numbers. Its value has `value` numbers made of
    the latent.

    query_rank: size of the latent that queries are made of; None: they are made of hidden states.
    logit_gain: factor of attention's logits, beside `query_dim**-0.5`.
    has_neighbour_pairs: as in `Architecture`, for the rotated numbers.
    is_split: the checkpoint has separate tensors that make keys and values of the latent. The one for keys has each
        head transposed.
    """

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int | None = None
    logit_gain: float = 1.0
    has_neighbour_pairs: bool = False
    is_split: bool = False

    @property
    def row(self) -> int:
        """Return the size of the row that a token leaves in a layer."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Return the size of a head's query, and of its key."""
        return self.plain + self.rotated

    @property
    def scale(self) -> float:
        """Return the factor of attention's logits."""
        return self.logit_gain * self.query_dim**-0.5

    def first_columns(self, num_heads: int) -> int:
        """Return how many columns of the first product make queries, or the latent that queries are made of."""
        return self.query_rank or num_heads * self.query_dim


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Position-dependent scaling of queries: by `1 + beta * ln(1 + floor(position / tokens))`, after the rotation."""

    beta: float
    tokens: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs: `width` numbers of each token that every layer gets beside the hidden state. They are made of a
    table of `vocab_size` tokens and a projection of the token's embedding.
    """

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a layer computes. The defaults are a Llama's: two RMSNorms, projections, rotary attention, a gated MLP.

    part: `whole`; `mixer`: attention or a recurrence alone, with its norm; `mlp`: the MLP or the experts alone. Where a
        checkpoint counts a mixer and its MLP as two layers, they are two layers here: some mixers have no MLP and some
        MLPs no mixer, and layer numbers and module names stay the checkpoint's. A layer without a mixer has neither
        keys and values nor a state; a layer without an MLP ends with the mixer's residual.
    qkv_bias: a bias of queries, keys and values.
    output_bias: a bias of attention's output.
    mlp_bias: biases of gate, up and down.
    qk_norm: an RMSNorm of each query head and key head, before the rotation.
    wide_qk_norm: instead, one RMSNorm over all query heads and one over all key heads.
    pre_norms: RMSNorms of the inputs of attention and MLP. Experts need them.
    post_norms: RMSNorms of the outputs of attention and MLP, before the residual is added.
    activation: of the gate, or of an MLP without one (`is_gated`).
    window_tokens: a token attends to so many tokens, the last of them itself; None: to all.
    rope: its own frequencies; None: the model's.
    experts: experts in place of the one MLP, or None.
    sinks: each query head has one more logit in its softmax, without a value.
    heads: its own KV heads, only of a layer with a window; None: the model's.
    intermediate: its MLP's columns; None: the model's.
    value_norm: an RMSNorm of each value head, without weights.
    keys_are_values: values are the projection of keys, before norms and rotation.
    kv_of: the layer whose keys and values this layer uses; None: it has its own.
    is_scaled: its output is multiplied by a factor.
    output_gate: attention's output is multiplied by the sigmoid of a gate. The projection has a head's gate behind the
        head's query, or all gates behind all queries if has_gate_apart.
    plain_qk_norm: the norms of heads have no weights.
    recurrent: a recurrence in place of attention; None: the layer attends.

    New arithmetic is a new field here or in `Architecture`; `docs/MODELS.md` says where it is applied.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    activation: Activation = "silu"
    window_tokens: int | None = None
    rope: RopeScaling | None = None
    experts: Experts | None = None
    sinks: bool = False
    heads: KvHeads | None = None
    intermediate: int | None = None
    value_norm: bool = False
    keys_are_values: bool = False
    kv_of: int | None = None
    is_scaled: bool = False
    output_gate: bool = False
    has_gate_apart: bool = False
    plain_qk_norm: bool = False
    recurrent: Recurrent | None = None
    part: LayerPart = "whole"

    @property
    def has_mixer(self) -> bool:
        return self.part != "mlp"

    @property
    def has_mlp(self) -> bool:
        """Return whether the layer has an MLP, or experts."""
        return self.part != "mixer"

    @property
    def attends(self) -> bool:
        """Return whether the layer has attention, and so keys and values."""
        return self.has_mixer and self.recurrent is None

    @property
    def is_gated(self) -> bool:
        """Return whether the layer's MLP, or each of its experts, has a gate."""
        return is_gated(self.activation)

    @property
    def seen_tokens(self) -> int | None:
        """Return how many of the last tokens attention reads; 0 without attention; None: all."""
        return self.window_tokens if self.attends else 0

    def first_rows(self, intermediate: int) -> int:
        """Return the rows of the first matrix of an MLP, or expert, with so many columns."""
        return first_rows(self.activation, intermediate)

    @property
    def num_kv_projections(self) -> int:
        """Return how many projections make keys and values: 2, 1 if keys are values, 0 if another layer has them."""
        return 0 if self.kv_of is not None else 1 if self.keys_are_values else 2


@dataclass(frozen=True, slots=True)
class Share:
    """One device's share of a split model: device `rank` of `devices` (`gpu.model.split`). whole: the model."""

    whole: "Architecture"
    rank: int
    devices: int

    def rows(self, num_rows: int) -> slice:
        """Return the range of rows, or columns, that this device has of `num_rows`."""
        own = num_rows // self.devices
        return slice(self.rank * own, (self.rank + 1) * own)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's shape.

    num_kv_heads, dim: of layers with full attention, and of layers with a window that have no `heads` of their own.
    family: name of the model family (`gpu.model.family`).
    layer_pattern: specs of the first layers, repeated over all layers.
    rotary_dim: how many leading elements of a head are rotated; None: all.
    has_neighbour_pairs: the checkpoint rotates pairs of neighbouring elements, instead of elements of two halves.
    norm_weight_offset: added to the checkpoint's norm weights.
    query_gain: factor of the query norms' weights, for a model that scales its logits by other than dim**-0.5.
    embedding_scale: factor of the input embedding, in the model's dtype.
    final_norm_offset: `norm_weight_offset` of the last norm; None: the same.
    post_norm_eps: epsilon of norms behind attention and MLP; None: rms_norm_eps.
    has_normed_embedding: embeddings are normed, without weights.
    logit_gain: factor of logits.
    logit_cap: logits are `cap * tanh(logits / cap)`; None: as they are.
    layer_inputs: per-layer inputs of tokens; None: layers get hidden states alone.
    query_growth: scaling of queries with their positions, or None.
    latent: all layers have latent attention. Then num_kv_heads is 1, and dim is the size of a latent row.
    experts_apart: the checkpoint has tensors for each expert, in a family whose others may stack all experts in one.
    quantisation: which matrices have few bits (`gpu.model.matrix_formats` has their sizes), or None.
    draft_heads: draft heads in the checkpoint, each a layer that guesses one more token.
    draft_layers: how many of the last of `num_layers` are such heads, used for drafting alone
        (`gpu.model.draft_head_shape`).
    share: the sizes of heads and MLPs are one device's share of a split model; None: they are the whole model's.
    """

    name: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dim: int
    vocab_size: int
    max_context_tokens: int
    rms_norm_eps: float
    tied_embeddings: bool
    rope: RopeScaling
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    family: str = "llama"
    layer_pattern: tuple[LayerSpec, ...] = (LayerSpec(),)
    rotary_dim: int | None = None
    has_neighbour_pairs: bool = False
    norm_weight_offset: float = 0.0
    query_gain: float = 1.0
    embedding_scale: float = 1.0
    final_norm_offset: float | None = None
    post_norm_eps: float | None = None
    has_normed_embedding: bool = False
    logit_cap: float | None = None
    logit_gain: float = 1.0
    layer_inputs: LayerInputs | None = None
    query_growth: QueryGrowth | None = None
    latent: Latent | None = None
    experts_apart: bool = False
    quantisation: Quantisation | None = None
    draft_heads: int = 0
    draft_layers: int = 0
    share: Share | None = None

    @property
    def devices(self) -> int:
        """Return how many devices the model is split over."""
        return 1 if self.share is None else self.share.devices

    @property
    def is_first(self) -> bool:
        """Return whether this device adds residuals and biases, which a sum over devices may have only once."""
        return self.share is None or self.share.rank == 0

    @property
    def logit_rows(self) -> int:
        """Return how many rows of the output matrix this device has: an equal share, or all if it does not divide."""
        return self.vocab_size if self.vocab_size % self.devices else self.vocab_size // self.devices

    @property
    def main_layers(self) -> int:
        """Return how many layers a token goes through, without draft heads."""
        return self.num_layers - self.draft_layers

    def layer_name(self, layer: int) -> str:
        """Return the prefix of a layer's tensor names in a checkpoint."""
        first = self.main_layers
        return f"model.layers.{layer}" if layer < first else f"mtp.layers.{layer - first}"

    @property
    def group(self) -> int:
        """Return how many query heads share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_of_head(self) -> int:
        """Return how many rows a token leaves for each KV head: 2, a key and a value, or 1, a latent row."""
        return 2 if self.latent is None else 1

    @property
    def has_wide_norms(self) -> bool:
        """Return whether norm weights are float32, because bfloat16 would round off their offset or gain."""
        return bool(self.norm_weight_offset) or self.query_gain != 1

    def heads_of(self, spec: LayerSpec) -> KvHeads:
        """Return a layer's KV heads."""
        return spec.heads or KvHeads(self.num_kv_heads, self.dim)

    @property
    def window_heads(self) -> KvHeads:
        """Return the KV heads of layers with a window, which are the same in all of them."""
        return next((self.heads_of(spec) for spec in self.layer_pattern if spec.window_tokens is not None),
                    KvHeads(self.num_kv_heads, self.dim))  # fmt: skip

    @property
    def has_own_window_heads(self) -> bool:
        """Return whether layers with a window have other KV heads than layers with full attention."""
        return self.window_heads != KvHeads(self.num_kv_heads, self.dim)

    def intermediate_of(self, spec: LayerSpec) -> int:
        """Return the columns of a layer's one MLP."""
        return spec.intermediate or self.intermediate

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Return the layers whose keys and values other layers use as well."""
        return tuple(sorted({spec.kv_of for spec in self.layers if spec.kv_of is not None}))

    @property
    def kept_width(self) -> int:
        """Return the elements of a token's keys and values in all `kept_layers`."""
        heads = [self.heads_of(self.layers[layer]) for layer in self.kept_layers]
        return sum(2 * one.count * one.dim for one in heads)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Return the spec of each layer."""
        return _repeated(self.layer_pattern, self.num_layers)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Return the layers that attend to a window only."""
        return tuple(layer for layer, spec in enumerate(self.layers) if spec.window_tokens is not None)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the layers that have a state in place of keys and values."""
        return tuple(layer for layer, spec in enumerate(self.layers) if spec.recurrent is not None)

    @property
    def layers_without_kv(self) -> tuple[int, ...]:
        """Return the layers without keys and values: recurrent layers, and layers that are an MLP alone."""
        return tuple(layer for layer, spec in enumerate(self.layers) if not spec.attends)

    @property
    def layers_apart(self) -> tuple[int, ...]:
        """Return the layers that attention methods and host memory leave alone: those with a window, those without keys
        and values, and draft heads.
        """
        apart = (layer for layer, spec in enumerate(self.layers) if spec.seen_tokens is not None)
        return (*apart, *range(self.main_layers, self.num_layers))

    @property
    def recurrent(self) -> Recurrent | None:
        """Return the spec of the recurrent layers, which is the same in all of them; None: there are none."""
        return next((spec.recurrent for spec in self.layer_pattern if spec.recurrent is not None), None)

    @property
    def ropes(self) -> tuple[tuple[RopeScaling, int], ...]:
        """Return the distinct pairs (frequencies, rotated elements of a head), in the order of layers."""
        ropes: list[tuple[RopeScaling, int]] = []
        for spec in self.layer_pattern:
            if self.rope_of(spec) not in ropes:
                ropes.append(self.rope_of(spec))
        return tuple(ropes)

    def rope_of(self, spec: LayerSpec) -> tuple[RopeScaling, int]:
        """Return a layer's frequencies and the size of its heads; of latent attention, the size of the rotated part."""
        return spec.rope or self.rope, self.heads_of(spec).dim if self.latent is None else self.latent.rotated

    @property
    def num_layer_weights(self) -> int:
        """Return how many weights of a layer a token is multiplied with, averaged over layers."""
        return round(self._sum_layers(lambda experts: experts.per_token) / self.num_layers)

    @property
    def num_embedding_weights(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def num_weights(self) -> int:
        """Return the number of all weights, including experts that a token is not routed to."""
        embeddings = self.num_embedding_weights + (0 if self.tied_embeddings else self.logit_rows * self.hidden)
        inputs = self.layer_inputs
        table = 0 if inputs is None else inputs.vocab_size * self.num_layers * inputs.width
        return round(self._sum_layers(lambda experts: experts.num_experts)) + embeddings + table + self._num_shared

    def num_weights_read(self, num_tokens: int) -> int:
        """Return how many weights a step of `num_tokens` reads: all layers, the expected number of experts, the final
        norm and the output projection. The input embedding is left out: a step reads one row of it for each token.
        """
        layers = self._sum_layers(lambda experts: experts.taken(num_tokens))
        return round(layers) + self.logit_rows * self.hidden + self._num_shared

    @property
    def _num_shared(self) -> int:
        """Return how many weights outside of layers every token is multiplied with: the final norm, those that make
        layer inputs, and those that join a draft head's two inputs, with their norms.
        """
        inputs, heads = self.layer_inputs, self.draft_layers
        return (
            self.hidden
            + heads * (2 * self.hidden + 3) * self.hidden
            + (0 if inputs is None else inputs.width * (self.num_layers * self.hidden + 1))
        )

    def _sum_layers(self, count: Callable[[Experts], float]) -> float:
        """Return the number of weights in all layers, with `count(experts)` experts of each layer."""
        weights = [self._weights_of(spec, count) for spec in self.layer_pattern]
        return sum(weights[layer % len(weights)] for layer in range(self.num_layers))

    def _weights_of(self, spec: LayerSpec, count: Callable[[Experts], float]) -> float:
        heads, own_mlp = self.heads_of(spec), self.intermediate_of(spec)
        query, beside = heads.dim * self.num_heads, 0
        qkv = (1 + spec.output_gate) * query + spec.num_kv_projections * heads.count * heads.dim
        matrices = 2 + spec.is_gated
        mlp = float(matrices * self.hidden * own_mlp)
        own = spec.recurrent
        if own is not None:
            qkv, query = own.matrix_rows, own.value_width
            beside = own.conv_width * (own.conv_tokens + own.is_mamba) + own.norm_width
            beside += 3 * own.gate_rows if own.is_mamba else own.gate_rows * (self.hidden + 1)
        attention: float = self.hidden * (qkv + query)
        norms = spec.qk_norm * (1 + (spec.kv_of is None)) * heads.dim
        norms += spec.wide_qk_norm * (query + heads.count * heads.dim)
        norms += (spec.has_mixer + spec.has_mlp) * (spec.pre_norms + spec.post_norms) * self.hidden
        if spec.experts is not None:
            router = (self.hidden + spec.experts.has_biases) * spec.experts.num_experts
            biases_of_one = spec.experts.has_biases * (spec.first_rows(spec.experts.intermediate) + self.hidden)
            one = matrices * self.hidden * spec.experts.intermediate + biases_of_one
            mixture = router + one * count(spec.experts)
            mlp = mixture + spec.experts.has_mlp * mlp + spec.experts.is_sigmoid * spec.experts.num_experts
            mlp += (spec.experts.is_shared and not spec.experts.is_whole) * self.hidden
            norms += spec.experts.beside_mlp * (4 * self.hidden + spec.experts.num_experts)
        if self.latent is not None:
            attention = self._latent_weights(self.latent)
        if self.layer_inputs is not None:
            mlp += (2 * self.layer_inputs.width + 1) * self.hidden
        biases = spec.qkv_bias * qkv + (spec.output_bias + spec.mlp_bias) * self.hidden
        biases += spec.mlp_bias * spec.first_rows(own_mlp)
        vectors = norms + spec.sinks * self.num_heads + biases + spec.is_scaled + beside
        return spec.has_mixer * attention + spec.has_mlp * mlp + vectors

    def _latent_weights(self, latent: Latent) -> int:
        """Return the number of weights of a layer's latent attention, with its two norms."""
        heads, rank = self.num_heads, latent.query_rank
        into = self.hidden * (latent.first_columns(heads) + latent.row) + (rank or 0) * (heads * latent.query_dim + 1)
        return into + latent.rank * (heads * (latent.plain + latent.value) + 1) + heads * latent.value * self.hidden

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        heads = [self.heads_of(spec) for spec in self.layers if spec.attends]
        return sum(self.rows_of_head * one.count * one.dim * dtype_bytes for one in heads)

    def num_pair_products(self, begin: int, end: int) -> int:
        """Return the work of attention for tokens `[begin, end)`: pairs of a token and one that it attends to, times
        the elements of a head, summed over layers. For latent attention, heads are those of prefill.
        """
        latent = self.latent
        dim = None if latent is None else (latent.query_dim + latent.value) // 2
        return sum(
            (dim or self.heads_of(spec).dim) * (_pairs(end, spec.seen_tokens) - _pairs(begin, spec.seen_tokens))
            for spec in self.layers
        )


@lru_cache(maxsize=512)
def _repeated(pattern: tuple[LayerSpec, ...], num_layers: int) -> tuple[LayerSpec, ...]:
    """Repeat a pattern over all layers. Cached, because planning asks for it some hundred thousand times."""
    return tuple(pattern[layer % len(pattern)] for layer in range(num_layers))


def _pairs(num_tokens: int, window: int | None) -> int:
    full = num_tokens if window is None else min(num_tokens, window)
    return full * (full + 1) // 2 + (num_tokens - full) * (0 if window is None else window)
