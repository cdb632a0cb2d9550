"""Which matrix of a model is stored how: a format, or None for a plain one, and all their bytes. No torch.

It refuses to know files beyond the names of their modules. Invariant: the parts of a fused matrix are stored alike; a
checkpoint in which they are not is refused by name.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpu.model.family import families
from gpu.model.matrix_format import ROUNDED, MatrixFormat, Quantisation
from gpu.model.spec import Architecture, ModelError

WIDENED_BYTES = 512 * 2**20

# A layer's matrices, and what of `gpu.model.family.LAYER_TENSORS` they are made of, in the order of their rows.
PARTS = {"qkv": ("query", "key", "value"), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}


def matrix_shapes(a: Architecture) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's matrices."""
    query = a.num_heads * a.dim
    return {
        "qkv": (query + 2 * a.num_kv_heads * a.dim, a.hidden),
        "output": (a.hidden, query),
        "gate_up": (2 * a.intermediate, a.hidden),
        "down": (a.hidden, a.intermediate),
    }


def part_rows(a: Architecture, matrix: str) -> list[int]:
    """Of a matrix's parts."""
    if matrix == "qkv":
        return [a.num_heads * a.dim, a.num_kv_heads * a.dim, a.num_kv_heads * a.dim]
    return [a.intermediate] * 2 if matrix == "gate_up" else [a.hidden]


def layer_formats(architecture: Architecture, layer: int) -> dict[str, MatrixFormat | None]:
    """By name of `gpu.model.weights.LayerWeights`. Raises ModelError for parts that differ, and for rows that are no
    whole words.
    """
    quantisation = architecture.quantisation
    if quantisation is None:
        return dict.fromkeys(PARTS)
    return {name: _layer_format(architecture, quantisation, layer, name) for name in PARTS}


def output_format(architecture: Architecture) -> MatrixFormat | None:
    """Of the output matrix."""
    quantisation = architecture.quantisation
    if quantisation is None or architecture.tied_embeddings or quantisation.leaves(_names("lm_head", architecture)):
        return None
    return _fitting(quantisation.output, architecture.hidden, "lm_head") if quantisation.output else None


def module_names(architecture: Architecture, layer: int, matrix: str) -> dict[str, str]:
    """What a matrix is made of in a checkpoint: a part, or the matrix whole, and the canonical name of its module."""
    found = {}
    for name, what in families()[architecture.family].tensors(architecture).items():
        if what == matrix or what in PARTS[matrix]:
            found[what] = f"model.layers.{layer}.{name.removesuffix('.weight')}"
    return found


def weight_bytes(architecture: Architecture, dtype_bytes: int, is_packed: bool) -> int:
    """Of all weights. is_packed: whether matrices stay as they are stored, as they do on a GPU."""
    saved = sum(_saved(architecture, dtype_bytes)) if is_packed else 0
    return architecture.num_weights * dtype_bytes - saved


def step_weight_bytes(architecture: Architecture, dtype_bytes: int, is_packed: bool) -> int:
    """What a decode step reads of them: everything but the input embedding, of which it takes a row a token."""
    saved = sum(_saved(architecture, dtype_bytes)) if is_packed else 0
    return architecture.num_weights_read_per_token * dtype_bytes - saved


def describe_formats(architecture: Architecture) -> str:
    """Of a quantised one, in a few words."""
    assert architecture.quantisation is not None, "a plain model has no formats"
    if architecture.quantisation.note is not None:
        return architecture.quantisation.note
    layers, output = architecture.quantisation.layers, output_format(architecture)
    groups = "rows" if layers.group is None else f"groups of {layers.group}"
    return f"{layers.kind} in {groups}, output matrix {output.kind if output else 'plain'}"


def widened_bytes(architecture: Architecture, dtype_bytes: int) -> int:
    """Of the matrices of few bits that prefill keeps widened: a layer's, or as many as WIDENED_BYTES hold, but the
    largest in any case; 0 where all are plain.
    """
    if architecture.quantisation is None:
        return 0
    sizes = [rows * inner * dtype_bytes for rows, inner in matrix_shapes(architecture).values()]
    return max(max(sizes), min(sum(sizes), WIDENED_BYTES))


def rounded(architecture: Architecture, asked: str | None, key: str) -> Architecture:
    """With matrices rounded at load as `key` asks: a name of ROUNDED, "bfloat16" or None, both for as they are.

    Raises ModelError where a checkpoint is quantised already.
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


def _saved(architecture: Architecture, dtype_bytes: int) -> Iterator[int]:
    """Bytes that each matrix takes less than a plain one."""
    if architecture.quantisation is None:
        return
    shapes = matrix_shapes(architecture)
    for layer in range(architecture.num_layers):
        for name, stored in layer_formats(architecture, layer).items():
            rows, inner = shapes[name]
            if stored is not None:
                yield rows * inner * dtype_bytes - stored.num_bytes(rows, inner)
    output, vocab = output_format(architecture), architecture.vocab_size
    if output is not None:
        yield vocab * architecture.hidden * dtype_bytes - output.num_bytes(vocab, architecture.hidden)


def _layer_format(a: Architecture, quantisation: Quantisation, layer: int, matrix: str) -> MatrixFormat | None:
    modules = list(module_names(a, layer, matrix).values())
    if quantisation.matrices is not None:
        stored = quantisation.matrices[layer, matrix]
        return None if stored is None else _fitting(stored, matrix_shapes(a)[matrix][1], modules[0])
    left = [quantisation.leaves(_names(module, a)) for module in modules]
    if any(left) and not all(left):
        plain, other = modules[left.index(True)], modules[left.index(False)]
        raise ModelError(f"model: {a.name}: {plain} is left plain and {other} is not; one product wants them alike")
    if all(left):
        return None
    stored = quantisation.layers
    if stored.row_block > 1:
        is_moved = matrix == "qkv" and (a.is_interleaved or a.rotary_dim not in (None, a.dim))
        stored = replace(stored, row_block=1 if is_moved else math.gcd(stored.row_block, *part_rows(a, matrix)))
    return _fitting(stored, matrix_shapes(a)[matrix][1], modules[0])


def _fitting(stored: MatrixFormat, inner: int, name: str) -> MatrixFormat:
    """Raises ModelError where a row of `inner` columns, or a group of it, is not of whole words."""
    wanted = 8 if stored.kind == "int4" else 4
    for what, size in (("rows", inner), ("groups", stored.group or inner)):
        if size % wanted:
            raise ModelError(f"model: {name} in {stored.kind} has {what} of {size}; wanted a multiple of {wanted}")
    return stored


def _names(module: str, architecture: Architecture) -> tuple[str, ...]:
    """Canonical, and as the family's checkpoints may have it."""
    prefixes: Mapping[str, str] | Any = families()[architecture.family].prefixes
    return (module, *(old + module.removeprefix(new) for old, new in prefixes if module.startswith(new)))
