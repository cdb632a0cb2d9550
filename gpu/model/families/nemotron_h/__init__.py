"""Nemotron-H: layers that are each one block, a Mamba-2 mixer, attention without positions, an MLP or experts.

MLPs and experts have no gates, and relu(up)**2. Experts are DeepSeek-V3's: sigmoids and a correction choose them, and
one more is taken by all tokens. Steps of time have no limit: `time_step_min` and its neighbours are of training alone.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpu.model.answers.qwen3_xml import QWEN3_XML
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.experts_config import parse_experts
from gpu.model.families.nemotron_h.gguf_form import GGUF
from gpu.model.family import ONE_NORM, Family, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.latent_config import in_groups
from gpu.model.mamba_config import mamba_tensors, parse_mamba
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import NO_ROTATION, Architecture, LayerSpec, ModelError

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
# By what a file calls a layer: letters of a pattern, or words, of transformers 5 or of the first files.
_PATTERN = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_WORDS = {"mamba": _MAMBA, "attention": _ATTENTION} | {kind: kind for kind in _PATTERN.values()}
_KINDS = {"layers_block_type": _WORDS, "layer_types": _WORDS, "hybrid_override_pattern": _PATTERN}
_EXPERT_KEYS = ("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "n_group",
                "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok",
                "routed_scaling_factor", "topk_group")  # fmt: skip
# What the first files call two sizes, alone or beside their names.
_OTHER_NAMES = {"attention_head_dim": "head_dim", "num_query_groups": "num_key_value_heads"}
TENSORS = {
    "norm.weight": ONE_NORM,
    "mixer.q_proj.weight": "query",
    "mixer.k_proj.weight": "key",
    "mixer.v_proj.weight": "value",
    "mixer.o_proj.weight": "output",
    "mixer.up_proj.weight": "up",
    "mixer.down_proj.weight": "down",
    "mixer.gate.weight": "router",
    "mixer.gate.e_score_correction_bias": "router_correction",
    "mixer.experts.*.up_proj.weight": "up",
    "mixer.experts.*.down_proj.weight": "down",
    "mixer.shared_experts.up_proj.weight": "shared_up",
    "mixer.shared_experts.down_proj.weight": "shared_down",
} | mamba_tensors("mixer")


def parse(keys: ConfigKeys, name: str) -> Architecture:
    for key in ("attention_bias", "mamba_proj_bias", "mlp_bias", "residual_in_fp32", "use_bias"):
        keys.only(key, False)
    keys.only("use_conv_bias", True)
    keys.only("mlp_hidden_act", "relu2")
    keys.only("mamba_hidden_act", "silu")
    keys.only("sliding_window", None)
    for other, known in _OTHER_NAMES.items():
        keys.only(other, None, keys.get(known))
    rope, max_positions = parse_rope(keys)
    if rope.kind != "default":
        raise ModelError(f"model: {keys.source}: rope scaling {rope.kind!r}; a Nemotron-H rotates nothing")
    kinds, eps = _find_kinds(keys), float(keys.positive("layer_norm_epsilon", float))
    mamba = parse_mamba(
        keys,
        ("mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel"),
        keys.positive("mamba_head_dim", int),
        eps,
    )
    specs = {
        _MAMBA: LayerSpec(part="mixer", recurrent=mamba),
        _ATTENTION: LayerSpec(part="mixer"),
        _MLP: LayerSpec(part="mlp", activation="relu2"),
    }
    if _EXPERTS in kinds:
        specs[_EXPERTS] = _parse_experts(keys)
    else:
        for key in _EXPERT_KEYS:  # which say nothing where no layer has experts
            keys.get(key)
    return parse_sizes(
        keys, name, [specs[kind] for kind in kinds], num_layers=len(kinds), rms_norm_eps=eps, rope=NO_ROTATION,
        max_context_tokens=max_positions,
    )  # fmt: skip


def _with_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration that has sizes by the names of later files, too."""
    found = {known: config.get(other) for other, known in _OTHER_NAMES.items() if config.get(known) is None}
    return config | {known: size for known, size in found.items() if size is not None}


def _parse_experts(keys: ConfigKeys) -> LayerSpec:
    keys.only("moe_latent_size", None)
    keys.only("n_shared_experts", 1)
    experts = parse_experts(keys, "n_routed_experts", "moe_intermediate_size", keys.flag("norm_topk_prob"))
    experts = replace(
        in_groups(keys, experts), is_shared=True, is_whole=True, is_sigmoid=True,
        gain=float(keys.positive("routed_scaling_factor", float)),
    )  # fmt: skip
    shared = keys.positive("moe_shared_expert_intermediate_size", int)
    return LayerSpec(part="mlp", activation="relu2", experts=experts, intermediate=shared)


def _find_kinds(keys: ConfigKeys) -> list[str]:
    """Return what each layer is, which all keys that say so must agree on."""
    found = {key: _read_kinds(keys, key, known) for key, known in _KINDS.items() if keys.get(key) is not None}
    if not found:
        raise ModelError(f"model: {keys.source}: none of {', '.join(_KINDS)} is there; wanted one, with all layers")
    key, kinds = next(iter(found.items()))
    other = next((name for name, said in found.items() if said != kinds), None)
    if other is not None:
        raise ModelError(f"model: {keys.source}: {key} and {other} differ; wanted one, or both alike")
    stated = keys.positive("num_hidden_layers", int) if "num_hidden_layers" in keys else len(kinds)
    if stated != len(kinds):
        raise ModelError(f"model: {keys.source}: {key} has {len(kinds)} layers; num_hidden_layers is {stated}")
    for kind in (_MAMBA, _ATTENTION):
        if kind not in kinds:
            raise ModelError(f"model: {keys.source}: {key} is {shown(keys.get(key))}; wanted a layer that is {kind!r}")
    return kinds


def _read_kinds(keys: ConfigKeys, key: str, known: Mapping[str, str]) -> list[str]:
    value, wanted = keys.get(key), str if known is _PATTERN else list
    if not isinstance(value, wanted) or any(not isinstance(one, str) or one not in known for one in value):
        words = ", ".join(map(repr, known))
        raise ModelError(f"model: {keys.source}: {key} is {shown(value)}; wanted a {wanted.__name__} of {words}")
    return [known[one] for one in value]


def _shape(pattern: str, *sizes: Any, **more: Any) -> dict[str, Any]:
    hidden, intermediate, *others = sizes
    own = {"hybrid_override_pattern": pattern, "tie_word_embeddings": False}
    return own | published_sizes(hidden, intermediate, len(pattern), *others, 10_000.0, model_type="nemotron_h", **more)


SHAPES = {
    "tiny-nemotron-h": _shape(
        "MEM*-EM*", 256, 512, 4, 2, 1024, 131_072, head_dim=64, mamba_num_heads=8, ssm_state_size=64, n_groups=2,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=192, moe_shared_expert_intermediate_size=256,
        routed_scaling_factor=2.5,
    ),
    "nemotron-3-nano-30b-a3b": _shape(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 1856, 32, 2, 131_072, 262_144, head_dim=128,
        mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5,
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("nemotron_h",),
    parse=parse,
    tensors=lambda shape: TENSORS,
    defaults={
        "conv_kernel": 4,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_groups": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 1.0,
        "ssm_state_size": 128,
        "use_conv_bias": True,
        "vocab_size": 131_072,
    },
    harmless=frozenset(
        {"chunk_size", "expand", "hidden_dropout", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
         "mtp_layers_block_type", "norm_eps", "num_logits_to_keep", "num_nextn_predict_layers", "output_router_logits",
         "rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min", "use_mamba_kernels"}
    ),
    unwrap=_with_names,
    prefixes=(
        ("backbone.embeddings.", "model.embed_tokens."), ("model.embeddings.", "model.embed_tokens."),
        ("backbone.norm_f.", "model.norm."), ("model.norm_f.", "model.norm."), ("backbone.", "model."),
    ),
    skipped=("mtp.",),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(QWEN3_XML,),
    reasoning=(THINK,),
)  # fmt: skip
