"""Llama in GGUF files. llama.cpp calls Mistral and Mixtral a Llama, too."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    tensors = keys.file.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


GGUF = GgufForm("llama", translate=translate, has_windows=True, has_neighbour_pairs=True)
