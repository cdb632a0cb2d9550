"""Compute the matrix products of a layer, with the norms, activation and residuals around them.

Norms of hidden states are applied here, by `ExpertMlp`, and by the CPU's compiled step; norms of heads by
`rope_kv_write`. Bytes moved: the weights once per call. On the CPU a library repacks the weights in every call. Prefill
does not notice that, and small decode batches use `gpu.cpu_step.cpu_step` instead.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.exchange.device_experts import ExpertExchange
from gpu.layers.adapters import Adapters
from gpu.layers.expert_mlp import ExpertMlp
from gpu.layers.staged_experts import StagedExperts
from gpu.layers.widened import Widened
from gpu.model.matrix_formats import OF_EXPERTS, widened_bytes
from gpu.model.spec import Activation, Architecture
from gpu.operations.experts.shared_expert import add_shared
from gpu.operations.head_norm import HeadNorms
from gpu.operations.kv.latent_write import LATENT_EPS
from gpu.operations.linear.adapter_product import (
    AdapterRows,
    Lowered,
    StackedAdapters,
    add_raised,
    lower,
    lower_normed,
    swiglu_raised,
)
from gpu.operations.linear.packed_matrix import Stored
from gpu.operations.linear.tile_choice import Product, TileChoice, Use
from gpu.operations.rms_norm import rms_norm, rms_norm_add
from gpu.operations.swiglu import swiglu
from gpu.ranks import Ranks
from gpu.weights.host_experts import tensors_of
from gpu.weights.matrix import Matrix, PackedMatrix, PlainMatrix, RoundingMatrix, as_matrix
from gpu.weights.weights import Weights


class Projections:
    """The matrix products of all layers. Takes hidden states `[tokens, hidden]` and returns new tensors.

    Each method is one kernel launch, but `mlp` (two; with experts see `expert_mlp`) and `logits` (two). Each norm after
    a product, and each bias but that of `qkv`, takes one more. ranks: of a model that is split over devices; they add
    up the outputs of `output` and `mlp`, and gather logits. None: the model is not split.
    """

    def __init__(self, weights: Weights, architecture: Architecture, adapters: Adapters | None = None,
                 ranks: Ranks | None = None) -> None:  # fmt: skip
        self.weights = weights
        self._ranks = ranks
        self._is_first = architecture.is_first
        self._has_all_logits = architecture.logit_rows == architecture.vocab_size
        self._adapter_products = {} if adapters is None else adapters.products
        self.eps = architecture.rms_norm_eps
        post = architecture.post_norm_eps
        self._post_eps = self.eps if post is None else post  # of norms behind attention and MLP
        self._specs = architecture.layers
        self._num_query_columns = [architecture.num_heads * architecture.heads_of(spec).dim for spec in self._specs]
        latent = architecture.latent
        self._num_first_columns = 0 if latent is None else latent.first_columns(architecture.num_heads)
        self._cap, self._gain = architecture.logit_cap, architecture.logit_gain
        size = widened_bytes(architecture, weights.embedding.dtype.itemsize)
        widened = self.widened = Widened(size, weights.embedding.device)
        self._tile_choice = choice = TileChoice()
        self._matrices = [
            {
                name: as_matrix(stored, widened, choice)
                for name, stored in layer.matrices.items()
                if name not in OF_EXPERTS
            }
            for layer in weights.layers
        ]
        for layer in self._matrices:
            packed = [one.packed for one in layer.values() if isinstance(one, PackedMatrix)]
            widened.lay_out([one for one in packed if not one.rounds_tokens])
        self.staged = _stage_experts(weights, architecture)
        self._experts = [
            None if layer.experts is None or spec.experts is None
            else ExpertMlp(layer.experts, spec.experts, spec.activation, index, self.staged, self._is_first)
            for index, (layer, spec) in enumerate(zip(weights.layers, architecture.layers, strict=True))
        ]  # fmt: skip
        self._logits = as_matrix(weights.logits, choice=choice)

    def warm_up(self, most_tokens: int) -> None:
        """Compile the kernels whose choice depends on the number of tokens, up to so many: the products of each kind of
        experts.
        """
        kinds = {}
        for experts, layer in zip(self._experts, self.weights.layers, strict=True):
            if experts is not None:
                formats = _format_of(experts.weights.gate_up), _format_of(experts.weights.down)
                beside = experts.weights.beside
                norm = layer.mlp_norm if beside is None else beside.norm
                assert norm is not None, "a layer with experts has a norm before them"
                kinds.setdefault(formats, (experts, norm))
        for experts, norm in kinds.values():
            experts.warm_up(most_tokens, norm)

    def num_attended(self, layer: int) -> int:
        """Return the width of what the layer's output projection takes."""
        return self._matrices[layer]["output"].shape[1]

    def choose_tiles(self, sizes: Sequence[int], seconds: Callable[[Callable[[], object]], float]) -> None:
        """Time how decode steps of so many rows are best multiplied by plain matrices and by those that round tokens to
        FP8, and keep the fastest way.

        On CUDA.

        seconds: runs work on the device and returns its time.
        """
        properties = torch.cuda.get_device_properties(self.weights.embedding.device)
        self._tile_choice.choose(self._products(), sizes, seconds, properties.shared_memory_per_block_optin)

    def _products(self) -> list[Product]:
        """Return the products of decode steps with matrices in bf16, and with those that round tokens to FP8, grouped
        by shape and use.
        """
        found: dict[tuple[Use, bool, tuple[int, int]], Product] = {}

        def add(
            use: Use, matrix: Matrix, x_dtype: torch.dtype = torch.bfloat16, activation: Activation = "silu"
        ) -> None:
            if isinstance(matrix, PlainMatrix | RoundingMatrix) and matrix.dtype == torch.bfloat16:
                weight: Stored = matrix.weight if isinstance(matrix, PlainMatrix) else matrix.packed
                key = use, isinstance(matrix, PlainMatrix), matrix.shape
                before = found[key].weights if key in found else ()
                found[key] = Product(use, (*before, weight), x_dtype, activation)

        for matrices, layer, spec in zip(self._matrices, self.weights.layers, self._specs, strict=True):
            for name, matrix in matrices.items():
                if name == "output":
                    add("add", matrix, torch.float32)
                elif name == "gate_up" and layer.gate_up_bias is None:
                    add("gate_up", matrix, activation=spec.activation)
                else:
                    add("add" if name == "down" else "linear", matrix)
        add("logits", self._logits)
        return [*found.values()]

    def qkv(
        self, layer: int, hidden: Tensor, kept: Tensor | None = None, adapters: AdapterRows | None = None
    ) -> Tensor:  # fmt: skip
        """Return norm and QKV, `[tokens, (heads + 2 * kv_heads) * dim]`, before norms of heads.

        Where a layer's output is gated, a gate follows each query head. kept: keys and values of the layer whose KV
        this layer shares. adapters: of the tokens; None: they have none, here as in the other products.
        """
        weights, spec = self.weights.layers[layer], self._specs[layer]
        made = self._norm_linear(
            layer, "qkv", hidden, weights.attention_norm, weights.qkv_bias, adapters
        )  # fmt: skip
        if spec.wide_qk_norm:
            self._norm_widely(layer, made)
        if spec.num_kv_projections == 2:
            return made
        if spec.kv_of is None:
            return torch.cat([made, made[:, self._num_query_columns[layer] :]], 1)
        assert kept is not None, "a layer that shares an earlier layer's keys is given them"
        return torch.cat([made, kept], 1)

    def mixed(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return a recurrent layer's projections after the norm: `[tokens, projected_width]`, and gates `[tokens,
        gate_rows]`.
        """
        weights, own = self.weights.layers[layer], self._specs[layer].recurrent
        assert weights.recurrent is not None, "the layer is recurrent"
        assert own is not None, "the layer is recurrent"
        normed = rms_norm(hidden, weights.attention_norm, self.eps)
        made = self._matrices[layer]["qkv"].linear(normed)
        if not len(weights.recurrent.gates):
            width = own.projected_width
            return made[:, :width], made[:, width:]
        return made, as_matrix(weights.recurrent.gates).linear(normed)

    def latent_queries(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return latent rows `[tokens, rank + rotated]` and queries `[tokens, heads * query_dim]` of a layer.

        Both are before rotation; the queries are contiguous.
        """
        weights, matrices = self.weights.layers[layer], self._matrices[layer]
        made = matrices["qkv"].norm_linear(hidden, weights.attention_norm, self.eps, None)
        first, row = made[:, : self._num_first_columns], made[:, self._num_first_columns :]
        if weights.latent is None or weights.latent.query_norm is None:
            return row, first.contiguous()
        return row, matrices["query_up"].norm_linear(first, weights.latent.query_norm, LATENT_EPS, None)

    def head_norms(self, layer: int) -> HeadNorms | None:
        """Return the norms of query, key and value heads, which `rope_kv_write` applies; None: the layer has none."""
        weights = self.weights.layers[layer]
        if weights.query_norm is None or weights.key_norm is None or self._specs[layer].wide_qk_norm:
            return None
        return HeadNorms(weights.query_norm, weights.key_norm, self.eps, self._specs[layer].value_norm)

    def output(
        self, layer: int, attended: Tensor, hidden: Tensor, adapters: AdapterRows | None = None,
        overwrites: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the output projection added to `hidden`. attended: `[tokens, heads * dim]` of any floating dtype.
        overwrites: the sum may be written over `hidden`.
        """
        return self._add(attended, layer, "output", hidden, adapters, overwrites)

    def mlp(self, layer: int, hidden: Tensor, slots: Tensor | None = None,
            exchange: ExpertExchange | None = None, adapters: AdapterRows | None = None,
            overwrites: bool = False) -> Tensor:  # fmt: skip
        """Return norm and MLP added to `hidden`.

        slots: int32 `[tokens]`, -1 in rows that are not in use; None: all are in use. exchange: see `ExpertMlp`.
        overwrites: the sum may be written over `hidden`.
        """
        weights, experts = self.weights.layers[layer], self._experts[layer]
        beside = experts and experts.weights.beside
        if experts is not None and beside is None:
            assert weights.mlp_norm is not None, "a layer with experts has a norm before them"
            mixed, normed = experts.with_norm(hidden, weights.mlp_norm, self.eps, slots, exchange, overwrites)
            if not experts.experts.is_shared:
                return self._add_up(mixed)
            gate_up, down = self._matrices[layer]["gate_up"], self._matrices[layer]["down"]
            product, share = gate_up.gate_up(normed, self._specs[layer].activation), experts.weights.shared_share
            if share is not None:
                return self._add_up(add_shared(mixed, down.linear(product), normed, share))
            return self._add_up(down.linear(product, mixed, overwrites=True))
        gate_up, down = self._matrices[layer]["gate_up"], self._matrices[layer]["down"]
        activation, bias = self._specs[layer].activation, weights.gate_up_bias
        lowered = None
        if adapters is not None and (added := self._adapter_products.get((layer, "gate_up"))) is not None:
            x, of_gates = self._lower(added, hidden, weights.mlp_norm, adapters)
            made = gate_up.linear(x)
            made = made if bias is None else made.add_(bias)
            product, lowered = swiglu_raised(made, of_gates, activation, self._adapter_products.get((layer, "down")))
        elif bias is None and weights.mlp_norm is not None:
            has_more = weights.down_bias is not None or weights.mlp_post_norm is not None or self._ranks is not None
            is_alone = experts is None and adapters is None and not has_more
            if is_alone and isinstance(gate_up, RoundingMatrix) and isinstance(down, RoundingMatrix):
                return gate_up.norm_mlp(down, hidden, weights.mlp_norm, self.eps, activation, hidden)
            product = gate_up.norm_gate_up(hidden, weights.mlp_norm, self.eps, activation)
        else:
            product = swiglu(self._norm_linear(layer, "gate_up", hidden, weights.mlp_norm, bias, None), activation)
        if experts is None or beside is None:
            return self._add(product, layer, "down", hidden, adapters, overwrites, lowered)
        assert weights.mlp_post_norm is not None, "the sum of MLP and experts has a post-norm"
        own = rms_norm(down.linear(product), beside.mlp_post_norm, self.eps)
        mixed = experts(hidden, beside.norm, self.eps, slots, exchange)
        return rms_norm_add(
            rms_norm_add(mixed, beside.post_norm, self.eps, own), weights.mlp_post_norm, self._post_eps, hidden
        )

    def _norm_linear(self, layer: int, name: str, hidden: Tensor, norm: Tensor | None, bias: Tensor | None,
                     adapters: AdapterRows | None) -> Tensor:  # fmt: skip
        """Apply the norm, if there is one, the product, the bias and the adapters."""
        matrix, added = self._matrices[layer][name], self._adapter_products.get((layer, name))
        if added is not None and adapters is not None:
            x, lowered = self._lower(added, hidden, norm, adapters)
            return add_raised(matrix.linear(x), lowered, bias)
        if norm is not None:
            return matrix.norm_linear(hidden, norm, self.eps, bias)
        made = matrix.linear(hidden)
        return made if bias is None else made.add_(bias)

    def _lower(
        self, added: StackedAdapters, hidden: Tensor, norm: Tensor | None, adapters: AdapterRows
    ) -> tuple[Tensor, Lowered]:
        """Return the hidden states after the norm, if there is one, and their products with the adapters' down
        matrices.
        """
        if norm is None:
            return hidden, lower(hidden, added, adapters)
        return lower_normed(hidden, norm, self.eps, added, adapters)

    def _norm_widely(self, layer: int, qkv: Tensor) -> None:
        """Normalise all query heads of a token together, and all its key heads together, in place."""
        weights, begin = self.weights.layers[layer], 0
        for norm in (weights.query_norm, weights.key_norm):
            assert norm is not None, "the layer has both"
            part = qkv[:, begin : begin + len(norm)]
            part.copy_(rms_norm(part.contiguous(), norm, self.eps))
            begin += len(norm)

    def inputs(self, embedded: Tensor, token_ids: Tensor, layers: range) -> Tensor | None:
        """Return the extra inputs of these layers, `[tokens, layers, width]`; None: the model has none.

        embedded: `Decoder.embed` of the same tokens.
        """
        weights = self.weights.inputs
        if weights is None:
            return None
        width, num_tokens = len(weights.norm), len(token_ids)
        own = slice(layers.start * width, layers.stop * width)
        made = as_matrix(weights.projection[own]).linear(embedded)
        made = rms_norm(made.view(-1, width), weights.norm, self.eps * embedded.shape[1])  # as of it by hidden ** -0.5
        table = weights.table.unflatten(1, (-1, width))[:, layers.start : layers.stop]
        rows = table.index_select(0, token_ids).mul_(torch.tensor(width**0.5, dtype=made.dtype).item())
        return made.view(num_tokens, len(layers), width).add_(rows).mul_(2**-0.5)

    def end(self, layer: int, hidden: Tensor, inputs: Tensor | None) -> Tensor:
        """Add a layer's extra input after the MLP, and scale its output, if the model does. `hidden` may be changed.

        inputs: `[tokens, width]`, from `inputs`.
        """
        weights = self.weights.layers[layer]
        if weights.inputs is not None:
            assert inputs is not None, "a layer with inputs is given them"
            gates = F.gelu(as_matrix(weights.inputs.gate).linear(hidden), approximate="tanh").mul_(inputs)
            made = as_matrix(weights.inputs.projection).linear(gates)
            hidden = rms_norm_add(made, weights.inputs.norm, self.eps, hidden)
        return hidden if weights.scale is None else hidden.mul_(weights.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the last layer's hidden states, float32 `[tokens, vocab]`, capped if the model caps."""
        return self.logits_of(self.final_norm(hidden))

    def logits_of(self, normed: Tensor) -> Tensor:
        """Return the logits of hidden states that are already normed; otherwise like `logits`."""
        logits = self._logits.logits(normed)
        if self._ranks is not None and not self._has_all_logits:
            logits = self._ranks.join(logits)
        if self._gain != 1:
            logits.mul_(self._gain)
        return logits if self._cap is None else logits.div_(self._cap).tanh_().mul_(self._cap)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return what logits are made of, `[tokens, hidden]`, of the last layer's hidden states."""
        return rms_norm(hidden, self.weights.final_norm, self.eps)

    def _add(self, x: Tensor, layer: int, name: Literal["output", "down"], hidden: Tensor,
             adapters: AdapterRows | None, overwrites: bool, lowered: Lowered | None = None) -> Tensor:  # fmt: skip
        """Return product, bias and adapters, normed if there is a post-norm, and added to `hidden`.

        overwrites: as in `output`. lowered: the product of x with the adapters' down matrices; None: it is computed
        here.
        """
        weights = self.weights.layers[layer]
        bias, post_norm = weights.down_bias, weights.mlp_post_norm
        if name == "output":
            bias, post_norm = weights.output_bias, weights.attention_post_norm
        matrix, added = self._matrices[layer][name], self._adapter_products.get((layer, name))
        adapts = added is not None and adapters is not None
        residual = hidden if post_norm is None and self._is_first else None
        product = matrix.linear(x, None if adapts else residual, overwrites)
        if bias is not None and self._is_first:
            product.add_(bias)
        product = self._add_up(product)
        if added is not None and adapters is not None:
            product = add_raised(product, lowered or lower(x, added, adapters), residual)
        return product if post_norm is None else rms_norm_add(product, post_norm, self._post_eps, hidden)

    def _add_up(self, partial: Tensor) -> Tensor:
        """Return the sum over devices of each one's share of the product."""
        return partial if self._ranks is None else self._ranks.add_up(partial)


def _format_of(stored: Stored) -> tuple[object, ...]:
    """Return what kernels are compiled for: kind, group, and the dtypes of the tensors, which show runs and zero
    points.
    """
    return (getattr(stored, "kind", None), getattr(stored, "group", None), *(one.dtype for one in tensors_of(stored)))


def _stage_experts(weights: Weights, architecture: Architecture) -> StagedExperts | None:
    """Return what brings experts from host memory to the card, or None if none are there."""
    hosts = [layer.experts and layer.experts.host for layer in weights.layers]
    if not any(hosts):
        return None
    counts = [spec.experts.num_experts if spec.experts is not None else 0 for spec in architecture.layers]
    on_card = [count - (host.count if host else 0) for count, host in zip(counts, hosts, strict=True)]
    return StagedExperts(hosts, on_card, weights.embedding.device)
