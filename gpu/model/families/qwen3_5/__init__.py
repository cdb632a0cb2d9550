"""Qwen3.5 to 3.8, dense, their text: Qwen3-Next's layers with one MLP each.

Positions have three axes in a checkpoint that sees pictures. Those of text are the same on all of them, so sections of
the rotation (`mrope_section`) change nothing.
"""

import logging
from functools import partial
from typing import Any

from gpu.model.answers.qwen3_xml import QWEN3_XML
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.draft_head_shape import PREFIXES as MTP
from gpu.model.families.qwen3_next import (
    GGUF_LISTED,
    GGUF_NAMES,
    HEADS,
    HYBRID_DEFAULTS,
    RECURRENT_TENSORS,
    parse_hybrid,
    translate_recurrent,
)
from gpu.model.family import LAYER_TENSORS, QK_NORMS, Family
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture

log = logging.getLogger(__name__)

_SECTIONS = ("mrope_section", "mrope_interleaved")
PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
HARMLESS = frozenset({"mamba_ssm_dtype", HEADS, "mtp_use_dedicated_embeddings"})
SKIPPED = (*MTP, "model.visual.", "visual.")


def parse(keys: ConfigKeys, name: str) -> Architecture:
    num_layers = keys.positive("num_hidden_layers", int)
    return parse_hybrid(keys, name, [None] * num_layers, draft_heads=keys.optional(HEADS, int) or 0)


def unwrap_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a configuration, without sections of its rotation, and say what is left out."""
    text, beside = config.get("text_config"), {}
    if isinstance(text, dict):
        beside = {key: config[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in config}
        if config.get("vision_config"):
            log.info("model event=text_alone reason='vision_config: pictures and video are not served'")
    else:
        text = config
    found = beside | text
    for place in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(place), dict):
            found[place] = {key: value for key, value in found[place].items() if key not in _SECTIONS}
    return found


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    keys.take("rope.dimension_sections")  # of pictures' positions
    return translate_recurrent(keys) | {"value_heads_are_tiled": True}


# In files value heads that share a key head are as many apart as there are key heads.
GGUF = GgufForm("qwen35", translate=translate_gguf, listed=GGUF_LISTED, own_names=GGUF_NAMES)

_shape = partial(published_sizes, model_type="qwen3_5_text")
SHAPES = {
    "tiny-qwen3.5": _shape(
        256, 512, 4, 4, 2, 1024, 262_144, 10_000_000.0, head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3.5-9b": _shape(4096, 12_288, 32, 16, 4, 248_320, 262_144, 10_000_000.0),
    "qwen3.5-27b": _shape(5120, 17_408, 64, 24, 4, 248_320, 262_144, 10_000_000.0, linear_num_value_heads=48),
}  # fmt: skip

FAMILY = Family(
    model_types=("qwen3_5_text", "qwen3_5"),
    parse=parse,
    tensors=lambda shape: LAYER_TENSORS | QK_NORMS | RECURRENT_TENSORS,
    defaults=HYBRID_DEFAULTS | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        HEADS: 1,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "vocab_size": 248_320,
    },
    harmless=HARMLESS,
    unwrap=unwrap_text,
    prefixes=PREFIXES,
    skipped=SKIPPED,
    gguf=GGUF,
    shapes=SHAPES,
    calls=(QWEN3_XML,),
    reasoning=(THINK,),
)  # fmt: skip
