"""A decoder's shape: its sizes, what each layer computes, and the byte and FLOP counts that follow from them."""

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
    """Return whether an MLP of this activation has gates: `relu2`, which is relu(up)**2, has none."""
    return activation != "relu2"


def first_rows(activation: Activation, intermediate: int) -> int:
    """Return how many rows make an MLP of so many columns: as many, and of gates, which come first, as many again."""
    return (1 + is_gated(activation)) * intermediate


class ModelError(Exception):
    """A model folder or shape that cannot be served; the message names file, key, value and what was wanted."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE frequencies: `kind` is one of ROPE_TYPES, or NO_ROTATION's; `settings` the remaining keys of the config as
    they are.
    """

    kind: str
    theta: float
    settings: dict[str, Any] = field(hash=False)


NO_ROTATION = RopeScaling("none", 1.0, {})  # of layers whose queries and keys stay as they are


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's MLPs, gated as its activation says, of which a token takes the few with the largest router logits.

    intermediate: columns of one expert.
    is_normalised: the weights of the experts that a token takes are scaled to sum to 1; they come from a softmax over
        all experts.
    has_biases: the router has a bias, and so have gate, up and down of each expert.
    beside_mlp: the layer has its one MLP as well; both have norms of their own, before and behind, and so has the
        router, and the output of each expert has a factor.
    is_shared: it has one of the same normed rows, whose output has the sigmoid of a token's own logit as a factor, or 1
        where it is_whole.
    is_sigmoid: experts are taken by the sigmoids of their logits, each plus a correction of its own, among
        `groups_taken` of `groups`, those with the largest sum of their best two; weights are the sigmoids alone.
    gain: of all weights. Where a softmax chooses among groups, these are taken by the sum of their `group_best` largest
        shares.
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
        """Return whether a choice is made before logits are of a softmax."""
        return self.is_sigmoid or self.groups > 1

    @property
    def keeps_weights(self) -> bool:
        """Return whether a choice made before has the weights themselves, which are scaled to no sum."""
        return self.is_folded and not self.is_normalised

    @property
    def has_mlp(self) -> bool:
        """Return whether the layer has its one MLP as well."""
        return self.beside_mlp or self.is_shared

    def taken(self, num_tokens: int) -> float:
        """Return how many experts a step of so many tokens reads, in expectation, if tokens draw at random."""
        return self.num_experts * (1 - (1 - self.per_token / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class KvHeads:
    """How many KV heads a layer has, and the elements of each head."""

    count: int
    dim: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with a state in place of attention (`gpu.operations.recurrent`).

    Of the past it has no keys and values but a state, `[value_heads, key_dim, value_dim]`, and the last inputs of its
    convolution, `[conv_tokens - 1, conv_width]`. Neighbouring value heads share a key head.

    kind: `delta_net`, a gated delta net. `mamba2`, a state space model (`mamba2`): what its papers call C, B and x are
        queries, keys and values here, key heads are its groups, and the checkpoint's one matrix has the steps of time
        too. `short_conv`, a short convolution with gates alone, whose state is empty: it has no key elements, and its
        one value head is as wide as hidden states.
    is_grouped: the checkpoint has one matrix of queries, keys, values and gates, has_grouped_gates: and one of both
        gates of the state, key head by key head.
    is_tiled: value heads that share a key head are `key_heads` apart, and no neighbours.
    norm_eps: of the norm of its output; None: the model's.
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
        """Return the columns of a token's projection, without gates of the state."""
        return 3 * self.value_width if self.is_short else self.conv_width + self.value_width

    @property
    def matrix_rows(self) -> int:
        """Return the rows of the matrix that makes a token's projection, where it has them with its gates."""
        return self.projected_width + self.is_mamba * self.gate_rows

    @property
    def gate_rows(self) -> int:
        """Return how many gates of the state a token has."""
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
    """Multi-head latent attention (MLA, arXiv 2405.04434): a token leaves one row in a layer, a normed latent of `rank`
    numbers and `rotated` ones that are rotated, of which keys and values of all heads are made.

    A head's key has `plain` numbers of the latent and those that are rotated, its value `value` numbers of the latent.

    query_rank: of the latent that queries are made of, None: they are made of hidden states.
    logit_gain: of logits of attention, beside `query_dim**-0.5`.
    has_neighbour_pairs: as in `Architecture`, of what is rotated.
    is_split: the checkpoint has what makes keys, each head's rows as columns, and what makes values apart.
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
        """Return the numbers that a token leaves in a layer."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Return the numbers of a head's query, as of its key."""
        return self.plain + self.rotated

    @property
    def scale(self) -> float:
        """Return the factor of logits of attention."""
        return self.logit_gain * self.query_dim**-0.5

    def first_columns(self, num_heads: int) -> int:
        """Return how many numbers of a hidden state's product are of queries, or of what they are made of."""
        return self.query_rank or num_heads * self.query_dim


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by `1 + beta * ln(1 + floor(position / tokens))`, behind their rotation."""

    beta: float
    tokens: int


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What each layer gets of a token beside its hidden state: `width` numbers, of a table of `vocab_size` tokens and
    of a projection of its embedding.
    """

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What a layer computes beyond a Llama's: two RMSNorms, projections, rotary attention and a gated MLP.

    part: `whole`, or `mixer`: attention alone, or what is recurrent, with its norm; or `mlp`: the MLP or experts alone.
        A mixer and the MLP behind it are two layers where the checkpoint says so, and not joined: some mixers have no
        MLP behind them and some MLPs have none before them, and numbers of layers and names of modules stay the
        checkpoint's. A layer without a mixer has neither keys and values nor a state; one without an MLP ends with its
        residual.
    qkv_bias: added to queries, keys and values.
    output_bias: added to attention's output.
    mlp_bias: added to gate, up and down.
    qk_norm: RMSNorm of each query and key head before the rotation.
    wide_qk_norm: in place of it one of all query heads together, and one of all key heads.
    pre_norms: RMSNorms of what attention and the MLP get; without them there are no experts.
    post_norms: RMSNorms of their outputs, before these are added.
    activation: of the gate, or of an MLP without one (`is_gated`).
    window_tokens: a token attends to itself and to those before it, so many together; None: to all.
    rope: its own frequencies; None: the model's.
    experts: in place of the one MLP; None: there are none.
    sinks: each query head has one logit more in its softmax, without a value.
    heads: its own KV heads, only of a layer with a window; None: the model's.
    intermediate: its own; None: the model's.
    value_norm: RMSNorm of each value head, without weights.
    keys_are_values: values are the keys' projection, before norms and rotation.
    kv_of: the layer whose keys and values are this one's, too.
    is_scaled: its output has a factor.
    output_gate: attention's output is multiplied by the sigmoid of a gate, which the projection has behind each query
        head, or, where it has_gate_apart, behind all of them.
    plain_qk_norm: the norms of heads have no weights of their own.
    recurrent: in place of attention; None: it attends.

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
        """Return whether it has an MLP, or experts."""
        return self.part != "mixer"

    @property
    def attends(self) -> bool:
        """Return whether it has attention, and so keys and values."""
        return self.has_mixer and self.recurrent is None

    @property
    def is_gated(self) -> bool:
        """Return whether its MLP, or each expert, has gates."""
        return is_gated(self.activation)

    @property
    def seen_tokens(self) -> int | None:
        """Return the last tokens that attention reads, 0 in a layer without it; None: all."""
        return self.window_tokens if self.attends else 0

    def first_rows(self, intermediate: int) -> int:
        """Return `first_rows` of an MLP, or expert, of so many columns."""
        return first_rows(self.activation, intermediate)

    @property
    def num_kv_projections(self) -> int:
        """Return how many of keys and values have a projection of their own."""
        return 0 if self.kv_of is not None else 1 if self.keys_are_values else 2


@dataclass(frozen=True, slots=True)
class Share:
    """Whose share of a model an architecture is: of the `rank`-th of so many `devices` (`gpu.model.split`)."""

    whole: "Architecture"
    rank: int
    devices: int

    def rows(self, num_rows: int) -> slice:
        """Return which of so many rows, or columns, this device has."""
        own = num_rows // self.devices
        return slice(self.rank * own, (self.rank + 1) * own)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder's shape.

    num_kv_heads, dim: of layers that see everything, and of those with a window that do not say otherwise.
    family: names the adapter.
    layer_pattern: of the first layers, repeated over all.
    rotary_dim: of a head's leading elements that are rotated; None: all.
    has_neighbour_pairs: elements that are rotated together are neighbours in the checkpoint, not halves.
    norm_weight_offset: added to the checkpoint's norm weights.
    query_gain: factor of the query norms' weights, for a model that scales its logits by other than dim**-0.5.
    embedding_scale: factor of the input embedding, in the model's dtype.
    final_norm_offset: of the last norm; None: as others.
    post_norm_eps: of norms behind attention and MLP; None: as others.
    has_normed_embedding: embeddings are normed, without weights.
    logit_gain: of logits.
    logit_cap: logits are `cap * tanh(logits / cap)`; None: as they are.
    layer_inputs: of each layer; None: it has hidden states alone.
    query_growth: of queries with their positions; None: there is none.
    latent: all layers have latent attention; num_kv_heads is 1 then, and dim a row's numbers.
    experts_apart: the checkpoint has tensors of each expert, also in a family that may have one of all.
    quantisation: which matrices have few bits; None: none (`gpu.model.matrix_formats` says what that weighs).
    draft_heads: that the checkpoint has, each a layer that guesses a further token.
    draft_layers: how many of the last of `num_layers` are such heads, which take part in drafting alone
        (`gpu.model.draft_head_shape`).
    share: the sizes of heads and MLPs are one device's share of a model's; None: they are the model's.
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
        """Return over how many devices the model is split."""
        return 1 if self.share is None else self.share.devices

    @property
    def is_first(self) -> bool:
        """Return whether this device adds what is added once to a sum over devices: residuals and biases."""
        return self.share is None or self.share.rank == 0

    @property
    def logit_rows(self) -> int:
        """Return the rows of the output matrix that this device has: its share, if all devices can have as many."""
        return self.vocab_size if self.vocab_size % self.devices else self.vocab_size // self.devices

    @property
    def main_layers(self) -> int:
        """Return how many layers a token goes through, without heads that draft."""
        return self.num_layers - self.draft_layers

    def layer_name(self, layer: int) -> str:
        """Return what a checkpoint's names of a layer's tensors begin with."""
        first = self.main_layers
        return f"model.layers.{layer}" if layer < first else f"mtp.layers.{layer - first}"

    @property
    def group(self) -> int:
        """Return how many query heads share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows_of_head(self) -> int:
        """Return how many rows a token leaves for each KV head: a key and a value, or one that is both."""
        return 2 if self.latent is None else 1

    @property
    def has_wide_norms(self) -> bool:
        """Return whether norms' weights are float32, since what is done to them would be rounded away."""
        return bool(self.norm_weight_offset) or self.query_gain != 1

    def heads_of(self, spec: LayerSpec) -> KvHeads:
        """Return a layer's KV heads."""
        return spec.heads or KvHeads(self.num_kv_heads, self.dim)

    @property
    def window_heads(self) -> KvHeads:
        """Return the KV heads of layers with a window, which are alike."""
        return next((self.heads_of(spec) for spec in self.layer_pattern if spec.window_tokens is not None),
                    KvHeads(self.num_kv_heads, self.dim))  # fmt: skip

    @property
    def has_own_window_heads(self) -> bool:
        """Return whether layers with a window have other KV heads than those that see everything."""
        return self.window_heads != KvHeads(self.num_kv_heads, self.dim)

    def intermediate_of(self, spec: LayerSpec) -> int:
        """Return the columns of a layer's one MLP."""
        return spec.intermediate or self.intermediate

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Return the layers whose keys and values others have, too."""
        return tuple(sorted({spec.kv_of for spec in self.layers if spec.kv_of is not None}))

    @property
    def kept_width(self) -> int:
        """Return the elements of a token's keys and values of all those layers."""
        heads = [self.heads_of(self.layers[layer]) for layer in self.kept_layers]
        return sum(2 * one.count * one.dim for one in heads)

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Return one spec a layer."""
        return _repeated(self.layer_pattern, self.num_layers)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Return the layers that never look further back than their window."""
        return tuple(layer for layer, spec in enumerate(self.layers) if spec.window_tokens is not None)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the layers that have a state and no keys and values."""
        return tuple(layer for layer, spec in enumerate(self.layers) if spec.recurrent is not None)

    @property
    def layers_without_kv(self) -> tuple[int, ...]:
        """Return the layers that have no keys and values: recurrent ones, and those that are an MLP alone."""
        return tuple(layer for layer, spec in enumerate(self.layers) if not spec.attends)

    @property
    def layers_apart(self) -> tuple[int, ...]:
        """Return the layers that attention methods and host memory have no part in: with a window, without keys and
        values, or heads that draft.
        """
        apart = (layer for layer, spec in enumerate(self.layers) if spec.seen_tokens is not None)
        return (*apart, *range(self.main_layers, self.num_layers))

    @property
    def recurrent(self) -> Recurrent | None:
        """Return what those layers are, which are alike; None: there are none."""
        return next((spec.recurrent for spec in self.layer_pattern if spec.recurrent is not None), None)

    @property
    def ropes(self) -> tuple[tuple[RopeScaling, int], ...]:
        """Return each kind of frequencies once, with the heads' elements, those of the first layer first."""
        ropes: list[tuple[RopeScaling, int]] = []
        for spec in self.layer_pattern:
            if self.rope_of(spec) not in ropes:
                ropes.append(self.rope_of(spec))
        return tuple(ropes)

    def rope_of(self, spec: LayerSpec) -> tuple[RopeScaling, int]:
        """Return a layer's frequencies, and the elements of its heads, of latent attention those that are rotated."""
        return spec.rope or self.rope, self.heads_of(spec).dim if self.latent is None else self.latent.rotated

    @property
    def num_layer_weights(self) -> int:
        """Return how many weights of a layer a token is multiplied with; of the mean one, where they differ."""
        return round(self._sum_layers(lambda experts: experts.per_token) / self.num_layers)

    @property
    def num_embedding_weights(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def num_weights(self) -> int:
        """Return all weights, whether a token takes them or not."""
        embeddings = self.num_embedding_weights + (0 if self.tied_embeddings else self.logit_rows * self.hidden)
        inputs = self.layer_inputs
        table = 0 if inputs is None else inputs.vocab_size * self.num_layers * inputs.width
        return round(self._sum_layers(lambda experts: experts.num_experts)) + embeddings + table + self._num_shared

    def num_weights_read(self, num_tokens: int) -> int:
        """Return the weights that a step of so many tokens reads: all layers, of experts those that are taken in
        expectation, the final norm and the output projection; of the input embedding it reads one row a token.
        """
        layers = self._sum_layers(lambda experts: experts.taken(num_tokens))
        return round(layers) + self.logit_rows * self.hidden + self._num_shared

    @property
    def _num_shared(self) -> int:
        """Return the weights of no layer that every token is multiplied with: the final norm, what makes inputs, and
        what joins a head's two, with its norms.
        """
        inputs, heads = self.layer_inputs, self.draft_layers
        return (
            self.hidden
            + heads * (2 * self.hidden + 3) * self.hidden
            + (0 if inputs is None else inputs.width * (self.num_layers * self.hidden + 1))
        )

    def _sum_layers(self, count: Callable[[Experts], float]) -> float:
        """Return the weights of all layers, with `count` of each layer's experts."""
        return sum(self._weights_of(spec, count) for spec in self.layers)

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
        """Return the weights of a layer's latent attention, with its two norms."""
        heads, rank = self.num_heads, latent.query_rank
        into = self.hidden * (latent.first_columns(heads) + latent.row) + (rank or 0) * (heads * latent.query_dim + 1)
        return into + latent.rank * (heads * (latent.plain + latent.value) + 1) + heads * latent.value * self.hidden

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of keys and values of one token in all layers."""
        heads = [self.heads_of(spec) for spec in self.layers if spec.attends]
        return sum(self.rows_of_head * one.count * one.dim * dtype_bytes for one in heads)

    def num_pair_products(self, begin: int, end: int) -> int:
        """Return the pairs of one of tokens `[begin, end)` and one that it sees, summed over layers, each times the
        elements of the layer's heads; of latent attention, of a prompt's.
        """
        latent = self.latent
        dim = None if latent is None else (latent.query_dim + latent.value) // 2
        return sum(
            (dim or self.heads_of(spec).dim) * (_pairs(end, spec.seen_tokens) - _pairs(begin, spec.seen_tokens))
            for spec in self.layers
        )


@lru_cache(maxsize=512)
def _repeated(pattern: tuple[LayerSpec, ...], num_layers: int) -> tuple[LayerSpec, ...]:
    """Repeat a pattern over all layers. It is cached since a plan needs it some hundred thousand times."""
    return tuple(pattern[layer % len(pattern)] for layer in range(num_layers))


def _pairs(num_tokens: int, window: int | None) -> int:
    full = num_tokens if window is None else min(num_tokens, window)
    return full * (full + 1) // 2 + (num_tokens - full) * (0 if window is None else window)
