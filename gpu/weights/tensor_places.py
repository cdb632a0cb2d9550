"""Map each tensor of a checkpoint to its place, mostly a slice of a fused matrix, and to the changes made at load.

Queries and keys are rotated in halves here. So rows of checkpoints that rotate neighbours, or only a part of each head,
are reordered. Products of a query and a key do not change by that.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu.model.draft_head_shape import TENSORS as HEAD_TENSORS
from gpu.model.draft_head_shape import name_of_head
from gpu.model.family import Family, StackLayout, families
from gpu.model.gguf.kinds import BLOCK_KINDS
from gpu.model.matrix_format import MatrixFormat
from gpu.model.matrix_formats import (
    OF_EXPERTS,
    joined_parts,
    layer_formats,
    layer_tensors,
    matrix_parts,
    matrix_shapes,
    module_names,
    output_format,
)
from gpu.model.spec import Architecture, LayerSpec, Recurrent
from gpu.operations.linear.packed_matrix import Packed
from gpu.weights.gguf_blocks import Blocks, widen, widen_blocks
from gpu.weights.stored import PLAIN, ModuleRows, StoredTensor, stacked_tensors, stored_tensors
from gpu.weights.weight_allocation import allocate_weights
from gpu.weights.weights import ExpertWeights, LatentWeights, LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a checkpoint's tensor, and the changes made to it.

    order: the checkpoint's row for each row here, int64; None: the same order.
    offset, gain: added in float32, and then multiplied.
    norm_eps: epsilon with which each row is normed; None: rows are not normed.
    """

    tensor: Tensor
    order: Tensor | None = None
    offset: float = 0.0
    gain: float = 1.0
    norm_eps: float | None = None

    def fill(self, stored: Tensor | Blocks) -> None:
        if isinstance(stored, Blocks):
            self._widen(stored)
        else:
            self.fill_rows(0, stored)

    def fill_rows(self, begin: int, stored: Tensor) -> None:
        """Place rows of the checkpoint's tensor, from row `begin` on. From pinned memory this is asynchronous."""
        rows, end = stored.to(self.tensor.device, non_blocking=True), begin + len(stored)
        if self.offset or self.gain != 1:
            rows = (rows.float() + self.offset) * self.gain
        if self.norm_eps is not None:
            wide = rows.float()
            rows = wide * (wide.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        if self.order is None:
            self.tensor[begin:end].copy_(rows)
        else:
            ours = torch.argsort(self.order)[begin:end].to(self.tensor.device)
            self.tensor.index_copy_(0, ours, rows.to(self.tensor.dtype))

    def _widen(self, blocks: Blocks) -> None:
        assert (self.offset, self.gain, self.norm_eps) == (0.0, 1.0, None), "of norms, which are not in blocks"
        widen_blocks(blocks if self.order is None else blocks.rows(self.order), self.tensor)

    @property
    def wanted(self) -> StoredTensor:
        is_same = self.order is None and not self.offset and self.gain == 1 and self.norm_eps is None
        kinds = PLAIN if self.tensor.ndim == 1 else (*PLAIN, *BLOCK_KINDS)
        return StoredTensor(
            (tuple(self.tensor.shape),), kinds, self.fill, fill_rows=self.fill_rows,
            as_is=self.tensor if is_same else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShapedPlace:
    """The place of a small tensor whose axes of one element are missing in some files. order: as in `Place`."""

    tensor: Tensor
    order: Tensor | None = None

    @property
    def wanted(self) -> StoredTensor:
        whole = tuple(self.tensor.shape)
        return StoredTensor((whole, tuple(size for size in whole if size != 1)), PLAIN, self.fill)

    def fill(self, stored: Tensor) -> None:
        rows = stored.reshape(self.tensor.shape)
        self.tensor.copy_(rows if self.order is None else rows[self.order.to(rows.device)])


@dataclass(frozen=True, slots=True)
class HeadsPlace:
    """The place of a tensor with the rows of all heads, head after head. tensor: `[heads, rows, columns]`.
    is_transposed: whether the checkpoint has each head transposed.
    """

    tensor: Tensor
    is_transposed: bool = False

    @property
    def wanted(self) -> StoredTensor:
        heads, rows, columns = self.tensor.shape
        shape = (heads * columns, rows) if self.is_transposed else (heads * rows, columns)
        return StoredTensor((shape,), (*PLAIN, *BLOCK_KINDS), self.fill)

    def fill(self, stored: Tensor | Blocks) -> None:
        rows = widen(stored) if isinstance(stored, Blocks) else stored
        cut = rows.unflatten(0, (len(self.tensor), -1))
        self.tensor.copy_(cut.transpose(1, 2) if self.is_transposed else cut)


@dataclass(frozen=True, slots=True)
class StackPlace:
    """The place of a tensor with all experts. experts: the rows, or the bias, of each, on the device or in host
    memory.
    """

    experts: tuple[Tensor, ...]
    layout: StackLayout

    @property
    def wanted(self) -> StoredTensor:
        shape = self.experts[0].shape[::-1] if self.layout.is_transposed else self.experts[0].shape
        return StoredTensor(((len(self.experts), *shape),), PLAIN, self.fill, fill_rows=self.fill_rows)

    def fill(self, stored: Tensor) -> None:
        self.fill_rows(0, stored)

    def fill_rows(self, begin: int, stored: Tensor) -> None:
        """Place experts of the checkpoint's tensor, from expert `begin` on. From pinned memory this is asynchronous."""
        for place, expert in zip(self.experts[begin : begin + len(stored)], stored, strict=True):
            rows = expert.to(place.device, non_blocking=True)
            rows = rows.T if self.layout.is_transposed and rows.ndim == 2 else rows
            if self.layout.is_interleaved:
                rows = rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
            place.copy_(rows)


AnyPlace = Place | ShapedPlace | HeadsPlace | StackPlace


def head_order(architecture: Architecture) -> Tensor | None:
    """Return the order of a head's elements, int64 `[dim]`: the checkpoint's element for each element here. None: the
    same order. Here element i is rotated with element i + dim / 2, and in both halves the elements that are not rotated
    come last.
    """
    dim, rotary = architecture.dim, architecture.rotary_dim or architecture.dim
    if rotary == dim and not architecture.has_neighbour_pairs:
        return None
    leading = torch.arange(rotary)
    rotated = leading.view(-1, 2).T if architecture.has_neighbour_pairs else leading.view(2, -1)
    still = torch.arange(rotary, dim).view(2, -1)
    return torch.cat([rotated, still], 1).flatten()


def places(weights: Weights, architecture: Architecture) -> dict[str, StoredTensor]:
    """Return the wanted tensors by canonical name; each knows how to fill its place in `weights`."""
    offset = architecture.norm_weight_offset
    norm_eps = architecture.rms_norm_eps if architecture.has_normed_embedding else None
    last = offset if architecture.final_norm_offset is None else architecture.final_norm_offset
    found = {
        "model.norm.weight": Place(weights.final_norm, offset=last).wanted,
    }
    if isinstance(weights.embedding, Tensor):
        found["model.embed_tokens.weight"] = Place(weights.embedding, norm_eps=norm_eps).wanted
    if weights.inputs is not None:
        found |= {
            "model.embed_tokens_per_layer.weight": Place(weights.inputs.table).wanted,
            "model.per_layer_model_projection.weight": Place(weights.inputs.projection).wanted,
            "model.per_layer_projection_norm.weight": Place(weights.inputs.norm, offset=offset).wanted,
        }
    if isinstance(weights.logits, Packed):
        whole = ModuleRows(weights.logits, 0, weights.logits.rows, None)
        module = "model.embed_tokens" if architecture.tied_embeddings else "lm_head"
        found |= _stored(module, output_format(architecture), whole, architecture)
    elif not architecture.tied_embeddings:
        found["lm_head.weight"] = Place(weights.logits).wanted
    for index, (layer, spec) in enumerate(zip(weights.layers, architecture.layers, strict=True)):
        found |= _packed_places(layer, architecture, index)
        known, names = _layer_places(layer, architecture, spec), layer_tensors(architecture, spec)
        own = architecture.layer_name(index)
        plain = {f"{own}.{name}": known[what] for name, what in names.items() if what in known}
        found |= {name: place.wanted for name, place in plain.items()}
    if weights.draft is not None:
        for name, what in HEAD_TENSORS.items():
            tensor = getattr(weights.draft, what)
            found[name] = Place(tensor, offset=offset if tensor.ndim == 1 else 0.0).wanted
    return found


def canonical(name: str, architecture: Architecture) -> str | None:
    """Return a tensor's canonical name, as in `Family`, or as a draft head's tensor if the head is served."""
    own = name_of_head(name) if architecture.draft_layers else None
    return family_of(architecture).canonical(name) if own is None else own


def family_of(architecture: Architecture) -> Family:
    """Return the family that made an architecture."""
    return families()[architecture.family]


def wanted_tensors(architecture: Architecture) -> dict[str, StoredTensor]:
    """Return the tensors that a folder must have, by canonical name."""
    return places(allocate_weights(architecture, torch.bfloat16, torch.device("meta")), architecture)


def row_order(a: Architecture, spec: LayerSpec) -> Tensor | None:
    """Return the order of all rows of a layer's QKV; None if it does not change."""
    if spec.recurrent is not None:
        if spec.recurrent.is_mamba:
            return _mamba_order(spec.recurrent)
        return _grouped_order(spec.recurrent)[0] if spec.recurrent.is_grouped else None
    order = head_order(a)
    if order is None:
        return None
    gated = torch.cat([order, torch.arange(a.dim, 2 * a.dim)]) if spec.output_gate else order
    queries = torch.arange(a.num_heads)[:, None] * len(gated) + gated
    begin, key = a.num_heads * len(gated), a.num_kv_heads * a.dim
    keys = begin + torch.arange(a.num_kv_heads)[:, None] * a.dim + order
    return torch.cat([queries.flatten(), keys.flatten(), torch.arange(begin + key, begin + 2 * key)])


def _grouped_order(own: Recurrent) -> tuple[Tensor, Tensor]:
    """Return the row orders of the two matrices that a recurrent layer's checkpoint stores key head by key head: the
    one of queries, keys, values and gates, and the one of both gates of the state.
    """
    shared = own.value_heads // own.key_heads
    of_all = [own.key_dim, own.key_dim, shared * own.value_dim, shared * own.value_dim]
    orders = []
    for sizes in (of_all, [shared, shared]):
        rows = torch.arange(own.key_heads * sum(sizes)).view(own.key_heads, -1).split(sizes, 1)
        orders.append(torch.cat([part.flatten() for part in rows]))
    return orders[0], orders[1]


def _mamba_order(own: Recurrent) -> Tensor:
    """Return the order of rows of a Mamba-2 layer's matrix, which is stored as z, x, B, C and steps of time."""
    sizes = (own.value_width, own.value_width, own.key_width, own.key_width, own.gate_rows)
    z, x, b, c, time = torch.arange(own.matrix_rows).split(sizes)
    return torch.cat([c, b, x, z, time])


def _packed_places(layer: LayerWeights, a: Architecture, index: int) -> dict[str, StoredTensor]:
    """Return the tensors of modules with packed matrices."""
    found: dict[str, StoredTensor] = {}
    formats, heads = layer_formats(a, index), row_order(a, a.layers[index])
    for matrix, stored in formats.items():
        all_stacks = [stack for stack in layer.stacks(matrix) if isinstance(stack, Packed)]
        if stored is None or not all_stacks:
            continue
        parts = {}
        for listed in (joined_parts(a.layers[index], matrix), matrix_parts(a, a.layers[index], matrix)):
            packed, *stacks = all_stacks
            begin = 0
            for what, rows in listed:
                if begin == packed.rows:
                    packed, begin = stacks.pop(0), 0
                order = None
                if heads is not None and what in ("query", "key", "mixed_all"):
                    order = heads[begin : begin + rows] - begin
                parts[what] = ModuleRows(packed, begin, begin + rows, order)
                begin += rows
        if matrix in OF_EXPERTS and matrix in layer_tensors(a, a.layers[index]).values():
            found |= _stacked(layer, a, index, matrix)
            continue
        whole = ModuleRows(packed, 0, begin, heads if matrix == "qkv" else None)
        parts.setdefault(matrix, whole)
        for what, module in module_names(a, index, matrix).items():
            found |= _stored(module, stored, parts[what], a)
    return found


def _stacked(layer: LayerWeights, a: Architecture, index: int, matrix: str) -> dict[str, StoredTensor]:
    """Return the tensors with the words or scales of all experts of a layer."""
    spec, stored = a.layers[index], layer_formats(a, index)[matrix]
    assert spec.experts is not None, "its matrices are of experts"
    assert a.quantisation is not None, "it is of a quantised model"
    assert stored is not None, "a packed matrix has a format"
    rows, is_gated = matrix_shapes(a, spec)[matrix][0] // spec.experts.num_experts, matrix == "experts_gate_up"
    order = torch.arange(rows)
    if is_gated and family_of(a).stacks.is_interleaved:
        order = order.view(-1, 2).T.flatten()
    experts = [
        ModuleRows(stack, begin, begin + rows, order)
        for stack in layer.stacks(matrix) if isinstance(stack, Packed)
        for begin in range(0, stack.rows, rows)
    ]  # fmt: skip
    (module,) = module_names(a, index, matrix).values()
    is_transposed = family_of(a).stacks.is_transposed
    found = stacked_tensors(a.quantisation.scheme, stored, experts, is_transposed)
    names = {what: name for name, what in layer_tensors(a, spec).items()}
    plain = ".weight" if names[matrix].endswith(".weight") else ""  # of rows that are not packed in the file
    return {module + (end or plain): tensor for end, tensor in found.items()}


def _stored(module: str, stored: MatrixFormat | None, part: ModuleRows, a: Architecture) -> dict[str, StoredTensor]:
    assert stored is not None, "a packed matrix has a format"
    assert a.quantisation is not None, "it is of a quantised model"
    tensors = stored_tensors(a.quantisation.scheme, stored, part, a.quantisation.layers.row_block)
    return {module + end: tensor for end, tensor in tensors.items()}


def _layer_places(layer: LayerWeights, a: Architecture, spec: LayerSpec) -> dict[str, AnyPlace]:
    """Return the plain places of one layer, by the names of a family's table (`gpu.model.family`)."""
    own, offset = a.heads_of(spec), a.norm_weight_offset
    query, key = (1 + spec.output_gate) * a.num_heads * own.dim, own.count * own.dim
    order, heads = head_order(a), row_order(a, spec)
    norms = {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm}
    places: dict[str, AnyPlace] = {name: Place(norm, offset=offset) for name, norm in norms.items() if norm is not None}
    for name, matrix in layer.matrices.items():
        if (name == "qkv" and a.latent is None) or not isinstance(matrix, Tensor):
            continue
        places[name] = Place(matrix)
        for listed in (joined_parts(spec, name), matrix_parts(a, spec, name)):
            begin, stacks = 0, layer.stacks(name)
            for what, rows in listed:
                if begin == len(stacks[0]):
                    begin, stacks = 0, stacks[1:]
                places[what] = Place(stacks[0][begin : begin + rows])
                begin += rows
    if layer.experts is not None:
        places |= _router_places(layer.experts, a) | _stack_places(layer, a, spec)
    if layer.inputs is not None:
        places |= {
            "input_gate": Place(layer.inputs.gate),
            "input_projection": Place(layer.inputs.projection),
            "input_norm": Place(layer.inputs.norm, offset=offset),
        }
    if layer.scale is not None:
        places["layer_scale"] = Place(layer.scale)
    if layer.recurrent is not None and spec.recurrent is not None:
        return places | _recurrent_places(layer, spec.recurrent, heads)
    if layer.latent is not None:
        places |= _latent_places(layer.latent, a)
    for suffix, rows in (("", layer.qkv), ("_bias", layer.qkv_bias)):
        if isinstance(rows, Tensor) and a.latent is None:
            places["qkv" + suffix] = Place(rows, heads)
            places["query" + suffix] = Place(rows[:query], None if heads is None else heads[:query])
            if spec.has_gate_apart:
                places["query"], places["output_gate"] = map(Place, rows[:query].chunk(2))
            keys = None if heads is None else heads[query : query + key] - query
            places["key" + suffix] = Place(rows[query : query + key], keys)
            places["value" + suffix] = Place(rows[query + key :])
    if layer.sinks is not None:
        places["sinks"] = Place(layer.sinks)
    for name, bias in layer.biases.items():
        begin = 0
        places.setdefault(name + "_bias", Place(bias))
        for what, rows in matrix_parts(a, spec, name) if name != "qkv" else ():
            places[what + "_bias"] = Place(bias[begin : begin + rows])
            begin += rows
    if (
        layer.query_norm is not None and layer.key_norm is not None and not spec.plain_qk_norm
    ):  # of a layer with its own keys, if it asks for it
        places["query_norm"] = Place(layer.query_norm, order, offset, a.query_gain)
        places["key_norm"] = Place(layer.key_norm, order, offset)
    if layer.attention_post_norm is not None and layer.mlp_post_norm is not None:
        places["attention_post_norm"] = Place(layer.attention_post_norm, offset=offset)
        places["mlp_post_norm"] = Place(layer.mlp_post_norm, offset=offset)
    return places


def _router_places(experts: ExpertWeights, a: Architecture) -> dict[str, AnyPlace]:
    """Return the places of a router, and of the weights beside experts."""
    places: dict[str, AnyPlace] = {"router": Place(experts.router)}
    if experts.router_bias is not None:
        places["router_bias"] = Place(experts.router_bias)
    if experts.correction is not None:
        places["router_correction"] = Place(experts.correction)
    if experts.shared_share is not None:
        places["shared_share"] = ShapedPlace(experts.shared_share)
    if experts.beside is not None:
        beside, offset = experts.beside, a.norm_weight_offset
        places |= {
            "router_norm": Place(beside.router_norm, offset=offset, gain=a.hidden**-0.5),
            "experts_norm": Place(beside.norm, offset=offset),
            "experts_post_norm": Place(beside.post_norm, offset=offset),
            "mlp_own_post_norm": Place(beside.mlp_post_norm, offset=offset),
            "expert_gains": Place(beside.gains),
        }
    return places


def _latent_places(latent: LatentWeights, a: Architecture) -> dict[str, AnyPlace]:
    """Return the places of latent attention's norms, and of split matrices."""
    places: dict[str, AnyPlace] = {"latent_norm": Place(latent.norm, offset=a.norm_weight_offset)}
    if latent.query_norm is not None:
        places["query_down_norm"] = Place(latent.query_norm, offset=a.norm_weight_offset)
    if a.latent is not None and a.latent.is_split and isinstance(latent.up, Tensor):
        up = latent.up.unflatten(0, (a.num_heads, -1))
        places["latent_key_up"] = HeadsPlace(up[:, : a.latent.plain], is_transposed=True)
        places["latent_value_up"] = HeadsPlace(up[:, a.latent.plain :])
    return places


def _recurrent_places(layer: LayerWeights, own: Recurrent, order: Tensor | None) -> dict[str, AnyPlace]:
    weights = layer.recurrent
    assert weights is not None, "the layer is recurrent"
    if own.is_short:
        whole = {"mixed_all": Place(layer.qkv, order)} if isinstance(layer.qkv, Tensor) else {}
        return whole | {"conv": ShapedPlace(weights.conv)}
    if weights.conv_bias is not None and weights.skip is not None and order is not None:
        channels = order[: own.conv_width] - own.value_width
        whole = {"mixed_all": Place(layer.qkv, order)} if isinstance(layer.qkv, Tensor) else {}
        numbers = {"decay": weights.decay, "time_bias": weights.time_bias, "skip": weights.skip,
                   "mixed_norm": weights.norm}  # fmt: skip
        return whole | {name: Place(tensor) for name, tensor in numbers.items()} | {
            "conv": ShapedPlace(weights.conv, channels), "conv_bias": Place(weights.conv_bias, channels)
        }  # fmt: skip
    places: dict[str, AnyPlace] = {
        "state_shares": Place(weights.gates[: own.value_heads]),
        "state_decays": Place(weights.gates[own.value_heads :]),
        "state_gates": Place(weights.gates, _grouped_order(own)[1] if own.has_grouped_gates else None),
        "conv": ShapedPlace(weights.conv),
        "decay": Place(weights.decay),
        "time_bias": Place(weights.time_bias),
        "mixed_norm": Place(weights.norm),
    }
    if isinstance(layer.qkv, Tensor):
        places["mixed_all"] = Place(layer.qkv, order)
        places["mixed"], places["mixed_gate"] = map(Place, layer.qkv.split([own.conv_width, own.value_width]))
    return places


def _stack_places(layer: LayerWeights, a: Architecture, spec: LayerSpec) -> dict[str, StackPlace]:
    """Return the places of tensors with a matrix, or a bias, of all experts."""
    assert spec.experts is not None, "its weights are of experts"
    layout, found = family_of(a).stacks, {}
    for name in OF_EXPERTS:
        rows = matrix_shapes(a, spec)[name][0] // spec.experts.num_experts
        own = replace(layout, is_interleaved=layout.is_interleaved and name == "experts_gate_up")
        stacks = [stack for stack in layer.stacks(name) if isinstance(stack, Tensor) and len(stack)]
        if stacks:
            found[name] = StackPlace(tuple(expert for stack in stacks for expert in stack.split(rows)), own)
        bias = layer.biases.get(name)
        if bias is not None:
            found[name + "_bias"] = StackPlace(bias.split(rows), own)
    return found
