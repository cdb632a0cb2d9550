"""Granite in GGUF files."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read the multipliers; as in llama.cpp one that is 0 or absent is none, of attention that of its head."""
    return {
        "attention_multiplier": keys.number("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale") or 1.0,
        "residual_multiplier": keys.number("residual_scale") or 1.0,
        "logits_scaling": keys.number("logit_scale") or 1.0,
    }


GGUF = GgufForm("granite", translate=translate, has_neighbour_pairs=True)
