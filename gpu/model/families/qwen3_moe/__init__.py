"""Qwen3-MoE: Qwen3 with a mixture of experts in each layer, or in every n-th, but not in those that are named."""

from functools import partial
from typing import Any

from gpu.model.answers.hermes import HERMES
from gpu.model.answers.qwen3_xml import QWEN3_XML
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.experts_config import parse_experts
from gpu.model.families.qwen2 import QWEN_DEFAULTS
from gpu.model.family import EXPERT_TENSORS, LAYER_TENSORS, QK_NORMS, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    num_layers = keys.positive("num_hidden_layers", int)
    window = keys.optional("sliding_window", int) if keys.flag("use_sliding_window") else None
    keys.get("sliding_window")
    windows = find_windows(keys, window, [True] * num_layers, parse_rope(keys)[1])
    experts = parse_experts(keys, "num_experts", "moe_intermediate_size", keys.flag("norm_topk_prob"))
    is_mixture, step = find_mixtures(keys, num_layers), keys.positive("decoder_sparse_step", int)
    specs = [
        LayerSpec(
            qk_norm=True,
            window_tokens=windows[layer],
            experts=experts if is_mixture[layer] and (layer + 1) % step == 0 else None,
        )
        for layer in range(num_layers)
    ]
    return parse_sizes(keys, name, specs)


def find_mixtures(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Return for each layer whether it may be a mixture by `mlp_only_layers`."""
    named = keys.get("mlp_only_layers") or []
    is_list = isinstance(named, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in named)
    if not is_list or any(not 0 <= one < num_layers for one in named):
        raise ModelError(
            f"model: {keys.source}: mlp_only_layers is {named!r}; wanted numbers of layers from 0 to {num_layers - 1}"
        )
    return [layer not in named for layer in range(num_layers)]


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"moe_intermediate_size": keys.positive("expert_feed_forward_length"), "norm_topk_prob": True}


# llama.cpp makes the weights of the experts that are taken sum to 1.
GGUF = GgufForm("qwen3moe", translate=translate_gguf, has_experts=True)

_shape = partial(published_sizes, model_type="qwen3_moe", head_dim=128, norm_topk_prob=True)
SHAPES = {
    "tiny-qwen3-moe": _shape(
        256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, mlp_only_layers=[1],
    ),
    "qwen3-30b-a3b": _shape(2048, 6144, 48, 32, 4, 151_936, 40_960, 1_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("qwen3_moe",),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS | EXPERT_TENSORS | QK_NORMS,
    defaults=QWEN_DEFAULTS | {
        "decoder_sparse_step": 1,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    harmless=frozenset({"max_window_layers", "output_router_logits", "router_aux_loss_coef"}),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(HERMES, QWEN3_XML),
    reasoning=(THINK,),
)  # fmt: skip
