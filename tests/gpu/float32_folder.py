"""Write a Hugging Face folder in float32 from a Llama's GGUF file: the oracle's copy of a real model.

It reads the file with llama.cpp's `gguf` package and shares no code with the project's reader. Names, the order of a
Llama's query and key rows and the configuration are spelled out from llama.cpp's converter.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import save_file
from torch import from_numpy

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
OF_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
LAYER = re.compile(r"blk\.(\d+)\.(\w+)")


def write_folder(file: Path, folder: Path) -> None:
    """Write config.json and model.safetensors. Raises AssertionError for a file that is no plain Llama."""
    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama", "oracle: of Llamas alone"
    assert not any(".rope.scaling" in name for name in fields), "oracle: RoPE is plain"
    config = config_of(fields, [tensor.name for tensor in reader.tensors])
    tensors = {}
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        numbers = numbers.reshape([int(size) for size in tensor.shape[::-1]])
        stem, end = tensor.name.rsplit(".", 1)
        if stem.endswith((".attn_q", ".attn_k")):
            heads = config["num_attention_heads" if stem.endswith("q") else "num_key_value_heads"]
            numbers = halves_apart(numbers, heads)
        tensors[f"{name_of(stem)}.{end}"] = from_numpy(np.ascontiguousarray(numbers))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of heads whose rotated pairs lie side by side with first halves in front of second ones."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def name_of(stem: str) -> str:
    """`blk.3.attn_q` -> `model.layers.3.self_attn.q_proj`."""
    found = LAYER.fullmatch(stem)
    return WHOLE[stem] if found is None else f"model.layers.{found[1]}.{OF_LAYER[found[2]]}"


def config_of(fields: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the folder's config.json."""
    own = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    heads = own["attention.head_count"]
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "vocab_size": own["vocab_size"],
        "hidden_size": own["embedding_length"], "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"], "num_attention_heads": heads,
        "num_key_value_heads": own["attention.head_count_kv"], "head_dim": own["embedding_length"] // heads,
        "max_position_embeddings": own["context_length"], "rope_theta": own["rope.freq_base"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"], "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }  # fmt: skip
