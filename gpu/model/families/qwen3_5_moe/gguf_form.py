"""Qwen3.5 with experts in GGUF files."""

from typing import Any

from gpu.model.families.qwen3_5.gguf_form import translate as translate_dense
from gpu.model.families.qwen3_next.gguf_form import LISTED, OWN_NAMES, translate_experts
from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return translate_dense(keys, config) | translate_experts(keys)


GGUF = GgufForm("qwen35moe", translate=translate, has_experts=True, listed=LISTED, own_names=OWN_NAMES)
