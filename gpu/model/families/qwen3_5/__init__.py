"""Qwen3.5 to 3.8, dense, their text: Qwen3-Next's layers with one MLP each.

Positions have three axes in a checkpoint that sees pictures. Those of text are the same on all of them, so sections of
the rotation (`mrope_section`) change nothing.
"""

import logging
from typing import Any

from gpu.model.answers.qwen3_xml import QWEN3_XML
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.draft_head_shape import PREFIXES as MTP
from gpu.model.families.qwen3_5.gguf_form import GGUF
from gpu.model.families.qwen3_5.shapes import SHAPES
from gpu.model.families.qwen3_next import HYBRID_DEFAULTS, RECURRENT_TENSORS, parse_hybrid
from gpu.model.family import LAYER_TENSORS, QK_NORMS, Family
from gpu.model.spec import Architecture

log = logging.getLogger(__name__)

_SECTIONS = ("mrope_section", "mrope_interleaved")
PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
HEADS = "mtp_num_hidden_layers"
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
