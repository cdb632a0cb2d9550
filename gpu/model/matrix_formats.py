"""Find the format of each matrix of a model (None for a plain one), and count the bytes of all.

The parts of a fused matrix must have the same format; a checkpoint in which they differ is refused by name.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from gpu.model.family import EACH, ONE_NORM, families
from gpu.model.matrix_format import BITS, MULTIPLIED_COLUMNS, MULTIPLIED_GROUP, ROUNDED, MatrixFormat, Quantisation
from gpu.model.spec import Architecture, Experts, LayerSpec, ModelError

WIDENED_BYTES = 512 * 2**20
WIDENED_EXPERTS_BYTES = 256 * 2**20  # most bytes of experts that are widened at once
LEAST_WIDENED_PAIRS = 512  # from so many tokens for an expert on average, experts are widened in memory

# Of a layer's matrices: those of all its experts, below each other.
OF_EXPERTS = ("experts_gate_up", "experts_down")
# What a family's table has that a layer of the other kind lacks.
OF_ATTENTION = {"query", "key", "value", "output", "query_norm", "key_norm"}
OF_RECURRENT = {"mixed", "mixed_gate", "mixed_all", "mixed_output", "state_shares", "state_decays", "state_gates",
                "conv", "conv_bias", "decay", "time_bias", "skip", "mixed_norm"}  # fmt: skip
OF_MLP = {"gate", "up", "gate_up", "down"}
OF_SHARED = {"shared_gate", "shared_up", "shared_gate_up", "shared_down", "shared_share"}

_FIRST = ("gate", "up")  # of an MLP: what is multiplied first

# Of latent attention: what makes a head's keys and values, in turns. It is plain whatever a file has, since queries and
# outputs are multiplied by it head by head.
LATENT_UP = "latent_up"


def matrix_shapes(a: Architecture, spec: LayerSpec) -> dict[str, tuple[int, int]]:
    """Return rows and columns of a layer's matrices, by the names of `weights.LayerWeights.matrices`."""
    heads, experts, intermediate = a.heads_of(spec), spec.experts, a.intermediate_of(spec)
    query, key, own, latent = a.num_heads * heads.dim, heads.count * heads.dim, spec.recurrent, a.latent
    rows = (1 + spec.output_gate) * query + spec.num_kv_projections * key
    if own is not None:
        query, rows = own.value_width, own.matrix_rows
    found = {"qkv": (rows, a.hidden), "output": (a.hidden, query)} if spec.has_mixer else {}
    if latent is not None:
        first = latent.first_columns(a.num_heads)
        found = {"qkv": (first + latent.row, a.hidden), "output": (a.hidden, a.num_heads * latent.value)}
        found[LATENT_UP] = a.num_heads * (latent.plain + latent.value), latent.rank
        if latent.query_rank is not None:
            found["query_up"] = a.num_heads * latent.query_dim, latent.query_rank
    if spec.has_mlp and (experts is None or experts.has_mlp):
        found |= {"gate_up": (spec.first_rows(intermediate), a.hidden), "down": (a.hidden, intermediate)}
    return (
        found
        if experts is None
        else found
        | {
            "experts_gate_up": (experts.num_experts * spec.first_rows(experts.intermediate), a.hidden),
            "experts_down": (experts.num_experts * a.hidden, experts.intermediate),
        }
    )


def matrix_parts(a: Architecture, spec: LayerSpec, matrix: str) -> list[tuple[str, int]]:
    """Return the tensors of `layer_tensors` that make a matrix, with the rows of each, in order."""
    if spec.recurrent is not None and matrix in ("qkv", "output"):
        if spec.recurrent.kind != "delta_net":
            return [("mixed_all", spec.recurrent.matrix_rows) if matrix == "qkv" else ("mixed_output", a.hidden)]
        own_rows = [("mixed", spec.recurrent.conv_width), ("mixed_gate", spec.recurrent.value_width)]
        return own_rows if matrix == "qkv" else [("mixed_output", a.hidden)]
    if a.latent is not None and matrix == "qkv":
        first = "query" if a.latent.query_rank is None else "query_down"
        return [(first, a.latent.first_columns(a.num_heads)), ("latent", a.latent.row)]
    if matrix in (LATENT_UP, "query_up"):
        return [(matrix, matrix_shapes(a, spec)[matrix][0])]
    if matrix == "qkv":
        heads = a.heads_of(spec)
        own = [(what, heads.count * heads.dim) for what in ("key", "value")[: spec.num_kv_projections]]
        query = a.num_heads * heads.dim
        if spec.has_gate_apart:
            return [("query", query), ("output_gate", query), *own]
        return [("query", (1 + spec.output_gate) * query), *own]
    if matrix in OF_EXPERTS:
        assert spec.experts is not None, "a matrix of experts is of a layer that has some"
        parts = [(what, spec.experts.intermediate) for what in _FIRST[not spec.is_gated :]]
        one = parts if matrix == "experts_gate_up" else [("down", a.hidden)]
        return [(of_expert(what, n), rows) for n in range(spec.experts.num_experts) for what, rows in one]
    width, of = a.intermediate_of(spec), "shared_" if spec.experts is not None and spec.experts.is_shared else ""
    if matrix == "gate_up":
        return [(of + what, width) for what in _FIRST[not spec.is_gated :]]
    return [(of + matrix if matrix == "down" else matrix, a.hidden)]


def joined_parts(spec: LayerSpec, matrix: str) -> list[tuple[str, int]]:
    """Return a matrix's parts as some files have them, where each joins several of `matrix_parts`: an expert's gate and
    up.
    """
    if matrix == "qkv" and spec.recurrent is not None:
        return [("mixed_all", spec.recurrent.matrix_rows)] if spec.recurrent.kind == "delta_net" else []
    if not spec.is_gated:
        return []
    if matrix == "gate_up" and spec.experts is not None and spec.experts.is_shared:
        return [] if spec.intermediate is None else [("shared_gate_up", 2 * spec.intermediate)]
    if matrix != "experts_gate_up" or spec.experts is None:
        return []
    return [(of_expert("gate_up", n), 2 * spec.experts.intermediate) for n in range(spec.experts.num_experts)]


def of_expert(what: str, expert: int) -> str:
    """Return the name of one expert's tensor, such as `gate of 3`, or `gate of 3_bias`."""
    matrix, is_bias = what.removesuffix("_bias"), what.endswith("_bias")
    return f"{matrix} of {expert}" + ("_bias" if is_bias else "")


@lru_cache(maxsize=512)
def layer_tensors(architecture: Architecture, spec: LayerSpec) -> dict[str, str]:
    """Return a family's table for such a layer. `gpu.model.family.EACH` in a name stands for each of its experts."""
    table, experts = families()[architecture.family].tensors(architecture), spec.experts
    absent = {"value"} if spec.keys_are_values else set()
    if spec.kv_of is not None:
        absent = {"key", "value", "key_norm"}
    if experts is not None and not experts.beside_mlp:
        absent |= {"gate", "up", "down"}
    if experts is None or not experts.is_shared:
        absent |= OF_SHARED
    if experts is None:
        absent |= {"router", "router_correction"}
    absent |= set() if spec.attends else OF_ATTENTION
    absent |= OF_RECURRENT if spec.recurrent is None else set()
    absent |= set() if spec.has_mlp else OF_MLP
    norm = "attention_norm" if spec.has_mixer else "mlp_norm"
    plain = {
        name: norm if what == ONE_NORM else what
        for name, what in table.items()
        if EACH not in name and what not in absent
    }
    if experts is None:
        return plain
    return plain | {
        name.replace(EACH, str(n)): of_expert(what, n)
        for n in range(experts.num_experts)
        for name, what in table.items()
        if EACH in name
    }


@lru_cache(maxsize=512)
def layer_formats(architecture: Architecture, layer: int) -> Mapping[str, MatrixFormat | None]:
    """Return the format of each matrix of a layer, by the names of `weights.LayerWeights.matrices`. Raises ModelError
    for parts of different formats, and for rows that are not whole words.
    """
    quantisation, names = architecture.quantisation, matrix_shapes(architecture, architecture.layers[layer])
    if quantisation is None:
        return dict.fromkeys(names)
    return {name: _layer_format(architecture, quantisation, layer, name) for name in names}


def output_format(architecture: Architecture) -> MatrixFormat | None:
    """Return the format of the output matrix; None: plain."""
    quantisation = architecture.quantisation
    if quantisation is None or quantisation.leaves(_names("lm_head", architecture)):
        return None
    if architecture.tied_embeddings and quantisation.scheme != "gguf":
        return None  # other schemes do not round embeddings
    return _fitting(quantisation.output, architecture.hidden, "lm_head") if quantisation.output else None


def module_names(architecture: Architecture, layer: int, matrix: str) -> dict[str, str]:
    """Return the canonical names of a matrix's modules, by part, or by the matrix's name if it has one module."""
    spec, found = architecture.layers[layer], {}
    parts = (*matrix_parts(architecture, spec, matrix), *joined_parts(spec, matrix))
    wanted = {matrix, *(what for what, _ in parts)}
    for name, what in layer_tensors(architecture, spec).items():
        if what in wanted:
            found[what] = f"{architecture.layer_name(layer)}.{name.removesuffix('.weight')}"
    return found


def weight_bytes(architecture: Architecture, dtype_bytes: int, is_packed: bool) -> int:
    """Return the bytes of all weights. is_packed: whether matrices stay as they are stored (`why_unpacked`)."""
    saved = sum(_saved(architecture, dtype_bytes, lambda experts: 1.0)) if is_packed else 0
    return architecture.num_weights * dtype_bytes - round(saved)


def step_weight_bytes(architecture: Architecture, dtype_bytes: int, is_packed: bool, num_tokens: int) -> int:
    """Return the bytes of weights that a decode step of `num_tokens` reads. Left out are the input embedding, of which
    it reads one row for each token, and the experts that no token is expected to use.
    """
    shares = partial(_share_read, num_tokens)
    saved = sum(_saved(architecture, dtype_bytes, shares)) if is_packed else 0
    return architecture.num_weights_read(num_tokens) * dtype_bytes - round(saved)


def _share_read(num_tokens: int, experts: Experts) -> float:
    return experts.taken(num_tokens) / experts.num_experts


def why_unpacked(architecture: Architecture, has_vectors: bool) -> str | None:
    """Return the reason why the CPU cannot multiply packed matrices, so that all are unpacked at load; None if it can.
    has_vectors: whether the processor has the vectors that the kernels need.
    """
    if architecture.quantisation is None:
        return None
    if not has_vectors:
        return "the processor has no AVX2 and FMA"
    held = [
        (stored, inner) for layer, spec in enumerate(architecture.layers)
        for (name, (_, inner)), stored in zip(
            matrix_shapes(architecture, spec).items(), layer_formats(architecture, layer).values(), strict=True
        )
    ]  # fmt: skip
    for stored, inner in (*held, (output_format(architecture), architecture.hidden)):
        if stored is None:
            continue
        if inner % MULTIPLIED_COLUMNS:
            return f"the CPU multiplies rows of multiples of {MULTIPLIED_COLUMNS} columns, and these have {inner}"
        if stored.group is not None and stored.group < inner and stored.group % MULTIPLIED_GROUP:
            wanted = f"groups of multiples of {MULTIPLIED_GROUP} columns"
            return f"the CPU multiplies {wanted}, and these have {stored.group}"
    return None


def describe_formats(architecture: Architecture) -> str:
    """Describe the formats of a quantised model in a few words."""
    assert architecture.quantisation is not None, "a plain model has no formats"
    if architecture.quantisation.note is not None:
        return architecture.quantisation.note
    layers, output = architecture.quantisation.layers, output_format(architecture)
    groups = "rows" if layers.group is None else f"groups of {layers.group}"
    return f"{layers.kind} in {groups}, output matrix {output.kind if output else 'plain'}"


def widened_bytes(architecture: Architecture, dtype_bytes: int) -> int:
    """Return the bytes of packed matrices that prefill keeps widened: a layer's matrices, or as many as WIDENED_BYTES
    hold, but at least the largest. 0 if all are plain. Experts are counted by `widened_experts_bytes`; matrices of
    `unwidened_names` are not widened.
    """
    if architecture.quantisation is None:
        return 0
    sizes = [[rows * inner * dtype_bytes for rows, inner in shapes] for shapes in _own_shapes(architecture)]
    return max(max(max(layer), min(sum(layer), WIDENED_BYTES)) if layer else 0 for layer in sizes)


def experts_at_once(rows: int, inner: int, dtype_bytes: int) -> int:
    """Return how many experts, of `rows` rows each, are widened together: as many as WIDENED_EXPERTS_BYTES hold, but at
    least one.
    """
    return max(1, WIDENED_EXPERTS_BYTES // (rows * inner * dtype_bytes))


def widened_experts_bytes(architecture: Architecture, dtype_bytes: int, most_tokens: int) -> int:
    """Return the bytes of packed experts that a prefill unit of `most_tokens` widens together; 0: none."""
    if architecture.quantisation is None:
        return 0
    most = 0
    for spec in set(architecture.layer_pattern):
        for name, (rows, inner) in matrix_shapes(architecture, spec).items():
            if spec.experts is not None and name in OF_EXPERTS:
                count = spec.experts.num_experts
                if most_tokens * spec.experts.per_token < LEAST_WIDENED_PAIRS * count:
                    continue
                own = rows // count
                most = max(most, min(count, experts_at_once(own, inner, dtype_bytes)) * own * inner * dtype_bytes)
    return most


def _own_shapes(a: Architecture) -> list[list[tuple[int, int]]]:
    """Return for each layer the shapes of packed matrices that prefill widens, without experts."""
    if a.quantisation is None or not (a.quantisation.humming or a.quantisation.rounds_tokens):
        return [_dense_shapes(a, spec, frozenset()) for spec in set(a.layer_pattern)]
    return [_dense_shapes(a, spec, unwidened_names(a, layer)) for layer, spec in enumerate(a.layers)]


def _dense_shapes(a: Architecture, spec: LayerSpec, but: frozenset[str]) -> list[tuple[int, int]]:
    left_out = {*OF_EXPERTS, LATENT_UP, *but}
    return [shape for name, shape in matrix_shapes(a, spec).items() if name not in left_out]


def unwidened_names(architecture: Architecture, layer: int) -> frozenset[str]:
    """Return the names of a layer's packed matrices that prefill multiplies as they are: by humming, or by tokens in
    FP8.
    """
    formats = layer_formats(architecture, layer).items()
    return frozenset(name for name, one in formats if one is not None and (one.humming or one.rounds_tokens))


def rounded(architecture: Architecture, asked: str | None, key: str) -> Architecture:
    """Return a shape whose matrices are rounded at load. asked: the value of setting `key`, a name of ROUNDED; with
    "bfloat16" or None matrices stay as they are.

    Raises ModelError if the checkpoint is quantised already.
    """
    if asked is None or asked == "bfloat16":
        if asked is not None and architecture.quantisation is not None:
            raise _is_quantised(architecture, asked, key)
        return architecture
    if architecture.quantisation is not None:
        raise _is_quantised(architecture, asked, key)
    shape = replace(architecture, quantisation=ROUNDED[asked])
    for layer in range(shape.num_layers):
        layer_formats(shape, layer)
    return shape


def _is_quantised(architecture: Architecture, asked: str, key: str) -> ModelError:
    scheme = architecture.quantisation and architecture.quantisation.scheme
    return ModelError(f"{key}: asked {asked}, {architecture.name} is quantised already ({scheme}); leave it out")


def _saved(architecture: Architecture, dtype_bytes: int, share: Callable[[Experts], float]) -> Iterator[float]:
    """Yield the bytes that each matrix saves compared with a plain one. share: the share of experts that counts."""
    if architecture.quantisation is None:
        return
    for layer, spec in enumerate(architecture.layers):
        shapes = matrix_shapes(architecture, spec)
        for name, stored in layer_formats(architecture, layer).items():
            rows, inner = shapes[name]
            if stored is None or name == LATENT_UP:
                continue
            counted = share(spec.experts) if name in OF_EXPERTS and spec.experts is not None else 1.0
            yield counted * (rows * inner * dtype_bytes - stored.num_bytes(rows, inner))
    output, vocab = output_format(architecture), architecture.logit_rows
    if output is not None:
        yield vocab * architecture.hidden * dtype_bytes - output.num_bytes(vocab, architecture.hidden)


def _layer_format(a: Architecture, quantisation: Quantisation, layer: int, matrix: str) -> MatrixFormat | None:
    spec = a.layers[layer]
    modules, (rows, inner) = list(module_names(a, layer, matrix).values()), matrix_shapes(a, spec)[matrix]
    if quantisation.matrices is not None:
        stored = quantisation.matrices[layer, matrix]
        if stored is None:
            return None
        return _multiplied(_fitting(stored, inner, modules[0]), quantisation, matrix, rows, inner)
    left = [bool(quantisation.plain) and quantisation.leaves(_names(module, a)) for module in modules]
    if any(left) and not all(left):
        plain, other = modules[left.index(True)], modules[left.index(False)]
        raise ModelError(
            f"model: {a.name}: {plain} is not quantised and {other} is; wanted both alike, since they are one product"
        )
    if all(left):
        return None
    stored = quantisation.layers
    if matrix == LATENT_UP and quantisation.scheme == "rounded":
        return None
    if stored.row_block > 1:
        is_moved = matrix == "qkv" and (
            a.has_neighbour_pairs or a.rotary_dim not in (None, a.dim) if spec.recurrent is None
            else spec.recurrent.is_grouped or spec.recurrent.is_mamba
        )  # fmt: skip
        parts = {rows for _, rows in matrix_parts(a, spec, matrix)}
        stored = replace(stored, row_block=1 if is_moved else math.gcd(stored.row_block, *parts))
    if stored.has_order and matrix in OF_EXPERTS:
        raise ModelError(
            f"model: {modules[0]} has columns in an order of its own (act-order), as each expert's are; of experts "
            "served: groups of neighbours"
        )
    return _multiplied(_fitting(stored, inner, modules[0]), quantisation, matrix, rows, inner)


def _multiplied(
    stored: MatrixFormat, quantisation: Quantisation, matrix: str, rows: int, inner: int
) -> MatrixFormat:  # fmt: skip
    """Return the format that the matrix has when it is multiplied."""
    is_ours = matrix in (*OF_EXPERTS, LATENT_UP)
    if is_ours:
        return stored
    if quantisation.humming and stored.why_not_humming(rows, inner) is None:
        return replace(stored, humming=True)
    if quantisation.rounds_tokens and stored.why_not_rounding(rows, inner) is None:
        return replace(stored, rounds_tokens=True)
    return stored


def _fitting(stored: MatrixFormat, inner: int, name: str) -> MatrixFormat:
    """Return the format. Raises ModelError unless rows of `inner` columns, and their groups, are whole words."""
    wanted = 8 if BITS[stored.kind] == 4 else 4
    for what, size in (("rows", inner), ("groups", stored.group or inner)):
        if size % wanted:
            raise ModelError(f"model: {name} in {stored.kind} has {what} of {size}; wanted a multiple of {wanted}")
    return stored


def _names(module: str, architecture: Architecture) -> tuple[str, ...]:
    """Return a module's canonical name, and its names in the family's checkpoints."""
    prefixes: Mapping[str, str] | Any = families()[architecture.family].prefixes
    return (module, *(old + module.removeprefix(new) for old, new in prefixes if module.startswith(new)))
