"""List the buffers of layer graphs, and the layers that have graphs (`gpu.prefill.layer_graphs`).

Has no torch, so that memory plans can count them.
"""

from collections.abc import Sequence

from gpu.layers.layer_arrays import HIDDEN_COPIES, mlp_columns
from gpu.model.spec import Architecture, LayerSpec
from transfer.arrays import FLOATS, ArraySpec, sum_bytes

SHARED_MEMORY_ROOM = 1.25  # a block that one layer has freed may not fit another layer's
LAYER_GRAPH_BYTES = 2**19
"""Of the two graphs of a layer for one number of tokens; measured at 8B with their activations: 0.2 to 1.1 MiB."""


def layers_in_graphs(architecture: Architecture) -> list[int]:
    """Return the layers that CUDA graphs can hold (`gpu.prefill.layer_graphs`).

    Around its attention or recurrent state, such a layer gets nothing from other layers but hidden states.
    """
    a = architecture
    if a.latent is not None or a.layer_inputs is not None:
        return []
    carrying = {*a.kept_layers, *(layer for layer, spec in enumerate(a.layers) if spec.kv_of is not None)}
    return [
        layer
        for layer, spec in enumerate(a.layers)
        if (spec.attends or spec.recurrent is not None) and layer not in carrying and layer < a.main_layers
    ]


def between_widths(architecture: Architecture) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return how many numbers of a token go from a layer's first graph to its second, as two triples.

    First, for attention: the query after RoPE, the query before it, and attention's output. Second, for a recurrent
    layer: what its state takes in, the gates, and what it returns.
    """
    a, own = architecture, architecture.recurrent
    query = a.num_heads * max(a.heads_of(spec).dim for spec in a.layer_pattern)
    recurrent = (0, 0, 0) if own is None else (own.projected_width, own.gate_rows, own.value_width)
    return (query, query, query), recurrent


def graph_arrays(architecture: Architecture, num_tokens: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return the arrays that layer graphs read and write, for units of up to so many tokens.

    between: as in `between_widths`, for one kind of layers at a time. wide: attention's output in a layer with sinks,
    which are merged in float32.
    """
    a, dtype = architecture, FLOATS[dtype_bytes]
    attention, recurrent = between_widths(a)
    has_sinks = any(spec.sinks for spec in a.layer_pattern)
    return {
        "hidden": ArraySpec((num_tokens, a.hidden), dtype),
        "between": ArraySpec((num_tokens, max(sum(attention), sum(recurrent))), dtype),
        "wide": ArraySpec((num_tokens * has_sinks, attention[0]), "float32"),
        "lse": ArraySpec((num_tokens, a.num_heads), "float32"),
        "positions": ArraySpec((num_tokens,), "int64"),
        "cells": ArraySpec((num_tokens,), "int64"),
        "slots": ArraySpec((num_tokens,), "int32"),
    }


def layer_graphs_bytes(architecture: Architecture, sizes: Sequence[int], dtype_bytes: int) -> int:
    """Return the bytes of layer graphs for units of these sizes.

    These are the buffers, one graph's activations, whose memory all graphs share, and the graphs themselves.
    """
    layers, most = layers_in_graphs(architecture), max(sizes, default=0)
    if not layers or not most:
        return 0
    width = max(captured_columns(architecture, architecture.layers[layer]) for layer in layers)
    shared = int(SHARED_MEMORY_ROOM * ArraySpec((most, width), FLOATS[dtype_bytes]).num_bytes)
    buffers = sum_bytes(graph_arrays(architecture, most, dtype_bytes).values())
    return buffers + shared + len(layers) * len(set(sizes)) * LAYER_GRAPH_BYTES


def captured_columns(architecture: Architecture, spec: LayerSpec) -> int:
    """Return how many numbers of a token a layer's graph holds at once: the larger count of its two graphs.

    Before attention: the norm, QKV, which counts twice where a part of it is copied out, and the rotated query. Before
    a state: the norm and its projection. After either: the MLP with hidden states, and the input of the output matrix
    with its gates.
    """
    a, own = architecture, spec.recurrent
    if own is not None:
        before, rows = a.hidden + own.projected_width + own.gate_rows, own.value_width
    else:
        heads = a.heads_of(spec)
        rows = a.num_heads * heads.dim
        qkv = rows + 2 * heads.count * heads.dim
        before = a.hidden + 2 * qkv + rows + 4 * rows * spec.output_gate + 2 * rows * spec.wide_qk_norm
    hidden = HIDDEN_COPIES + any(one.post_norms for one in a.layer_pattern)
    return max(before, hidden * a.hidden + mlp_columns(a, spec) + 2 * rows)
