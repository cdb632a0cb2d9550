"""Qwen3-Next: three layers in four are gated delta nets, the others have gates behind attention; mixtures of experts.

Norms' weights are stored less one, and heads are rotated in part. Beside the experts each token takes a share of one
more. A recurrent layer's projections are stored key head by key head.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpu.model.answers.hermes import HERMES
from gpu.model.answers.qwen3_xml import QWEN3_XML
from gpu.model.answers.think import THINK
from gpu.model.config_keys import ConfigKeys
from gpu.model.draft_head_shape import PREFIXES
from gpu.model.experts_config import parse_experts
from gpu.model.families.qwen3_moe import find_mixtures
from gpu.model.family import EXPERT_TENSORS, LAYER_TENSORS, QK_NORMS, Family, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, Experts, LayerSpec, ModelError, Recurrent

HEADS = "mtp_num_hidden_layers"
_RECURRENT, _ATTENDS = "linear_attention", "full_attention"
_PATTERN = 4  # one layer of so many attends, where `layer_types` is absent
RECURRENT_TENSORS = {
    "linear_attn.in_proj_qkv.weight": "mixed",
    "linear_attn.in_proj_z.weight": "mixed_gate",
    "linear_attn.in_proj_b.weight": "state_shares",
    "linear_attn.in_proj_a.weight": "state_decays",
    "linear_attn.conv1d.weight": "conv",
    "linear_attn.A_log": "decay",
    "linear_attn.dt_bias": "time_bias",
    "linear_attn.norm.weight": "mixed_norm",
    "linear_attn.out_proj.weight": "mixed_output",
}
_GATES = {"linear_attn.in_proj_ba.weight": "state_gates"}
_GROUPED = {"linear_attn.in_proj_qkvz.weight": "mixed_all"} | _GATES
SHARED_TENSORS = {
    "mlp.shared_expert.gate_proj.weight": "shared_gate",
    "mlp.shared_expert.up_proj.weight": "shared_up",
    "mlp.shared_expert.down_proj.weight": "shared_down",
    "mlp.shared_expert_gate.weight": "shared_share",
}
HYBRID_DEFAULTS = {
    "attn_output_gate": True,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    num_layers = keys.positive("num_hidden_layers", int)
    experts = parse_experts(keys, "num_experts", "moe_intermediate_size", keys.flag("norm_topk_prob"))
    is_mixture, step = find_mixtures(keys, num_layers), keys.positive("decoder_sparse_step", int)
    of_layers = [
        replace(experts, is_shared=True) if is_mixture[layer] and (layer + 1) % step == 0 else None
        for layer in range(num_layers)
    ]
    shared = keys.positive("shared_expert_intermediate_size", int)
    is_grouped = not keys.flag("projections_are_apart")
    heads = keys.optional(HEADS, int)
    published = 1 if heads is None else heads
    return parse_hybrid(keys, name, of_layers, shared, is_grouped, has_grouped_gates=True, draft_heads=published)


def parse_hybrid(
    keys: ConfigKeys, name: str, experts: Sequence[Experts | None], shared: int | None = None, is_grouped: bool = False,
    has_grouped_gates: bool = False, draft_heads: int = 0,
) -> Architecture:  # fmt: skip
    """Return an Architecture of recurrent layers and others. experts: of each layer; None: it has its one MLP. shared:
    columns of the MLP beside experts. is_grouped, has_grouped_gates: as in `Recurrent`. draft_heads: that published
    checkpoints have.
    """
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("attn_output_gate", True)
    recurrent = Recurrent(
        keys.positive("linear_num_key_heads", int), keys.positive("linear_num_value_heads", int),
        keys.positive("linear_key_head_dim", int), keys.positive("linear_value_head_dim", int),
        keys.positive("linear_conv_kernel_dim", int), is_grouped, has_grouped_gates,
        keys.flag("value_heads_are_tiled"),
    )  # fmt: skip
    if recurrent.value_heads % recurrent.key_heads:
        raise ModelError(
            f"model: {keys.source}: linear_num_value_heads is {recurrent.value_heads} over {recurrent.key_heads}, "
            "linear_num_key_heads; wanted a multiple"
        )
    if not 2 <= recurrent.conv_tokens <= _PATTERN:
        raise ModelError(
            f"model: {keys.source}: linear_conv_kernel_dim is {recurrent.conv_tokens}; served: 2 to {_PATTERN}"
        )
    specs = [
        LayerSpec(recurrent=recurrent, experts=own, intermediate=None if own is None else shared)
        if is_recurrent
        else LayerSpec(qk_norm=True, output_gate=True, experts=own, intermediate=None if own is None else shared)
        for is_recurrent, own in zip(find_recurrent(keys, len(experts)), experts, strict=True)
    ]
    return parse_sizes(keys, name, specs, rotates_part=True, norm_weight_offset=1.0, draft_heads=draft_heads)


def tensors(shape: Architecture) -> dict[str, str]:
    is_grouped = any(spec.recurrent is not None and spec.recurrent.is_grouped for spec in shape.layer_pattern)
    instead = _GROUPED if is_grouped else _GATES
    absent = {"state_shares", "state_decays"} | ({"mixed", "mixed_gate"} if is_grouped else set())
    recurrent = {name: what for name, what in RECURRENT_TENSORS.items() if what not in absent} | instead
    return LAYER_TENSORS | QK_NORMS | EXPERT_TENSORS | SHARED_TENSORS | recurrent


def find_recurrent(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Return which layers are recurrent: as `layer_types` says, or all but every n-th one."""
    types, interval = keys.get("layer_types"), keys.optional("full_attention_interval", int) or _PATTERN
    if types is None:
        if not 1 < interval <= num_layers:
            raise ModelError(
                f"model: {keys.source}: full_attention_interval is {interval}; wanted 2 to {num_layers}, the "
                "layers, of which one in so many attends"
            )
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    known = (_RECURRENT, _ATTENDS)
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        wanted = f"{num_layers} of {', '.join(map(repr, known))}"
        raise ModelError(f"model: {keys.source}: layer_types is {shown(types)}; wanted {wanted}")
    if _RECURRENT not in types or _ATTENDS not in types:
        raise ModelError(f"model: {keys.source}: layer_types has {shown(sorted({*types}))} alone; wanted both kinds")
    return [one == _RECURRENT for one in types]


GGUF_NAMES = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
GGUF_LISTED = ("attention.head_count_kv",)


def translate_recurrent(keys: GgufKeys) -> dict[str, Any]:
    """Return what hybrids have. Raises ModelError for sizes that contradict others."""
    heads = keys.count_heads()
    keys.take("full_attention_interval")  # tensors say which layers attend
    value_heads, inner = keys.positive("ssm.time_step_rank"), keys.positive("ssm.inner_size")
    if inner % value_heads:
        raise keys.refused("ssm.inner_size", inner, f"a multiple of {value_heads}, ssm.time_step_rank")
    is_recurrent = [f"blk.{layer}.ssm_a" in keys.file.tensors for layer in range(keys.num_layers - heads)]
    return {
        "num_hidden_layers": len(is_recurrent),
        HEADS: heads,
        "num_key_value_heads": keys.positive_of_some("attention.head_count_kv"),
        "layer_types": ["linear_attention" if own else "full_attention" for own in is_recurrent],
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
    }


def translate_experts(keys: GgufKeys) -> dict[str, Any]:
    """Return the sizes of experts."""
    return {
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
    }


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    is_apart = any(name.endswith(".attn_gate.weight") for name in keys.file.tensors)
    return translate_recurrent(keys) | translate_experts(keys) | {"projections_are_apart": is_apart}


# Projections are apart in GGUF files, or key head by key head as files had them first; gates are as in a checkpoint.
GGUF = GgufForm("qwen3next", translate=translate_gguf, has_experts=True, listed=GGUF_LISTED, own_names=GGUF_NAMES)

_shape = partial(published_sizes, model_type="qwen3_next")
SHAPES = {
    "tiny-qwen3-next": _shape(
        256, 512, 4, 4, 2, 1024, 262_144, 10_000_000.0, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, shared_expert_intermediate_size=128, mlp_only_layers=[1],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3-next-80b-a3b": _shape(2048, 5120, 48, 16, 2, 151_936, 262_144, 10_000_000.0),
}  # fmt: skip

FAMILY = Family(
    model_types=("qwen3_next",),
    parse=parse,
    tensors=tensors,
    defaults=HYBRID_DEFAULTS | {
        "decoder_sparse_step": 1,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151_936,
    },
    harmless=frozenset({"max_window_layers", "output_router_logits", "router_aux_loss_coef"}),
    skipped=PREFIXES,
    gguf=GGUF,
    shapes=SHAPES,
    calls=(HERMES, QWEN3_XML),
    reasoning=(THINK,),
)  # fmt: skip
