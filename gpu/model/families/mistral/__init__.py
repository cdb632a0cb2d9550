"""Mistral and MegaBeam, all of whose layers may have a window, and Ministral, some of whose may."""

from gpu.model.answers.mistral import MISTRAL, MISTRAL_JSON, MISTRAL_THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.families.mistral.gguf_form import GGUF
from gpu.model.families.mistral.shapes import SHAPES
from gpu.model.family import LAYER_TENSORS, Family, find_windows, parse_sizes
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    if keys.get("model_type") == "mistral":
        keys.only("layer_types", None)  # there it is passed over by whoever else reads it
    num_layers = keys.positive("num_hidden_layers", int)
    windows = find_windows(keys, keys.optional("sliding_window", int), [True] * num_layers, parse_rope(keys)[1])
    return parse_sizes(keys, name, [LayerSpec(window_tokens=window) for window in windows])


FAMILY = Family(
    model_types=("mistral", "ministral"),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS,
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
    },
    gguf=GGUF,
    shapes=SHAPES,
    calls=(MISTRAL, MISTRAL_JSON),
    reasoning=(MISTRAL_THINK,),
)
