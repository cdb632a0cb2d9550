"""Qwen3, dense: each head of queries and keys has a norm, of one weight for all heads."""

from gpu.model.answers.hermes import HERMES
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.families.qwen2 import QWEN_DEFAULTS, qwen_windows
from gpu.model.families.qwen3.shapes import SHAPES
from gpu.model.family import LAYER_TENSORS, QK_NORMS, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    return parse_sizes(keys, name, [LayerSpec(qk_norm=True, window_tokens=window) for window in qwen_windows(keys)])


FAMILY = Family(
    model_types=("qwen3",),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS | QK_NORMS,
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
    gguf=GgufForm("qwen3"),
    shapes=SHAPES,
    calls=(HERMES,),
    reasoning=(THINK,),
)
