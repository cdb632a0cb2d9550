"""What the layers of a decoder take beside weights and KV: rotation tables, and one layer's activations. No torch.

`tests/gpu/test_memory_peaks.py` compares the numbers of copies with what layers hold while they run.
"""

from gpu.model.architecture import Architecture, LayerSpec
from transfer.arrays import FLOATS, ArraySpec

HIDDEN_COPIES = 4  # of a token's hidden state: a layer's input, norms, output
QUERY_COPIES = 6  # as wide as a query: rotated, attention's output in both precisions, its merge


def rope_array(architecture: Architecture, num_tokens: int) -> ArraySpec:
    """Return the cosines, `[tokens, dim / 2]`, of layers with one rotation; sines are alike."""
    return ArraySpec((num_tokens, architecture.dim // 2), "float32")


def rope_bytes(architecture: Architecture, num_tokens: int) -> int:
    """Return the bytes of the tables of all layers, which share those of the same rotation."""
    return 2 * len(architecture.ropes) * rope_array(architecture, num_tokens).num_bytes


def activation_bytes(architecture: Architecture, num_tokens: int, dtype_bytes: int, more_outputs: int) -> int:
    """Return the bytes of one layer over so many tokens: input, norms and outputs, QKV, the rotated query, attention's
    output in both precisions and its merge, gate and up, their product. more_outputs: of attention and of methods, as
    wide as a query.
    """
    a = architecture
    query = a.num_heads * a.dim
    hidden = HIDDEN_COPIES + any(spec.post_norms for spec in a.layer_pattern)
    mlp = max(_mlp_columns(a, spec) for spec in a.layer_pattern)
    qkv = query + 2 * a.num_kv_heads * a.dim
    width = hidden * a.hidden + qkv + (QUERY_COPIES + more_outputs) * query + mlp
    return ArraySpec((num_tokens, width), FLOATS[dtype_bytes]).num_bytes


def _mlp_columns(architecture: Architecture, spec: LayerSpec) -> int:
    """Return the columns of a token's gate and up and their product; of experts, of each one's product and what it
    makes of it, and of routing: logits, twice as long as other numbers, and who takes whom.
    """
    experts = spec.experts
    if experts is None:
        return 3 * architecture.intermediate
    return experts.per_token * (experts.intermediate + architecture.hidden + 16) + 2 * experts.num_experts
