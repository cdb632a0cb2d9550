"""Mistral and MegaBeam, all of whose layers may have a window, and Ministral, some of whose may."""

from functools import partial

from gpu.model.answers.mistral import MISTRAL, MISTRAL_JSON, MISTRAL_THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.family import LAYER_TENSORS, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    if keys.get("model_type") == "mistral":
        keys.only("layer_types", None)  # there it is passed over by whoever else reads it
    num_layers = keys.positive("num_hidden_layers", int)
    windows = find_windows(keys, keys.optional("sliding_window", int), [True] * num_layers, parse_rope(keys)[1])
    return parse_sizes(keys, name, [LayerSpec(window_tokens=window) for window in windows])


def is_mistral(keys: GgufKeys) -> bool:
    return keys.has("attention.sliding_window") and not keys.has("expert_count")


# A Llama with windows in files. Without windows it is read as a Llama, which computes the same.
GGUF = GgufForm("llama", claims=is_mistral, has_windows=True, has_neighbour_pairs=True)

_shape = partial(published_sizes, model_type="mistral", rms_norm_eps=1e-5, sliding_window=None)
SHAPES = {
    "tiny-mistral": _shape(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0, sliding_window=128),
    "mistral-7b": _shape(4096, 14_336, 32, 32, 8, 32_768, 32_768, 1_000_000.0),
    "mistral-7b-v0.1": _shape(4096, 14_336, 32, 32, 8, 32_000, 32_768, 10_000.0, sliding_window=4096),
    "mistral-nemo-12b": _shape(5120, 14_336, 40, 32, 8, 131_072, 131_072, 1_000_000.0, head_dim=128),
    "mistral-small-24b": _shape(5120, 32_768, 40, 32, 8, 131_072, 32_768, 100_000_000.0, head_dim=128),
    "megabeam-7b-512k": _shape(4096, 14_336, 32, 32, 8, 32_000, 524_288, 75_000_000.0),
    "ministral-8b": _shape(4096, 12_288, 36, 32, 8, 131_072, 32_768, 100_000_000.0, head_dim=128),
}  # fmt: skip

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
