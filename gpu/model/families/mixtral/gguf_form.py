"""Mixtral in GGUF files: a Llama with experts."""

from gpu.model.gguf.keys import GgufForm, GgufKeys


def is_mixtral(keys: GgufKeys) -> bool:
    return keys.has("expert_count")


GGUF = GgufForm("llama", claims=is_mixtral, has_experts=True, has_neighbour_pairs=True)
