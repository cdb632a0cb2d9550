"""Mistral Small 4, its text: latent attention whose queries grow with their positions, experts that a softmax chooses.

Of a checkpoint that sees pictures, too, the decoder alone is read. All experts of a layer stand in one tensor, or each
by itself, as those of few bits have them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu.model.answers.mistral import MISTRAL, MISTRAL_THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.families.ministral3 import PREFIXES, SKIPPED, growing_scaling, parse_growing_rope, unwrap_text
from gpu.model.family import Family
from gpu.model.gguf.keys import GgufKeys
from gpu.model.latent_config import (
    count_dense,
    dense_first,
    in_groups,
    latent_tensors,
    parse_latent_model,
    parse_shared_experts,
)
from gpu.model.latent_gguf import SOFTMAX, gating, latent_form
from gpu.model.latent_gguf import translate as translate_latents
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, ModelError

_STACKED = {"mlp.experts.gate_up_proj": "experts_gate_up", "mlp.experts.down_proj": "experts_down"}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    num_layers = keys.positive("num_hidden_layers", int)
    experts, shared = parse_shared_experts(keys, is_normalised=keys.flag("norm_topk_prob"))
    specs = dense_first(count_dense(keys, num_layers), num_layers, in_groups(keys, experts), shared)
    rope, most, growth = parse_growing_rope(keys, YARN)
    return parse_latent_model(
        keys, name, specs, bool(keys.only("rope_interleave", True, False)), rope=rope, max_context_tokens=most,
        query_growth=growth,
    )  # fmt: skip


def tensors(shape: Architecture) -> dict[str, str]:
    table = latent_tensors(shape)
    if shape.experts_apart:
        return table
    return {name: what for name, what in table.items() if ".experts." not in name} | _STACKED


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read the keys of latents, and how queries grow. Raises ModelError as `latent_gguf.translate`."""
    if gating(keys) != SOFTMAX:
        raise keys.refused("expert_gating_func", gating(keys), f"{SOFTMAX}, a softmax")
    found = translate_latents(keys, config)
    scaling = found.get("rope_scaling") or config.get("rope_scaling")
    without = {key: value for key, value in found.items() if key not in ("scoring_func", "topk_method")}
    return without | {"rope_scaling": growing_scaling(keys, config | {"rope_scaling": scaling})}


GGUF = replace(latent_form(), architecture="mistral4", translate=translate_gguf)


def unwrap(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part, whose rotation says which share of a head it turns: what sizes of heads say already.
    Raises ModelError where they say otherwise.
    """
    config = unwrap_text(config)
    rope, found = config.get("rope_parameters"), dict(config)
    if isinstance(rope, dict) and "partial_rotary_factor" in rope:
        turned, still = (config.get(key) or 64 for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
        share = rope["partial_rotary_factor"]
        if not isinstance(share, int | float) or share * (turned + still) != turned:
            raise ModelError(
                f"model: a mistral4 whose partial_rotary_factor is {share!r}; wanted {turned} of {turned + still}, as "
                "qk_rope_head_dim and qk_nope_head_dim say"
            )
        found["rope_parameters"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    return found


YARN = {
    "type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

_shape = partial(published_sizes, model_type="mistral4", rope_parameters=YARN)
SHAPES = {
    "tiny-mistral4": _shape(
        256, 384, 4, 8, 8, 1024, 4096, 10_000.0, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=48,
        qk_rope_head_dim=16, v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        rope_parameters=YARN | {"factor": 8.0, "original_max_position_embeddings": 16},
    ),
    "mistral-small-4-119b": _shape(4096, 12_288, 36, 32, 32, 131_072, 1_048_576, 10_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("mistral4",),
    parse=parse,
    tensors=tensors,
    defaults={
        "first_k_dense_replace": 0,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "kv_lora_rank": 256,
        "max_position_embeddings": 1_048_576,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "v_head_dim": 128,
        "vocab_size": 131_072,
    },
    harmless=frozenset({"output_router_logits", "pretraining_tp", "qk_head_dim"}),
    unwrap=unwrap,
    prefixes=PREFIXES,
    skipped=SKIPPED,
    gguf=GGUF,
    shapes=SHAPES,
    calls=(MISTRAL,),
    reasoning=(MISTRAL_THINK,),
)
