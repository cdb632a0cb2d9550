"""Compute the sizes of what a decoder's layers need beside weights and KV: RoPE tables, activations, logits. No torch.

`tests/gpu/test_memory_peaks.py` compares the numbers of copies with what layers hold while they run.
"""

from gpu.model.architecture import Architecture, LayerSpec
from gpu.operations.recurrent.state_arrays import segment_bytes
from transfer.arrays import FLOATS, ArraySpec

HIDDEN_COPIES = 4  # of a token's hidden state: a layer's input, norms, output
LAYER_INPUT_COPIES = 4  # of a layer's extra inputs: projected, normed, from the table, their sum
BESIDE_COPIES = 4  # of a hidden state, where a layer has an MLP and experts: outputs and norms of both
QUERY_COPIES = 6  # arrays as wide as a query: rotated, attention's output in both precisions, its merge


def rope_array(dim: int, num_tokens: int) -> ArraySpec:
    """Return the array of cosines, `[tokens, dim / 2]`, of layers with one rotation; sines take another."""
    return ArraySpec((num_tokens, dim // 2), "float32")


def rope_bytes(architecture: Architecture, num_tokens: int) -> int:
    """Return the bytes of all layers' RoPE tables. Layers with the same rotation share one."""
    return 2 * sum(rope_array(dim, num_tokens).num_bytes for _, dim in architecture.ropes)


def logits_arrays(architecture: Architecture, num_rows: int, dtype_bytes: int, on_cuda: bool) -> dict[str, ArraySpec]:
    """Return the arrays of so many rows' logits, `[rows, vocab]`.

    narrow: on a CPU, the product before it is widened.
    """
    logits = ArraySpec((num_rows, architecture.vocab_size), "float32")
    if on_cuda or dtype_bytes >= 4:
        return {"logits": logits}
    return {"logits": logits, "narrow": ArraySpec(logits.shape, FLOATS[dtype_bytes])}


def gathered_logits_arrays(architecture: Architecture, num_rows: int) -> dict[str, ArraySpec]:
    """Return the arrays in which a split model's device joins the logits of all devices (`gpu.ranks`).

    parts: as they come, `[devices * rows, vocab / devices]`. joined: in order, `[rows, vocab]`.
    """
    logits = ArraySpec((num_rows, architecture.vocab_size), "float32")
    return {"parts": logits, "joined": logits}


def activation_bytes(
    architecture: Architecture, num_tokens: int, dtype_bytes: int, more_outputs: int, on_cuda: bool
) -> int:
    """Return the bytes of one layer's activations over so many tokens.

    These are input, norms and outputs, QKV, the rotated query, attention's output in both precisions and its merge,
    gate and up, and their product. more_outputs: further arrays as wide as a query, of attention and methods.
    """
    a = architecture
    hidden = HIDDEN_COPIES + any(spec.post_norms for spec in a.layer_pattern)
    mlp = max(mlp_columns(a, spec) for spec in a.layer_pattern)
    attention = max(_attention_columns(a, spec, more_outputs) for spec in a.layer_pattern)
    inputs = 0 if a.layer_inputs is None else LAYER_INPUT_COPIES * a.layer_inputs.width
    width = hidden * a.hidden + attention + mlp + inputs
    segment = 0 if a.recurrent is None else segment_bytes(a.recurrent, num_tokens, on_cuda)
    return ArraySpec((num_tokens, width), FLOATS[dtype_bytes]).num_bytes + segment


def _attention_columns(architecture: Architecture, spec: LayerSpec, more_outputs: int) -> int:
    """Return how many numbers attention makes of a token: QKV, and arrays as wide as a query.

    QKV counts twice where a part of it is copied out of the product.
    """
    if not spec.has_mixer:
        return 0
    if spec.recurrent is not None:
        own = spec.recurrent
        return 2 * (own.projected_width + own.gate_rows) + 2 * own.value_width
    latent = architecture.latent
    if latent is not None:
        count = architecture.num_heads
        query = count * latent.query_dim
        outputs = (QUERY_COPIES + more_outputs) * count * max(latent.query_dim, latent.value)
        return latent.first_columns(count) + latent.row + query + outputs
    heads = architecture.heads_of(spec)
    query = architecture.num_heads * heads.dim
    qkv = query + 2 * heads.count * heads.dim
    if spec.output_gate:
        return 2 * (qkv + query) + (QUERY_COPIES + 2 + more_outputs) * query
    normed = 2 * query * spec.wide_qk_norm  # its part of QKV, and what the norm makes of it
    return (1 + (spec.num_kv_projections < 2)) * qkv + normed + (QUERY_COPIES + more_outputs) * query


def mlp_columns(architecture: Architecture, spec: LayerSpec) -> int:
    """Return how many numbers an MLP makes of a token: gate, up and their product.

    For experts: product and output of each chosen expert, and the routing, whose logits are twice as wide as other
    numbers.
    """
    experts = spec.experts
    if not spec.has_mlp:
        return 0
    one = (2 + spec.is_gated) * architecture.intermediate_of(spec)
    if experts is None:
        return one
    beside = one + BESIDE_COPIES * architecture.hidden if experts.has_mlp else 0
    return beside + experts.per_token * (experts.intermediate + architecture.hidden + 16) + 2 * experts.num_experts
