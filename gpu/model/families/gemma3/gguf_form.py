"""Gemma 3 in GGUF files."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys

_27B_LAYERS = 62  # by which llama.cpp tells the one whose queries are scaled by hidden / heads


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    is_large = config.get("num_hidden_layers") == _27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_large else config["head_dim"]
    return {"rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0), "query_pre_attn_scalar": scalar}


GGUF = GgufForm("gemma3", translate=translate, has_windows=True, merges_by_id=True)
