"""What graphs of layers take, and which layers have some (`gpu.prefill.layer_graphs`). No torch: plans count it."""

from collections.abc import Sequence

from gpu.layers.layer_arrays import activation_bytes
from gpu.model.spec import Architecture
from transfer.arrays import FLOATS, ArraySpec, sum_bytes

LAYER_GRAPH_BYTES = 2**19
"""Of the two graphs of a layer for one number of tokens; measured at 8B with their activations: 0.2 to 1.1 MiB."""


def layers_in_graphs(architecture: Architecture) -> list[int]:
    """Return the layers whose parts before and behind attention, or a recurrent state, get nothing of other layers
    beside hidden states, so that graphs hold them (`gpu.prefill.layer_graphs`).
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


def graph_arrays(architecture: Architecture, num_tokens: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return what graphs of layers read and write for units of up to so many tokens. wide: attention's output of a
    layer with sinks, which are merged in float32. mixed, gates, made: what a recurrent layer's state takes in, and what
    it gives.
    """
    a, dtype, own = architecture, FLOATS[dtype_bytes], architecture.recurrent
    query = a.num_heads * max(a.heads_of(spec).dim for spec in a.layer_pattern)
    has_sinks = any(spec.sinks for spec in a.layer_pattern)
    rows = {"hidden": a.hidden, "out": a.hidden, "query": query, "pre_rope_query": query, "attended": query}
    widths = (0, 0, 0) if own is None else (own.projected_width, own.gate_rows, own.value_width)
    rows |= dict(zip(("mixed", "gates", "made"), widths, strict=True))
    return {
        **{name: ArraySpec((num_tokens, columns), dtype) for name, columns in rows.items()},
        "wide": ArraySpec((num_tokens * has_sinks, query), "float32"),
        "lse": ArraySpec((num_tokens, a.num_heads), "float32"),
        "positions": ArraySpec((num_tokens,), "int64"),
        "cells": ArraySpec((num_tokens,), "int64"),
        "slots": ArraySpec((num_tokens,), "int32"),
    }


def layer_graphs_bytes(architecture: Architecture, sizes: Sequence[int], dtype_bytes: int) -> int:
    """Return the bytes of graphs of layers for units of these sizes: their buffers, one layer's activations in memory
    that all of them share, and the graphs themselves.
    """
    layers, most = layers_in_graphs(architecture), max(sizes, default=0)
    if not layers or not most:
        return 0
    shared = activation_bytes(architecture, most, dtype_bytes, 0, on_cuda=True)
    buffers = sum_bytes(graph_arrays(architecture, most, dtype_bytes).values())
    return buffers + shared + len(layers) * len(set(sizes)) * LAYER_GRAPH_BYTES
