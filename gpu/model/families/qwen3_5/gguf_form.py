"""Qwen3.5 in GGUF files, where value heads that share a key head are as many apart as there are key heads."""

from typing import Any

from gpu.model.families.qwen3_next.gguf_form import LISTED, OWN_NAMES, translate_recurrent
from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    keys.take("rope.dimension_sections")  # of pictures' positions
    return translate_recurrent(keys) | {"value_heads_are_tiled": True}


GGUF = GgufForm("qwen35", translate=translate, listed=LISTED, own_names=OWN_NAMES)
