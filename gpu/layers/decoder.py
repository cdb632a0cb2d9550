"""Compute the layers of a decoder, as its specs describe them, as functions over tensors.

Attention is passed in, or comes between the two halves of a layer. Each hidden state depends on its own row and on what
attention returns for that row, so padding rows and packed neighbours change nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu.attention.prefill_query import Attended
from gpu.exchange.device_experts import ExpertExchange
from gpu.kv.pool import KvPool
from gpu.layers.adapters import Adapters
from gpu.layers.delta_layers import DeltaLayers
from gpu.layers.latent import LatentLayers
from gpu.layers.projections import Projections
from gpu.layers.rope import layer_rope_tables
from gpu.model.spec import Architecture
from gpu.operations.arguments import runs_on_numba
from gpu.operations.head_norm import HeadNorms
from gpu.operations.kv.numba_rope_kv_write import rope_kv_write_cpu
from gpu.operations.kv.rope_kv_write import rope_kv_write
from gpu.operations.kv.row_places import RowPlaces
from gpu.operations.linear.adapter_product import AdapterRows
from gpu.operations.linear.packed_matrix import Packed, unpack_rows
from gpu.operations.sinks import add_sinks
from gpu.ranks import Ranks
from gpu.weights.weights import Weights

# Maps (query, pre_rope_query), both [tokens, heads, dim], to attention's output, of that shape and any floating dtype.
Attend = Callable[[Tensor, Tensor], Attended]

# Takes the keys and values of the tokens that a layer computes, before rotation: a view [tokens, 2, kv_heads, dim].
See = Callable[[Tensor], None]

# Where a layer's keys and values are written: key_pages, value_pages `[num_pages, kv_heads, page_tokens, dim]`, in the
# compute dtype or of codes (`kv_rows`), and
# page_table int32 `[max_slots, max_pages]`. A buffer `[kv_heads, tokens, dim]` is one page of `tokens` tokens.
Pages = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a layer writes keys and values.

    pages: None: the pool's. cells: int64 `[tokens]`; None: the positions. see: called with what is written.
    """

    pages: Pages | None = None
    cells: Tensor | None = None
    see: See | None = None


IN_POOL = Target()


@dataclass(slots=True)
class Carried:
    """What one layer passes to later ones beside hidden states.

    inputs: extra inputs (`Projections.inputs`) of all layers from `first_layer` on, or of that layer alone; None: the
        model has none.
    kept: keys and values `[tokens, 2 * kv_heads * dim]` that later layers share, before norms and rotation, by the
        layer that made them.
    query_scale: see `Decoder.query_scale`.
    output_gate: `[tokens, heads * dim]`, of the layer that is being computed, if it has one.
    adapters: the adapters of the tokens, looked up when a layer first needs them.
    adapts: whether some token may have an adapter.
    """

    inputs: Tensor | None
    first_layer: int
    kept: dict[int, Tensor]
    query_scale: Tensor | None = None
    output_gate: Tensor | None = None
    adapters: AdapterRows | None = None
    adapts: bool = True

    def of_rows(self, rows: Tensor) -> "Carried":
        """Return what is passed to these tokens after attention. rows: their indices, int64."""
        inputs, gate = (None if one is None else one[rows] for one in (self.inputs, self.output_gate))
        return replace(self, inputs=inputs, kept={}, query_scale=None, output_gate=gate, adapters=None)


def parted_gates(rows: Tensor, num_heads: int, is_apart: bool) -> tuple[Tensor, Tensor]:
    """Split rows `[.., 2 * heads * dim]` into queries and gates, both `[.., heads * dim]`.

    is_apart: the gates follow all query heads; else each query head is followed by its gate.
    """
    if is_apart:
        query, gates = rows.chunk(2, -1)
        return query, gates.clone()
    gated = rows.unflatten(-1, (num_heads, 2, -1))
    return gated[..., 0, :].flatten(-2), gated[..., 1, :].flatten(-2)


class Decoder:
    """The layers of a model: its weights, its RoPE tables, and the KV pool that the layers write to."""

    def __init__(self, architecture: Architecture, weights: Weights, pool: KvPool, max_context_tokens: int,
                 adapters: Adapters | None = None, ranks: Ranks | None = None) -> None:  # fmt: skip
        self.architecture = architecture
        self.weights = weights
        self.pool = pool
        self.adapters = adapters
        self.projections = Projections(weights, architecture, adapters, ranks)
        latent = architecture.latent
        self.scale = architecture.dim**-0.5 if latent is None else latent.scale  # other scales are in query norms
        self._kept_layers = frozenset(architecture.kept_layers)
        self.specs = architecture.layers
        self.delta = None if pool.states is None else DeltaLayers(architecture, self.projections, pool.states)
        self.windows = sorted({spec.window_tokens for spec in self.specs if spec.window_tokens is not None})
        self._rope_tables = layer_rope_tables(architecture, max_context_tokens, pool.device)
        self.latent = (
            None if latent is None else LatentLayers(architecture, latent, self.projections, self._rope_tables)
        )
        scale = torch.tensor(architecture.embedding_scale, dtype=weights.embedding.dtype)
        self._embedding_scale = float(scale)  # rounded as the rows are
        self._dims = [architecture.heads_of(spec).dim for spec in self.specs]

    @property
    def cos(self) -> Tensor:
        """Return the first layer's cosines, float32 `[max_context_tokens, dim // 2]`; most models have the same in
        every layer.
        """
        return self._rope_tables[0][0]

    @property
    def sin(self) -> Tensor:
        """Return the first layer's sines, like `cos`."""
        return self._rope_tables[0][1]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return hidden states `[tokens, hidden]` of token ids, int64 `[tokens]`."""
        table = self.weights.embedding
        rows = unpack_rows(table, token_ids) if isinstance(table, Packed) else table.index_select(0, token_ids)
        return rows if self._embedding_scale == 1.0 else rows.mul_(self._embedding_scale)

    def carry(self, token_ids: Tensor, positions: Tensor, embedded: Tensor, layers: range) -> Carried:
        """Return what these layers get beside hidden states, for a step. embedded: `embed(token_ids)`."""
        inputs = self.projections.inputs(embedded, token_ids, layers)
        return Carried(inputs, layers.start, {}, self.query_scale(positions))

    def carry_to(self, layer: int, token_ids: Tensor, positions: Tensor, kept: dict[int, Tensor]) -> Carried:
        """Return what a single layer gets beside hidden states. kept: as in `Carried`."""
        inputs = None
        if self.weights.inputs is not None:
            inputs = self.projections.inputs(self.embed(token_ids), token_ids, range(layer, layer + 1))
        return Carried(inputs, layer, kept, self.query_scale(positions))

    def query_scale(self, positions: Tensor) -> Tensor | None:
        """Return the factor of rotated queries, `[tokens, 1, 1]` in the weights' dtype; None: there is none."""
        growth = self.architecture.query_growth
        if growth is None:
            return None
        scale = 1 + growth.beta * torch.log1p(torch.floor(positions / growth.tokens))
        return scale.to(self.weights.embedding.dtype)[:, None, None]

    def layer(self, index: int, hidden: Tensor, positions: Tensor, slots: Tensor, attend: Attend,
              target: Target = IN_POOL, carried: Carried | None = None,
              wanted: Tensor | None = None) -> Tensor:  # fmt: skip
        """Compute one layer: hidden `[tokens, hidden]` -> `[tokens, hidden]`, or `[wanted, hidden]`.

        Keys and values are written to the slots' pages. `hidden` may be overwritten.

        positions: int64 `[tokens]`. slots: int32 `[tokens]`, -1 in padding rows. carried: may be None only for a model
        that carries nothing. wanted: indices of the tokens, int64, whose hidden states are returned, and with whose
        queries alone `attend` is called, if there are any; None: all. When `attend` is called, the KV of all these
        tokens is written.
        """
        cells = positions if target.cells is None else target.cells
        query, pre_rope_query = self.enter(index, hidden, positions, cells, slots, target.pages, target.see, carried)
        if wanted is not None:
            query, pre_rope_query, hidden, slots = (one[wanted] for one in (query, pre_rope_query, hidden, slots))
            carried = None if carried is None else carried.of_rows(wanted)
            if not len(wanted):
                return hidden
        attended = attend(query, pre_rope_query)
        return self.leave(index, hidden, attended.out, attended.lse, slots, carried=carried)

    def enter(self, index: int, hidden: Tensor, positions: Tensor, cells: Tensor, slots: Tensor,
              pages: Pages | None, see: See | None = None,
              carried: Carried | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute the part of a layer before attention: write keys and values, return `(query, pre_rope_query)`.

        See `layer`. cells: where in the slots' contexts they are written. Both queries are `[tokens, heads, dim]` in
        the weights' dtype. With latent attention both are the rotated query, of `query_dim` numbers.
        """
        if self.latent is not None:
            assert pages is None, "latent rows are only written to the pool's pages"
            own, table = self.pool.key_pages[index], self.pool.table_of(index)
            query = self.latent.enter(index, hidden, positions, cells, slots, own, table)
            scale = self.query_scale(positions) if carried is None else carried.query_scale
            return (query, query) if scale is None else (query.mul_(scale), query)
        source, columns = self.specs[index].kv_of, self.architecture.num_heads * self._dims[index]
        kept = None if source is None or carried is None else carried.kept[source]
        qkv = self.projections.qkv(index, hidden, kept, self._adapters_of(slots, carried))
        if self.specs[index].output_gate:
            assert carried is not None, "a layer with an output gate is given `carried`"
            made, carried.output_gate = parted_gates(
                qkv[:, : 2 * columns], self.architecture.num_heads, self.specs[index].has_gate_apart
            )
            qkv = torch.cat([made, qkv[:, 2 * columns :]], 1)
        if index in self._kept_layers:
            assert carried is not None, "a layer whose keys later layers share is given `carried`"
            carried.kept[index] = qkv[:, columns:].clone()
        norms = self.projections.head_norms(index)
        query = self._write(index, qkv, positions, cells, slots, pages, self.architecture.num_heads, norms)
        scale = self.query_scale(positions) if carried is None else carried.query_scale
        if scale is not None:
            query = query.mul_(scale)
        if see is not None:
            see(qkv[:, columns:].view(len(qkv), 2, -1, self._dims[index]))
        return query, qkv[:, :columns].view(query.shape)

    def place(self, index: int, rows: Tensor, positions: Tensor, slots: Tensor, pages: Pages | None) -> None:
        """Write keys and values that are not computed here, such as stored ones, to their positions' cells.

        rows: `[tokens, 2, kv_heads, dim]`, contiguous, keys before rotation. The keys are rotated to `positions`, as in
        `enter`.
        """
        self._write(index, rows.flatten(1), positions, positions, slots, pages, 0, None)

    def _write(self, index: int, qkv: Tensor, positions: Tensor, cells: Tensor, slots: Tensor, pages: Pages | None,
               num_heads: int, norms: HeadNorms | None) -> Tensor:  # fmt: skip
        key_pages, value_pages, page_table = pages or (
            self.pool.key_pages[index], self.pool.value_pages[index], self.pool.table_of(index),
        )  # fmt: skip
        write = rope_kv_write_cpu if runs_on_numba(key_pages) else rope_kv_write
        places = RowPlaces(*self._rope_tables[index], positions, cells, slots)
        return write(qkv, places, page_table, key_pages, value_pages, num_heads, norms)

    def leave(self, index: int, hidden: Tensor, attended: Tensor, lse: Tensor | None, slots: Tensor,
              exchange: ExpertExchange | None = None, carried: Carried | None = None) -> Tensor:  # fmt: skip
        """Compute the part of a layer after attention: output projection, residual and MLP. `hidden` may be
        overwritten, here and in `mlp`.

        attended: attention's output, `[tokens, heads, dim]` of any floating dtype, or a recurrent layer's, `[tokens,
        value_heads * value_dim]`. The layer's sinks, if it has some, are merged into it here. lse: `[tokens, heads]` of
        all that was attended to, None only for a layer without sinks. slots, carried: see `layer`. exchange: where the
        CPU computes experts, or None.
        """
        sinks = self.weights.layers[index].sinks
        if sinks is not None:
            assert lse is not None, "sinks are merged by the lse, which the method must return"
            attended = add_sinks(attended, lse, sinks)
        rows = attended.flatten(1)
        if self.specs[index].output_gate:
            assert carried is not None, "a layer with an output gate is given `carried`"
            assert carried.output_gate is not None, "`enter` has computed the gate"
            rows, carried.output_gate = rows * carried.output_gate.to(rows.dtype).sigmoid_(), None
        hidden = self.projections.output(index, rows, hidden, self._adapters_of(slots, carried), overwrites=True)
        return self.mlp(index, hidden, slots, exchange, carried)

    def mlp(self, index: int, hidden: Tensor, slots: Tensor, exchange: ExpertExchange | None,
            carried: Carried | None) -> Tensor:  # fmt: skip
        """Compute the part of a layer after its mixer, if it has one: for a layer that is only an MLP, all of it.

        The arguments are those of `leave`.
        """
        if self.specs[index].has_mlp:
            adapters = self._adapters_of(slots, carried)
            hidden = self.projections.mlp(index, hidden, slots, exchange, adapters, overwrites=True)
        inputs = None if carried is None or carried.inputs is None else carried.inputs[:, index - carried.first_layer]
        return self.projections.end(index, hidden, inputs)

    def warm_up_output(self, index: int, sizes: Sequence[int]) -> None:
        """Compile a layer's output projection for so many tokens, whose attention is in the weights' dtype."""
        embedding = self.weights.embedding
        for size in sizes:
            hidden = torch.zeros(size, self.architecture.hidden, dtype=embedding.dtype, device=embedding.device)
            attended = hidden.new_zeros(size, self.projections.num_attended(index))
            slots = torch.full((size,), -1, dtype=torch.int32, device=embedding.device)
            self.projections.output(index, attended, hidden, self._adapters_of(slots, None), overwrites=True)

    def _adapters_of(self, slots: Tensor, carried: Carried | None) -> AdapterRows | None:
        """Return the adapters of tokens in these slots. They are looked up once for all layers of a step."""
        if self.adapters is None or (carried is not None and not carried.adapts):
            return None
        if carried is None:
            return self.adapters.rows(slots)
        if carried.adapters is None:
            carried.adapters = self.adapters.rows(slots)
        return carried.adapters
