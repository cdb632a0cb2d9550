"""Qwen3, dense: each head of queries and keys has a norm, of one weight for all heads."""

from functools import partial

from gpu.model.answers.hermes import HERMES
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.families.qwen2 import QWEN_DEFAULTS, qwen_windows
from gpu.model.family import LAYER_TENSORS, QK_NORMS, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    return parse_sizes(keys, name, [LayerSpec(qk_norm=True, window_tokens=window) for window in qwen_windows(keys)])


_shape = partial(published_sizes, model_type="qwen3", head_dim=128)
SHAPES = {
    "tiny-qwen3": _shape(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-1.7b": _shape(2048, 6144, 28, 16, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-8b": _shape(4096, 12_288, 36, 32, 8, 151_936, 40_960, 1_000_000.0),
    "qwen3-14b": _shape(5120, 17_408, 40, 40, 8, 151_936, 40_960, 1_000_000.0),
    "qwen3-32b": _shape(5120, 25_600, 64, 64, 8, 151_936, 40_960, 1_000_000.0),
}  # fmt: skip

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
