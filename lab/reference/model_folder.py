"""Write and read the model as a Hugging Face folder.

The invariant: a written and read model has the same weights, rounded to bf16. Every file of the folder is complete
before it gets its name.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.reference.model import EPSILON, ROPE_BASE, Llama, Shape
from lab.reference.reference_tokenizer import SETTINGS, TOKENIZER
from lab.reference.spelling import BEGIN, END, END_OF_TEXT

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
WEIGHTS = "model.safetensors"


def configuration(shape: Shape) -> dict[str, Any]:
    """Return the folder's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_BASE,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BEGIN,
        "eos_token_id": [END_OF_TEXT, END],
        "torch_dtype": "bfloat16",
    }


def named_tensors(model: Llama) -> dict[str, Tensor]:
    """Return weights by their names in the folder, bf16 on the host."""
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    for ours, theirs in LAYER_NAMES.items():
        for layer, weight in enumerate(getattr(model, ours)):
            tensors[f"model.layers.{layer}.{theirs}.weight"] = weight
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def write_folder(model: Llama, tokenizer_folder: Path, folder: Path, card: str) -> None:
    """Write config, weights, tokenizer and model card. Existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TOKENIZER, SETTINGS):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    texts = {
        "config.json": json.dumps(configuration(model.shape), indent=1),
        "generation_config.json": json.dumps(
            {"bos_token_id": BEGIN, "eos_token_id": [END_OF_TEXT, END], "do_sample": False}, indent=1
        ),
        "README.md": card,
    }
    for name, text in texts.items():
        (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    partial = folder / f"{WEIGHTS}.partial"
    save_file(named_tensors(model), partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)


def read_shape(folder: Path) -> Shape:
    """Return the shape that a folder's config.json states."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Shape(
        config["vocab_size"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["max_position_embeddings"],
    )


def read_weights(model: Llama, folder: Path) -> None:
    """Fill the model from a folder of the same shape. Raises ValueError if the shapes differ."""
    if read_shape(folder) != model.shape:
        raise ValueError(f"{folder}: holds {read_shape(folder)}, wanted {model.shape}; resume with the same --shape")
    tensors = load_file(folder / WEIGHTS)
    with torch.no_grad():
        model.embedding.copy_(tensors["model.embed_tokens.weight"])
        model.final_norm.copy_(tensors["model.norm.weight"])
        for ours, theirs in LAYER_NAMES.items():
            layers = [tensors[f"model.layers.{layer}.{theirs}.weight"] for layer in range(model.shape.layers)]
            getattr(model, ours).copy_(torch.stack(layers))
