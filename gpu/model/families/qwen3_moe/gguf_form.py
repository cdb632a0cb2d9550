"""Qwen3-MoE in GGUF files. llama.cpp makes the weights of the experts that are taken sum to 1."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"moe_intermediate_size": keys.positive("expert_feed_forward_length"), "norm_topk_prob": True}


GGUF = GgufForm("qwen3moe", translate=translate, has_experts=True)
