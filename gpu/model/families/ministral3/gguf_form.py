"""Ministral 3 in GGUF files, by the name of the models that see pictures, too."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read how queries grow, and YaRN's factor of attention: llama.cpp's `mscale` is 1, `mscale_all_dim` the file's.

    As there, queries grow by the positions before YaRN, unless the file says by how many.
    """
    scaling: dict[str, Any] = config.get("rope_scaling") or {"rope_type": "default"}
    original = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    tokens = keys.size("attention.temperature_length", 1)
    if tokens not in (None, original):
        raise keys.refused("attention.temperature_length", tokens, f"{original}, the positions before YaRN")
    of_all = keys.number("rope.scaling.yarn_log_multiplier")
    if of_all and scaling["rope_type"] != "yarn":
        raise keys.refused("rope.scaling.yarn_log_multiplier", of_all, f"0 beside {scaling['rope_type']!r}")
    growth = {
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
        "original_max_position_embeddings": original,
    }
    return {"rope_scaling": scaling | growth | ({"mscale": 1.0, "mscale_all_dim": of_all} if of_all else {})}


GGUF = GgufForm("mistral3", translate=translate, has_neighbour_pairs=True)
