"""gpt-oss: attention with sinks and biases, every other layer with a window, and a mixture of experts with biases.

All experts of a layer stand in one tensor, whose rows of gate and up come in turns; GGUF files have them apart.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.experts_config import parse_experts
from gpu.model.families.gpt_oss.answers import HARMONY, HARMONY_ANALYSIS
from gpu.model.family import (
    LAYER_TENSORS,
    OUTPUT_BIAS,
    QKV_BIASES,
    SINKS,
    Family,
    StackLayout,
    find_windows,
    parse_sizes,
)
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec
from transfer.model_constants import CLAMPED_GAIN, CLAMPED_LIMIT

_ROUTER = {"mlp.router.weight": "router", "mlp.router.bias": "router_bias"}
_STACKED = {
    "mlp.experts.gate_up_proj": "experts_gate_up",
    "mlp.experts.gate_up_proj_bias": "experts_gate_up_bias",
    "mlp.experts.down_proj": "experts_down",
    "mlp.experts.down_proj_bias": "experts_down_bias",
}
_APART = {
    "mlp.experts.*.gate_proj.weight": "gate",
    "mlp.experts.*.gate_proj.bias": "gate_bias",
    "mlp.experts.*.up_proj.weight": "up",
    "mlp.experts.*.up_proj.bias": "up_bias",
    "mlp.experts.*.down_proj.weight": "down",
    "mlp.experts.*.down_proj.bias": "down_bias",
}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", True)
    keys.only("swiglu_alpha", CLAMPED_GAIN)
    keys.only("swiglu_limit", CLAMPED_LIMIT)
    num_layers = keys.positive("num_hidden_layers", int)
    is_window_layer = [layer % 2 == 0 for layer in range(num_layers)]
    windows = find_windows(keys, keys.optional("sliding_window", int), is_window_layer, parse_rope(keys)[1])
    experts = replace(parse_experts(keys, "num_local_experts", "intermediate_size", True), has_biases=True)
    specs = [
        LayerSpec(qkv_bias=True, output_bias=True, activation="clamped_swiglu", window_tokens=window, experts=experts,
                  sinks=True)
        for window in windows
    ]  # fmt: skip
    return parse_sizes(keys, name, specs)


def tensors(shape: Architecture) -> dict[str, str]:
    attention = {name: what for name, what in LAYER_TENSORS.items() if not name.startswith("mlp.")}
    experts = _APART if shape.experts_apart else _STACKED
    return attention | QKV_BIASES | OUTPUT_BIAS | SINKS | _ROUTER | experts


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Add what files do not state: the bounds of YaRN's ramp are not rounded to whole dimensions."""
    size = keys.size("expert_feed_forward_length", 1)
    found: dict[str, Any] = {} if size is None else {"intermediate_size": size}
    scaling = config.get("rope_scaling", {})
    return found | ({"rope_scaling": scaling | {"truncate": False}} if scaling.get("rope_type") == "yarn" else {})


# Each expert's gate and up are apart in GGUF files.
GGUF = GgufForm(
    "gpt-oss", translate=translate_gguf, has_experts=True, has_windows=True,
    end_tokens=frozenset({"<|return|>", "<|call|>"}), inner_tokens=frozenset({"<|end|>"}),
)  # fmt: skip

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip

_shape = partial(published_sizes, model_type="gpt_oss", head_dim=64, rope_scaling=YARN)
SHAPES = {
    "tiny-gpt-oss": _shape(
        256, 128, 4, 8, 2, 1024, 131_072, 150_000.0, num_local_experts=8, num_experts_per_tok=4, sliding_window=64
    ),
    "gpt-oss-20b": _shape(
        2880, 2880, 24, 64, 8, 201_088, 131_072, 150_000.0, num_local_experts=32, quantization_config=MXFP4
    ),
    "gpt-oss-120b": _shape(
        2880, 2880, 36, 64, 8, 201_088, 131_072, 150_000.0, num_local_experts=128, quantization_config=MXFP4
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("gpt_oss",),
    parse=parse,
    tensors=tensors,
    defaults={
        "head_dim": 64,
        "intermediate_size": 2880,
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    },
    harmless=frozenset(  # of training, and names of old code for keys that stand beside them
        {"experts_per_token", "initial_context_length", "output_router_logits", "router_aux_loss_coef"}
    ),
    stacks=StackLayout(is_transposed=True, is_interleaved=True),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(HARMONY,),
    reasoning=(HARMONY_ANALYSIS,),
)
