"""Ministral 3, its text: a Mistral with YaRN whose queries grow with their positions.

Of a checkpoint that sees pictures, too, the decoder alone is read.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from gpu.model.answers.mistral import MISTRAL, MISTRAL_THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import make_rope
from gpu.model.family import LAYER_TENSORS, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError, QueryGrowth, RopeScaling

log = logging.getLogger(__name__)

_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("layer_types", None)
    window = keys.optional("sliding_window", int)
    rope, max_positions, growth = parse_growing_rope(keys, YARN)
    spec = LayerSpec(window_tokens=None if window is None or window >= max_positions else window)
    return parse_sizes(keys, name, (spec,), rope=rope, max_context_tokens=max_positions, query_growth=growth)


def parse_growing_rope(
    keys: ConfigKeys, absent: Mapping[str, Any]
) -> tuple[RopeScaling, int, QueryGrowth | None]:  # fmt: skip
    """Return the rotation, how many positions it reaches, and how queries grow. absent: what an absent key means."""
    max_positions = keys.positive("max_position_embeddings", int)
    given = keys.get("rope_scaling") or keys.get("rope_parameters") or absent
    keys.get("rope_parameters")
    if not isinstance(given, Mapping):
        raise ModelError(f"model: {keys.source}: rope_parameters is {given!r}; wanted an object")
    beta, original = given.get(_BETA), given.get(_ORIGINAL)
    if type(beta) not in (int, float) or type(original) is not int or beta < 0 or original < 1:
        raise ModelError(
            f"model: {keys.source}: rope_parameters has {_BETA} {beta!r} and {_ORIGINAL} {original!r}; wanted both, "
            "numbers of 0 and of 1 or more"
        )
    settings = {key: value for key, value in given.items() if key not in (_BETA, "max_position_embeddings")}
    rope = make_rope(settings, keys.get("rope_theta"), max_positions, keys.source)
    if rope.kind == "yarn" and isinstance(rope.settings.get("factor"), int | float):
        max_positions = max(max_positions, int(rope.settings["factor"] * original))
    return rope, max_positions, QueryGrowth(float(beta), original) if beta else None


def unwrap(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part, as `unwrap_text`. Raises ModelError for another decoder."""
    text = config.get("text_config")
    if config.get("model_type") == "mistral3" and isinstance(text, dict) and text.get("model_type") != "ministral3":
        raise ModelError(
            f"model: a mistral3 whose text_config.model_type is {text.get('model_type')!r}; served: 'ministral3', "
            "'mistral4'"
        )
    return unwrap_text(config)


def unwrap_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a model that sees pictures, and say so."""
    text = config.get("text_config")
    if config.get("model_type") != "mistral3" or not isinstance(text, dict):
        return config
    if config.get("vision_config"):
        log.info("model event=text_alone reason='vision_config: pictures are not served'")
    beside = {key: config[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in config}
    return beside | text


PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
SKIPPED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read how queries grow, and YaRN's factor of attention: llama.cpp's `mscale` is 1, `mscale_all_dim` the file's."""
    scaling = growing_scaling(keys, config)
    of_all = keys.number("rope.scaling.yarn_log_multiplier")
    if of_all and scaling["rope_type"] != "yarn":
        raise keys.refused("rope.scaling.yarn_log_multiplier", of_all, f"0 beside {scaling['rope_type']!r}")
    return {"rope_scaling": scaling | ({"mscale": 1.0, "mscale_all_dim": of_all} if of_all else {})}


def growing_scaling(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotation with how queries grow: as in llama.cpp by the positions before YaRN, unless the file says by
    how many. Growth that it does not have is none.
    """
    scaling: dict[str, Any] = config.get("rope_scaling") or {"rope_type": "default"}
    original = scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    tokens = keys.size("attention.temperature_length", 1)
    if tokens not in (None, original):
        raise keys.refused("attention.temperature_length", tokens, f"{original}, the positions before YaRN")
    growth = {_BETA: keys.number("attention.temperature_scale", 0.0), _ORIGINAL: original}
    return scaling | growth


# Called in files as the models are that see pictures, too.
GGUF = GgufForm("mistral3", translate=translate_gguf, has_neighbour_pairs=True)

YARN = {
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

_shape = partial(published_sizes, model_type="ministral3", head_dim=128, rope_parameters=YARN)
SHAPES = {
    "tiny-ministral3": _shape(
        256, 512, 4, 4, 2, 1024, 4096, 1_000_000.0, head_dim=64,
        rope_parameters=YARN | {"factor": 8.0, "original_max_position_embeddings": 16},
    ),
    "ministral-3-8b": _shape(4096, 14_336, 34, 32, 8, 131_072, 262_144, 1_000_000.0),
    "ministral-3-14b": _shape(
        5120, 16_384, 40, 32, 8, 131_072, 262_144, 1_000_000_000.0, rope_parameters=YARN | {"rope_theta": 1e9}
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("ministral3", "mistral3"),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS,
    defaults={
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "max_position_embeddings": 262_144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 131_072,
    },
    unwrap=unwrap,
    prefixes=PREFIXES,
    skipped=SKIPPED,
    texts=frozenset({"mistral4"}),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(MISTRAL,),
    reasoning=(MISTRAL_THINK,),
)
