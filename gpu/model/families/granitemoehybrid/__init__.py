"""Granite 4.0: hybrids, Mamba-2 in nine layers of ten and attention without positions, and models that attend in all.

Layers with experts have one MLP beside them.

Multipliers are Granite's: hidden states here are the checkpoint's over its multiplier of residuals, so that residuals
stay (see `gpu.model.families.granite`). The norm of a Mamba-2 layer's output sees no hidden states, and keeps its
epsilon.
"""

from dataclasses import replace
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.experts_config import parse_experts
from gpu.model.families.granite import parse_multipliers
from gpu.model.families.granite import translate_gguf as translate_multipliers
from gpu.model.family import LAYER_TENSORS, Family, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.mamba_config import mamba_tensors, parse_mamba
from gpu.model.mamba_gguf import LISTED, is_mamba, mamba_names, read_mamba
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, Experts, LayerSpec, ModelError, Recurrent

_RECURRENT, _ATTENDS = ("mamba", "linear_attention"), ("attention", "full_attention")
_MAMBA_KEYS = ("mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand", "mamba_n_groups",
               "mamba_n_heads", "mamba_proj_bias", "time_step_limit")  # fmt: skip
_EXPERTS = {
    "block_sparse_moe.router.layer.weight": "router",
    "block_sparse_moe.input_linear.weight": "experts_gate_up",
    "block_sparse_moe.output_linear.weight": "experts_down",
    "shared_mlp.input_linear.weight": "shared_gate_up",
    "shared_mlp.output_linear.weight": "shared_down",
}
_APART = {  # as GGUF files have them
    "block_sparse_moe.router.layer.weight": "router",
    "mlp.experts.*.gate_proj.weight": "gate",
    "mlp.experts.*.up_proj.weight": "up",
    "mlp.experts.*.down_proj.weight": "down",
    "mlp.shared_expert.gate_proj.weight": "shared_gate",
    "mlp.shared_expert.up_proj.weight": "shared_up",
    "mlp.shared_expert.down_proj.weight": "shared_down",
}
_MLP = {"shared_mlp.input_linear.weight": "gate_up", "shared_mlp.output_linear.weight": "down"}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("normalization_function", "rmsnorm")
    multipliers = parse_multipliers(keys, _is_rotated(keys))
    shared, eps = keys.positive("shared_intermediate_size", int), keys.positive("rms_norm_eps", float)
    experts = _parse_experts(keys)
    is_recurrent = _find_recurrent(keys)
    recurrent = None
    if any(is_recurrent):
        recurrent = _parse_mamba(keys, keys.positive("hidden_size", int), eps)
    else:
        for key in _MAMBA_KEYS:  # which say nothing where all layers attend
            keys.get(key)
    specs = [
        LayerSpec(recurrent=recurrent if one else None, experts=experts, intermediate=shared) for one in is_recurrent
    ]
    return parse_sizes(keys, name, specs, **multipliers)


def _is_rotated(keys: ConfigKeys) -> bool:
    """Return whether queries and keys are rotated."""
    kind = keys.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise ModelError(f"model: {keys.source}: position_embedding_type is {kind!r}; served: None, 'nope', 'rope'")
    return bool(kind == "rope")


def _parse_experts(keys: ConfigKeys) -> Experts | None:
    if keys.get("num_local_experts") in (0, None):
        keys.get("num_experts_per_tok")
        return None
    experts = parse_experts(keys, "num_local_experts", "intermediate_size", is_normalised=True)
    return replace(experts, is_shared=True, is_whole=True)


def _parse_mamba(keys: ConfigKeys, hidden: int, eps: float) -> Recurrent:
    keys.only("mamba_proj_bias", False)
    keys.only("mamba_conv_bias", True)
    heads, inner = keys.positive("mamba_n_heads", int), keys.positive("mamba_expand", int) * hidden
    dim = inner // heads if keys.get("mamba_d_head") == "auto" else keys.positive("mamba_d_head", int)
    if heads * dim != inner:
        raise ModelError(
            f"model: {keys.source}: mamba_n_heads is {heads} of {dim}; wanted {inner} elements together, mamba_expand "
            "times hidden_size"
        )
    return parse_mamba(keys, ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"), dim, eps)


def _find_recurrent(keys: ConfigKeys) -> list[bool]:
    """Return which layers are Mamba-2, as `layer_types` says, or `layers_block_type`. None need be."""
    num_layers = keys.positive("num_hidden_layers", int)
    older = keys.get("layers_block_type")
    types = keys.get("layer_types") if older is None else older
    known = (*_RECURRENT, *_ATTENDS)
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        wanted = f"{num_layers} of {', '.join(map(repr, known))}"
        raise ModelError(f"model: {keys.source}: layer_types is {shown(types)}; wanted {wanted}")
    found = [one in _RECURRENT for one in types]
    if all(found):
        raise ModelError(
            f"model: {keys.source}: layer_types has {shown(sorted({*types}))} alone; wanted attention, too"
        )
    return found


def tensors(shape: Architecture) -> dict[str, str]:
    has_experts = shape.layer_pattern[0].experts is not None
    if shape.experts_apart:
        return LAYER_TENSORS | mamba_tensors("mamba") | (_APART if has_experts else {})
    mlp = _EXPERTS if has_experts else _MLP
    attention = {name: what for name, what in LAYER_TENSORS.items() if not name.startswith("mlp.")}
    return attention | mamba_tensors("mamba") | mlp


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    own, hidden = read_mamba(keys), config.get("hidden_size") or 1
    if own.inner % hidden:
        raise keys.refused("ssm.inner_size", own.inner, f"a multiple of {hidden}, embedding_length")
    return translate_multipliers(keys, config) | {
        "num_key_value_heads": keys.positive_of_some("attention.head_count_kv"),
        "layers_block_type": ["mamba" if is_mamba(keys, layer) else "attention" for layer in range(keys.num_layers)],
        "position_embedding_type": "rope" if keys.take("rope.scaling.finetuned", False) else "nope",  # as llama.cpp
        "num_local_experts": config.get("num_experts", 0),
        "shared_intermediate_size": keys.size("expert_shared_feed_forward_length", 1) or config["intermediate_size"],
        "mamba_n_heads": own.heads,
        "mamba_n_groups": own.groups,
        "mamba_d_head": own.dim,
        "mamba_d_state": own.state,
        "mamba_d_conv": own.conv_tokens,
        "mamba_expand": own.inner // hidden,
    }


# Each expert's gate and up are apart in GGUF files, as MLPs' are.
GGUF = GgufForm(
    "granitehybrid", translate=translate_gguf, has_experts=None, has_neighbour_pairs=True, listed=LISTED,
    own_names=mamba_names("mamba"),
)  # fmt: skip


def _shape(*sizes: Any, attending: tuple[int, ...], **more: Any) -> dict[str, Any]:
    layers = sizes[2]
    own = {
        "rms_norm_eps": 1e-5,
        "position_embedding_type": "nope",
        "layer_types": ["attention" if layer in attending else "mamba" for layer in range(layers)],
        "mamba_d_state": 128,
        "embedding_multiplier": 12.0,
        "tie_word_embeddings": True,
    }
    return own | published_sizes(*sizes, model_type="granitemoehybrid", **more)


SHAPES = {
    "tiny-granite-hybrid": _shape(
        256, 512, 4, 4, 2, 1024, 131_072, 10_000.0, attending=(1, 3), num_local_experts=0, mamba_n_heads=8,
        mamba_d_state=64, shared_intermediate_size=512, attention_multiplier=0.0625, residual_multiplier=0.22,
        embedding_multiplier=0.5, logits_scaling=8.0, tie_word_embeddings=False,
    ),
    "granite-4.0-h-micro": _shape(
        2048, 8192, 40, 32, 8, 100_352, 131_072, 10_000.0, attending=(5, 15, 25, 35), num_local_experts=0,
        mamba_n_heads=64, shared_intermediate_size=8192, attention_multiplier=0.015625, residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "granite-4.0-h-tiny": _shape(
        1536, 512, 40, 12, 4, 100_352, 131_072, 10_000.0, attending=(5, 15, 25, 35), num_local_experts=64,
        num_experts_per_tok=6, mamba_n_heads=48, shared_intermediate_size=1024, attention_multiplier=0.0078125,
        residual_multiplier=0.22, logits_scaling=6.0,
    ),
    "granite-4.0-h-small": _shape(
        4096, 768, 40, 32, 8, 100_352, 131_072, 10_000.0, attending=(5, 15, 25, 35), num_local_experts=72,
        num_experts_per_tok=10, mamba_n_heads=128, shared_intermediate_size=1536, attention_multiplier=0.0078125,
        residual_multiplier=0.22, logits_scaling=16.0,
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("granitemoehybrid",),
    parse=parse,
    tensors=tensors,
    defaults={
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "logits_scaling": 1.0,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "max_position_embeddings": 2048,
        "normalization_function": "rmsnorm",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "residual_multiplier": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "shared_intermediate_size": 1024,
        "vocab_size": 32_000,
    },
    gguf=GGUF,
    harmless=frozenset({"init_method", "mamba_chunk_size", "output_router_logits", "router_aux_loss_coef"}),
    shapes=SHAPES,
)
