"""Qwen3-Next in GGUF files: projections apart, or key head by key head as files had them first.

Gates of states are as in a checkpoint. Keys of recurrent layers are read here for Qwen3.5, too.
"""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys

OWN_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
LISTED = ("attention.head_count_kv",)


def translate_recurrent(keys: GgufKeys) -> dict[str, Any]:
    """Return what hybrids have. Raises ModelError for heads that guess tokens, and for sizes that contradict others."""
    if keys.number("nextn_predict_layers", 0):
        raise keys.refused("nextn_predict_layers", 1, "0: heads that guess tokens are not used; take a file without")
    keys.take("full_attention_interval")  # tensors say which layers attend
    value_heads, inner = keys.positive("ssm.time_step_rank"), keys.positive("ssm.inner_size")
    if inner % value_heads:
        raise keys.refused("ssm.inner_size", inner, f"a multiple of {value_heads}, ssm.time_step_rank")
    is_recurrent = [f"blk.{layer}.ssm_a" in keys.file.tensors for layer in range(keys.num_layers)]
    return {
        "num_key_value_heads": keys.positive_of_some("attention.head_count_kv"),
        "layer_types": ["linear_attention" if own else "full_attention" for own in is_recurrent],
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
    }


def translate_experts(keys: GgufKeys) -> dict[str, Any]:
    """Return the sizes of experts."""
    return {
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
    }


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    is_apart = any(name.endswith(".attn_gate.weight") for name in keys.file.tensors)
    return translate_recurrent(keys) | translate_experts(keys) | {"projections_are_apart": is_apart}


GGUF = GgufForm("qwen3next", translate=translate, has_experts=True, listed=LISTED, own_names=OWN_NAMES)
