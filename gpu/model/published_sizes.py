"""Read the sizes that most published configurations state, by the keys of a `config.json`."""

from typing import Any


def published_sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int,
                    theta: float, **more: Any) -> dict[str, Any]:  # fmt: skip
    """Return these sizes by their keys, and further keys as they are."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": theta,
    } | more
