"""Granite 4.0 hybrids in GGUF files, llama.cpp's `granitehybrid`: each expert's gate and up apart, as MLPs'."""

from typing import Any

from gpu.model.families.granite.gguf_form import translate as translate_multipliers
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.mamba_gguf import LISTED, is_mamba, mamba_names, read_mamba


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    own, hidden = read_mamba(keys), config.get("hidden_size") or 1
    if own.inner % hidden:
        raise keys.refused("ssm.inner_size", own.inner, f"a multiple of {hidden}, embedding_length")
    return translate_multipliers(keys, config) | {
        "num_key_value_heads": keys.positive_of_some("attention.head_count_kv"),
        "layers_block_type": ["mamba" if is_mamba(keys, layer) else "attention" for layer in range(keys.num_layers)],
        "position_embedding_type": "rope" if keys.take("rope.scaling.finetuned", False) else "nope",  # as llama.cpp
        "num_local_experts": config.get("num_experts", 0),
        "shared_intermediate_size": keys.size("expert_shared_feed_forward_length", 1) or config["intermediate_size"],
        "mamba_n_heads": own.heads,
        "mamba_n_groups": own.groups,
        "mamba_d_head": own.dim,
        "mamba_d_state": own.state,
        "mamba_d_conv": own.conv_tokens,
        "mamba_expand": own.inner // hidden,
    }


GGUF = GgufForm(
    "granitehybrid", translate=translate, has_experts=None, has_neighbour_pairs=True, listed=LISTED,
    own_names=mamba_names("mamba"),
)  # fmt: skip
