"""Read latent attention (MLA), and the experts of the models that have it, from a `config.json`."""

import math
from dataclasses import replace
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.experts_config import parse_experts
from gpu.model.family import LAYER_TENSORS, parse_sizes
from gpu.model.spec import Architecture, Experts, Latent, LayerSpec, ModelError, RopeScaling

_ATTENTION = {
    "self_attn.kv_a_proj_with_mqa.weight": "latent",
    "self_attn.kv_a_layernorm.weight": "latent_norm",
}
_UP = {"self_attn.kv_b_proj.weight": "latent_up"}
_SPLIT_UP = {"self_attn.k_b_proj.weight": "latent_key_up", "self_attn.v_b_proj.weight": "latent_value_up"}
_QUERIES = {
    "self_attn.q_a_proj.weight": "query_down",
    "self_attn.q_a_layernorm.weight": "query_down_norm",
    "self_attn.q_b_proj.weight": "query_up",
}
_EXPERTS = {
    "mlp.gate.weight": "router",
    "mlp.experts.*.gate_proj.weight": "gate",
    "mlp.experts.*.up_proj.weight": "up",
    "mlp.experts.*.down_proj.weight": "down",
    "mlp.shared_experts.gate_proj.weight": "shared_gate",
    "mlp.shared_experts.up_proj.weight": "shared_up",
    "mlp.shared_experts.down_proj.weight": "shared_down",
}
_CORRECTION = {"mlp.gate.e_score_correction_bias": "router_correction"}


def latent_tensors(shape: Architecture) -> dict[str, str]:
    """Return the map of a layer's tensors to weights, as `LAYER_TENSORS`."""
    assert shape.latent is not None, "a family of latent attention has it"
    whole = {name: what for name, what in LAYER_TENSORS.items() if what not in ("query", "key", "value")}
    queries = _QUERIES if shape.latent.query_rank is not None else {"self_attn.q_proj.weight": "query"}
    up = _SPLIT_UP if shape.latent.is_split else _UP
    has_correction = any(spec.experts is not None and spec.experts.is_sigmoid for spec in shape.layer_pattern)
    return whole | _ATTENTION | up | queries | _EXPERTS | (_CORRECTION if has_correction else {})


def parse_latent_model(
    keys: ConfigKeys, name: str, layers: list[LayerSpec], has_neighbour_pairs: bool, **more: Any
) -> Architecture:  # fmt: skip
    """Return an Architecture with latent attention in all layers."""
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    rank, rotated, plain, value = (
        keys.positive(key, int) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    if rotated % 2:
        raise ModelError(f"model: {keys.source}: qk_rope_head_dim is {rotated}; wanted an even number")
    heads, kv_heads = keys.positive("num_attention_heads", int), keys.optional("num_key_value_heads", int)
    if kv_heads not in (None, heads):
        raise ModelError(
            f"model: {keys.source}: num_key_value_heads is {kv_heads}, of {heads} heads; latent attention has as many"
        )
    keys.get("head_dim")
    rope = more.get("rope") or parse_rope(keys)[0]
    latent = Latent(
        rank, rotated, plain, value, keys.optional("q_lora_rank", int), _logit_gain(rope), has_neighbour_pairs,
        keys.flag("latent_up_is_split"),
    )  # fmt: skip
    return parse_sizes(keys, name, layers, num_kv_heads=1, dim=latent.row, latent=latent, **more)


def _logit_gain(rope: RopeScaling) -> float:
    """Return the factor of attention's logits for stretched positions: the square of YaRN's factor of all
    frequencies.
    """
    mscale, factor = rope.settings.get("mscale_all_dim"), rope.settings.get("factor", 1.0)
    if rope.kind == "default" or not mscale or factor <= 1:
        return 1.0
    return float((0.1 * mscale * math.log(factor) + 1.0) ** 2)


def dense_first(num_dense: int, num_layers: int, experts: Experts, shared: int) -> list[LayerSpec]:
    """Return layers of which the first `num_dense` have an MLP, and the others experts. shared: columns of the shared
    expert.
    """
    return [
        LayerSpec() if layer < num_dense else LayerSpec(experts=experts, intermediate=shared)
        for layer in range(num_layers)
    ]


def parse_sigmoid_experts(keys: ConfigKeys) -> tuple[Experts, int]:
    """Return experts that are chosen by sigmoids, in groups, and the columns of the shared expert."""
    keys.only("topk_method", "noaux_tc")
    keys.only("scoring_func", "sigmoid")
    keys.only("norm_topk_prob", True)
    experts, shared = parse_shared_experts(keys, is_normalised=True)
    return replace(in_groups(keys, experts), is_sigmoid=True), shared


def in_groups(keys: ConfigKeys, experts: Experts, group_best: int = 2) -> Experts:
    """Return experts that are chosen among the best groups. group_best: as in `Experts`."""
    groups, taken = keys.optional("n_group", int) or 1, keys.optional("topk_group", int) or 1
    least = group_best * groups
    if experts.num_experts % groups or taken > groups or (groups > 1 and experts.num_experts < least):
        raise ModelError(
            f"model: {keys.source}: n_group is {groups} and topk_group {taken}, of {experts.num_experts} experts; "
            f"wanted groups of {group_best} or more, alike, and no more taken than there are"
        )
    if experts.per_token > experts.num_experts // groups * taken:
        raise ModelError(
            f"model: {keys.source}: num_experts_per_tok is {experts.per_token}; wanted no more than {taken} of "
            f"{groups} groups have"
        )
    return replace(experts, groups=groups, groups_taken=taken, group_best=group_best)


def parse_shared_experts(keys: ConfigKeys, is_normalised: bool) -> tuple[Experts, int]:
    """Return experts beside a shared expert, and the columns of the shared expert."""
    experts = parse_experts(keys, "n_routed_experts", "moe_intermediate_size", is_normalised)
    shared = keys.positive("n_shared_experts", int) * experts.intermediate
    gain = keys.positive("routed_scaling_factor", float)
    return replace(experts, is_shared=True, is_whole=True, gain=float(gain)), shared


def count_dense(keys: ConfigKeys, num_layers: int) -> int:
    """Return how many first layers have no experts. Raises ModelError if no layer has any."""
    num_dense = keys.optional("first_k_dense_replace", int) or 0
    if num_dense >= num_layers:
        raise ModelError(
            f"model: {keys.source}: first_k_dense_replace is {num_dense}; wanted less than {num_layers}, all layers"
        )
    return num_dense
