"""Mistral in GGUF files: a Llama with windows. Without windows it is read as a Llama, which computes the same."""

from gpu.model.gguf.keys import GgufForm, GgufKeys


def is_mistral(keys: GgufKeys) -> bool:
    return keys.has("attention.sliding_window") and not keys.has("expert_count")


GGUF = GgufForm("llama", claims=is_mistral, has_windows=True, has_neighbour_pairs=True)
