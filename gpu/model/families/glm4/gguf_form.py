"""GLM-4 in GGUF files."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys

_NEXT_SPEAKER = frozenset({"<|user|>", "<|observation|>"})  # which ends a turn


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


GGUF = GgufForm("glm4", translate=translate, end_tokens=_NEXT_SPEAKER)
