"""Olmo 3: no norm before attention and MLP but one behind each; queries, and keys, have one norm over all heads.

Three layers in four have a window, and rotate without the scaling of the others.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import make_rope
from gpu.model.family import LAYER_TENSORS, OUTPUT_BIAS, QK_NORMS, QKV_BIASES, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys, read_window_layers
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError, RopeScaling

_PATTERN = 4  # one layer of so many sees everything
_KINDS = ("full_attention", "sliding_attention")


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    has_bias = keys.flag("attention_bias")
    num_layers, max_positions = (keys.positive(key, int) for key in ("num_hidden_layers", "max_position_embeddings"))
    whole, local = _ropes(keys, max_positions)
    if whole.kind == "yarn" and isinstance(whole.settings.get("factor"), int | float):
        original = whole.settings["original_max_position_embeddings"]
        max_positions = max(max_positions, int(whole.settings["factor"] * original))
    types = keys.get("layer_types")
    is_local = [(layer + 1) % _PATTERN != 0 for layer in range(num_layers)]
    windows = find_windows(keys, keys.optional("sliding_window", int), is_local, max_positions)
    if types is not None:
        is_local = [one == "sliding_attention" for one in types]
    specs = [
        LayerSpec(qkv_bias=has_bias, output_bias=has_bias, pre_norms=False, post_norms=True, wide_qk_norm=True,
                  window_tokens=window, rope=local if own else None)
        for window, own in zip(windows, is_local, strict=True)
    ]  # fmt: skip
    return parse_sizes(keys, name, specs, rope=whole, max_context_tokens=max_positions)


def _ropes(keys: ConfigKeys, max_positions: int) -> tuple[RopeScaling, RopeScaling]:
    """Return the frequencies of layers that see everything, and of those with a window: `rope_scaling` is of the
    former alone.
    """
    theta, given, scaling = keys.get("rope_theta"), keys.get("rope_parameters"), keys.get("rope_scaling") or {}
    given = given or {}
    if not isinstance(given, Mapping) or any(kind not in _KINDS for kind in given):
        raise ModelError(
            f"model: {keys.source}: rope_parameters is {given!r}; wanted one entry for each of {', '.join(_KINDS)}"
        )
    if not isinstance(scaling, Mapping):
        raise ModelError(f"model: {keys.source}: rope_scaling is {scaling!r}; wanted an object")
    whole, local = (dict(given.get(kind) or {}) for kind in _KINDS)
    return (
        make_rope(whole | scaling, theta, max_positions, keys.source),
        make_rope(local, theta, max_positions, keys.source),
    )


def tensors(shape: Architecture) -> dict[str, str]:
    names = {name: what for name, what in LAYER_TENSORS.items() if what not in ("attention_norm", "mlp_norm")}
    norms = {
        "post_attention_layernorm.weight": "attention_post_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
    }
    biases: dict[str, Any] = QKV_BIASES | OUTPUT_BIAS if shape.layer_pattern[0].qkv_bias else {}
    return names | norms | QK_NORMS | biases


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read windows and rotations. A file without windows is an OLMo 2's, whose layers are the same otherwise."""
    theta = keys.number("rope.freq_base_swa", config["rope_theta"])
    rotations = {"rope_theta": None, "rope_parameters": {"sliding_attention": {"rope_theta": theta}}}
    rotations["rope_parameters"] |= {"full_attention": {"rope_theta": config["rope_theta"]}}
    if config.get("sliding_window"):
        return rotations | read_window_layers(keys, config, _PATTERN)
    return rotations | {"layer_types": ["full_attention"] * keys.num_layers}


GGUF = GgufForm("olmo2", translate=translate_gguf, has_windows=True)

YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "attention_factor": 1.2079441541679836, "beta_slow": 1.0,
}  # fmt: skip

_shape = partial(published_sizes, model_type="olmo3", rms_norm_eps=1e-6)
SHAPES = {
    "tiny-olmo3": _shape(256, 512, 4, 4, 2, 1024, 65_536, 500_000.0, sliding_window=64, rope_scaling=YARN),
    "olmo3-7b": _shape(4096, 11_008, 32, 32, 32, 100_278, 65_536, 500_000.0, rope_scaling=YARN),
    "olmo3-32b": _shape(5120, 27_648, 64, 40, 8, 100_278, 65_536, 500_000.0, rope_scaling=YARN),
}

FAMILY = Family(
    model_types=("olmo3",),
    parse=parse,
    tensors=tensors,
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "vocab_size": 50_304,
    },
    gguf=GGUF,
    shapes=SHAPES,
    reasoning=(THINK,),
)
