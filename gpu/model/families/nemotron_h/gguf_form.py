"""Nemotron-H in GGUF files: tensors say what each layer is, and how wide its MLP."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.mamba_gguf import LISTED, is_mamba, mamba_names, read_mamba

_SIGMOID = 2  # of `expert_gating_func`
_NAMES = {
    "norm.weight": "attn_norm.weight",
    "mixer.q_proj.weight": "attn_q.weight",
    "mixer.k_proj.weight": "attn_k.weight",
    "mixer.v_proj.weight": "attn_v.weight",
    "mixer.o_proj.weight": "attn_output.weight",
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
    "mixer.gate.weight": "ffn_gate_inp.weight",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.*.up_proj.weight": "ffn_up_exps.weight",
    "mixer.experts.*.down_proj.weight": "ffn_down_exps.weight",
    "mixer.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mixer.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
} | mamba_names("mixer")


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a Nemotron-H. Raises ModelError for experts of a latent, and sizes that contradict others."""
    num_layers = keys.num_layers - keys.count_heads()
    latent = keys.number("moe_latent_size", 0)
    if latent:
        raise keys.refused("moe_latent_size", latent, "0: experts of a latent are not served")
    dim = keys.positive("attention.key_length")
    value_dim = keys.size("attention.value_length", 1) or dim
    if value_dim != dim:
        raise keys.refused("attention.value_length", value_dim, f"as many as keys have, {dim}")
    for unused in ("rope.dimension_count", "feed_forward_length", "attention.layer_norm_epsilon"):
        keys.take(unused)  # nothing is rotated, tensors say how wide they are, and norms have no means
    kinds, own = [_kind(keys, layer) for layer in range(num_layers)], read_mamba(keys)
    found = {
        "num_hidden_layers": num_layers,
        "layers_block_type": kinds,
        "head_dim": dim,
        "num_key_value_heads": keys.positive_of_some("attention.head_count_kv"),
        "layer_norm_epsilon": config.get("rms_norm_eps"),
        "mamba_num_heads": own.heads,
        "mamba_head_dim": own.dim,
        "n_groups": own.groups,
        "ssm_state_size": own.state,
        "conv_kernel": own.conv_tokens,
    }
    if "mlp" in kinds:
        found["intermediate_size"] = keys.file.tensors[f"blk.{kinds.index('mlp')}.ffn_up.weight"].shape[0]
    return found | (_experts(keys) if "moe" in kinds else {})


def _kind(keys: GgufKeys, layer: int) -> str:
    """Return what a layer is. Raises ModelError where it is none of them."""
    if is_mamba(keys, layer):
        return "mamba"
    known = {"attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    for name, kind in known.items():
        if f"blk.{layer}.{name}.weight" in keys.file.tensors:
            return kind
    raise keys.refused("block_count", keys.num_layers, f"layers that are something, which blk.{layer} is not")


def _experts(keys: GgufKeys) -> dict[str, Any]:
    gating = keys.number("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise keys.refused("expert_gating_func", gating, f"{_SIGMOID}, sigmoids")
    return {
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
        "n_shared_experts": keys.positive("expert_shared_count"),
        "norm_topk_prob": bool(keys.take("expert_weights_norm", True)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "n_group": keys.size("expert_group_count", 0) or 1,
        "topk_group": keys.size("expert_group_used_count", 0) or 1,
    }


GGUF = GgufForm(
    "nemotron_h_moe", others=("nemotron_h",), translate=translate, has_experts=None, has_neighbour_pairs=True,
    listed=(*LISTED, "feed_forward_length", "attention.key_length"), own_names=_NAMES,
)  # fmt: skip
