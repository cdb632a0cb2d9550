"""SmolLM3: a Llama of which one layer in four does not rotate queries and keys."""

from functools import partial
from typing import Any

from gpu.model.answers.hermes import HERMES
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.family import LAYER_TENSORS, MLP_BIASES, OUTPUT_BIAS, QKV_BIASES, Family, find_windows, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.gguf.keys import GgufForm
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import NO_ROTATION, Architecture, LayerSpec, ModelError


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    has_bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
    rotates = _rotates(keys)
    window = keys.optional("sliding_window", int) if keys.flag("use_sliding_window") else None
    keys.get("sliding_window")
    windows = find_windows(keys, window, [not one for one in rotates], parse_rope(keys)[1])
    specs = [
        LayerSpec(qkv_bias=has_bias, output_bias=has_bias, mlp_bias=mlp_bias, window_tokens=window,
                  rope=None if one else NO_ROTATION)
        for one, window in zip(rotates, windows, strict=True)
    ]  # fmt: skip
    return parse_sizes(keys, name, specs)


def _rotates(keys: ConfigKeys) -> list[bool]:
    """Return which layers rotate: `no_rope_layers` says 1 of those that do."""
    num_layers, every = keys.positive("num_hidden_layers", int), keys.positive("no_rope_layer_interval", int)
    given: Any = keys.get("no_rope_layers")
    if given is None:
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(one not in (0, 1) for one in given):
        raise ModelError(
            f"model: {keys.source}: no_rope_layers is {shown(given)}; wanted 1 or 0 for each of {num_layers} layers"
        )
    return [bool(one) for one in given[:num_layers]]


def tensors(shape: Architecture) -> dict[str, str]:
    spec = shape.layer_pattern[0]
    biases = (QKV_BIASES | OUTPUT_BIAS if spec.qkv_bias else {}) | (MLP_BIASES if spec.mlp_bias else {})
    return LAYER_TENSORS | biases


# Files do not say that one layer in four does not rotate.
GGUF = GgufForm("smollm3", has_neighbour_pairs=True)

_shape = partial(published_sizes, model_type="smollm3")
SHAPES = {
    "tiny-smollm3": _shape(256, 512, 4, 4, 2, 1024, 65_536, 5_000_000.0, tie_word_embeddings=False),
    "smollm3-3b": _shape(2048, 11_008, 36, 16, 4, 128_256, 65_536, 5_000_000.0),
}

FAMILY = Family(
    model_types=("smollm3",),
    parse=parse,
    tensors=tensors,
    defaults={
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "max_position_embeddings": 32_768,
        "no_rope_layer_interval": 4,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 128_256,
    },
    harmless=frozenset({"max_window_layers"}),  # which files have, and no layer reads
    gguf=GGUF,
    shapes=SHAPES,
    calls=(HERMES,),
    reasoning=(THINK,),
)
