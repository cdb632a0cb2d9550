"""Qwen2 and Qwen2.5: queries, keys and values have biases; the last layers may have a window."""

from functools import partial

from gpu.model.answers.hermes import HERMES
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.family import LAYER_TENSORS, QKV_BIASES, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("use_mrope", False)
    return parse_sizes(keys, name, [LayerSpec(qkv_bias=True, window_tokens=window) for window in qwen_windows(keys)])


def qwen_windows(keys: ConfigKeys) -> list[int | None]:
    """Return each layer's window: from `max_window_layers` on, if windows are used at all."""
    num_layers = keys.positive("num_hidden_layers", int)
    first = keys.optional("max_window_layers", int) if keys.get("max_window_layers") is not None else num_layers
    window = keys.optional("sliding_window", int) if keys.flag("use_sliding_window") else None
    keys.get("sliding_window")
    return find_windows(keys, window, [layer >= (first or 0) for layer in range(num_layers)], parse_rope(keys)[1])


QWEN_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "use_sliding_window": False,
}

_shape = partial(published_sizes, model_type="qwen2")
SHAPES = {
    "tiny-qwen2": _shape(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0),
    "qwen2.5-0.5b": _shape(896, 4864, 24, 14, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-1.5b": _shape(1536, 8960, 28, 12, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-3b": _shape(2048, 11_008, 36, 16, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-7b": _shape(3584, 18_944, 28, 28, 4, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-14b": _shape(5120, 13_824, 48, 40, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-32b": _shape(5120, 27_648, 64, 40, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-72b": _shape(8192, 29_568, 80, 64, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-7b-1m": _shape(3584, 18_944, 28, 28, 4, 152_064, 1_010_000, 10_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("qwen2",),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS | QKV_BIASES,
    defaults=QWEN_DEFAULTS,
    gguf=GgufForm("qwen2"),
    shapes=SHAPES,
    calls=(HERMES,),
    reasoning=(THINK,),
)
