"""GLM-4 (0414): half of each head is rotated, in pairs of neighbours; biases; norms behind attention and MLP, too."""

from functools import partial
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.families.glm4.answers import GLM4_CALLS
from gpu.model.family import LAYER_TENSORS, QKV_BIASES, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("mlp_bias", False)
    spec = LayerSpec(qkv_bias=keys.flag("attention_bias"), post_norms=True)
    return parse_sizes(keys, name, (spec,), rotates_part=True, has_neighbour_pairs=True)


def tensors(shape: Architecture) -> dict[str, str]:
    names = {name: what for name, what in LAYER_TENSORS.items() if what not in ("gate", "up")} | {
        "mlp.gate_up_proj.weight": "gate_up",
        "post_self_attn_layernorm.weight": "attention_post_norm",
        "post_mlp_layernorm.weight": "mlp_post_norm",
    }
    return names | QKV_BIASES if shape.layer_pattern[0].qkv_bias else names


_NEXT_SPEAKER = frozenset({"<|user|>", "<|observation|>"})  # which ends a turn


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


GGUF = GgufForm("glm4", translate=translate_gguf, end_tokens=_NEXT_SPEAKER)

_shape = partial(published_sizes, model_type="glm4", rms_norm_eps=1e-5)
SHAPES = {
    "tiny-glm4": _shape(256, 512, 4, 16, 1, 1024, 262_144, 10_000.0, head_dim=64),
    "glm-4-9b": _shape(4096, 13_696, 40, 32, 2, 151_552, 32_768, 10_000.0, attention_bias=True),
    "glm-4-32b": _shape(6144, 23_040, 61, 48, 2, 151_552, 32_768, 10_000.0, attention_bias=False),
}  # fmt: skip

FAMILY = Family(
    model_types=("glm4",),
    parse=parse,
    tensors=tensors,
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10_000.0,
    },
    gguf=GGUF,
    shapes=SHAPES,
    calls=(GLM4_CALLS,),
)
