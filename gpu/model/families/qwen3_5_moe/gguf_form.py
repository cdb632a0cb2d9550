"""Qwen3.5 with experts in GGUF files."""

from typing import Any

from gpu.model.families.qwen3_5.gguf_form import LISTED, OWN_NAMES
from gpu.model.families.qwen3_5.gguf_form import translate as translate_dense
from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return translate_dense(keys, config) | {
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
    }


GGUF = GgufForm("qwen35moe", translate=translate, has_experts=True, listed=LISTED, own_names=OWN_NAMES)
