"""Qwen3.5 to 3.8 with a mixture of experts in each layer, their text: Qwen3-Next's layers, stored as in Qwen3.5.

A checkpoint has all experts of a layer in one tensor, or each by itself, as those of few bits have them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu.model.answers.qwen3_xml import QWEN3_XML
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.experts_config import parse_experts
from gpu.model.families.qwen3_5 import HARMLESS, HEADS, PREFIXES, SKIPPED, unwrap_text
from gpu.model.families.qwen3_5 import translate_gguf as translate_dense
from gpu.model.families.qwen3_next import (
    GGUF_LISTED,
    GGUF_NAMES,
    HYBRID_DEFAULTS,
    RECURRENT_TENSORS,
    SHARED_TENSORS,
    parse_hybrid,
    translate_experts,
)
from gpu.model.family import EXPERT_TENSORS, LAYER_TENSORS, QK_NORMS, Family
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture

_STACKED = {
    "mlp.gate.weight": "router",
    "mlp.experts.gate_up_proj": "experts_gate_up",
    "mlp.experts.down_proj": "experts_down",
}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    experts = replace(parse_experts(keys, "num_experts", "moe_intermediate_size", True), is_shared=True)
    num_layers, shared = keys.positive("num_hidden_layers", int), keys.positive("shared_expert_intermediate_size", int)
    return parse_hybrid(keys, name, [experts] * num_layers, shared, draft_heads=keys.optional(HEADS, int) or 0)


def tensors(shape: Architecture) -> dict[str, str]:
    experts = EXPERT_TENSORS if shape.experts_apart else _STACKED
    return LAYER_TENSORS | QK_NORMS | RECURRENT_TENSORS | SHARED_TENSORS | experts


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return translate_dense(keys, config) | translate_experts(keys)


GGUF = GgufForm("qwen35moe", translate=translate_gguf, has_experts=True, listed=GGUF_LISTED, own_names=GGUF_NAMES)

_shape = partial(published_sizes, model_type="qwen3_5_moe_text")
SHAPES = {
    "tiny-qwen3.5-moe": _shape(
        256, 128, 4, 4, 2, 1024, 262_144, 10_000_000.0, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, shared_expert_intermediate_size=128,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3.5-35b-a3b": _shape(2048, 512, 40, 16, 2, 248_320, 262_144, 10_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    parse=parse,
    tensors=tensors,
    defaults=HYBRID_DEFAULTS | {
        "intermediate_size": 512,
        HEADS: 1,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 248_320,
    },
    harmless=HARMLESS | {"output_router_logits", "router_aux_loss_coef"},
    unwrap=unwrap_text,
    prefixes=PREFIXES,
    skipped=SKIPPED,
    gguf=GGUF,
    shapes=SHAPES,
    calls=(QWEN3_XML,),
    reasoning=(THINK,),
)  # fmt: skip
