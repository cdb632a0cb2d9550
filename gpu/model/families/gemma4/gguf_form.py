"""Gemma 4 in GGUF files: sizes layer by layer, and factors of frequencies that say which part of a head is rotated."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys

_STILL = 1e20  # a factor from which on a pair is not rotated: files have 1e30


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, types = keys.num_layers, config.get("layer_types")
    if not isinstance(types, list) or len(types) != num_layers:
        raise keys.refused("attention.sliding_window_pattern", types, "one entry for each layer")
    is_whole = [one == "full_attention" for one in types]
    num_shared = keys.size("attention.shared_kv_layers", 0) or 0
    kv_heads = _by_layer(keys, "attention.head_count_kv")
    dim, local_dim = config["head_dim"], keys.size("attention.key_length_swa", 1) or config["head_dim"]
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if (found := keys.size(key, 1)) not in (None, local_dim):
            raise keys.refused(key, found, f"{local_dim}, as attention.key_length_swa is")
    local = _alike(
        keys, "attention.head_count_kv", [n for n, whole in zip(kv_heads, is_whole, strict=True) if not whole]
    )
    whole = _alike(keys, "attention.head_count_kv", [n for n, one in zip(kv_heads, is_whole, strict=True) if one])
    own = [layer for layer, one in enumerate(is_whole) if one and layer < num_layers - num_shared]
    inputs = keys.size("embedding_length_per_layer_input", 0) or 0
    table = keys.file.tensors.get("per_layer_token_embd.weight")
    theta = config["rope_theta"]
    return _widths(keys, num_shared) | _mixture(keys, config) | {
        "head_dim": local_dim,
        "num_key_value_heads": local or whole,
        "per_layer_config": {
            str(layer): {"head_dim": dim, "num_key_value_heads": whole} for layer, one in enumerate(is_whole) if one
        },
        "attention_k_eq_v": bool(own) and f"blk.{own[0]}.attn_v.weight" not in keys.file.tensors,
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": _rotation(keys, config, theta),
            "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
        },
    }  # fmt: skip


def _by_layer(keys: GgufKeys, key: str) -> list[int]:
    """Return a size for each layer. Raises ModelError for anything else."""
    value = keys.take(key)
    found = value if isinstance(value, list) else [value] * keys.num_layers
    if len(found) != keys.num_layers or any(type(one) is not int or one < 1 for one in found):
        raise keys.refused(key, value, "a whole number, or one for each layer")
    return found


def _alike(keys: GgufKeys, key: str, found: list[int]) -> int | None:
    if len(set(found)) > 1:
        raise keys.refused(key, found, "one number for layers of a kind")
    return found[0] if found else None


def _widths(keys: GgufKeys, num_shared: int) -> dict[str, Any]:
    found = _by_layer(keys, "feed_forward_length")
    first = len(found) - num_shared
    is_wide = found[first:] == [2 * found[0]] * num_shared and num_shared > 0
    if found[:first] != found[:1] * first or (not is_wide and found[first:] != found[:1] * num_shared):
        raise keys.refused("feed_forward_length", found, "one number, or twice as many in layers with others' keys")
    return {"intermediate_size": found[0], "use_double_wide_mlp": is_wide}


def _mixture(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    if "num_experts" not in config:
        return {}
    size = keys.positive("expert_feed_forward_length")
    return {
        "enable_moe_block": True, "moe_intermediate_size": size, "top_k_experts": config["num_experts_per_tok"],
        "num_experts_per_tok": None,
    }  # fmt: skip


def _rotation(keys: GgufKeys, config: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return the rotation of layers that see everything: factors of 1 in front, and of pairs that stand still."""
    factors = config.get("rope_scaling", {}).get("long_factor")
    if factors is None:
        return {"rope_type": "default", "rope_theta": theta}
    turning = [factor for factor in factors if factor < _STILL]
    if any(factor != 1.0 for factor in turning) or factors[: len(turning)] != turning:
        raise keys.refused("rope_freqs.weight", factors, "ones, and behind them 1e30")
    return {
        "rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": len(turning) / len(factors),
    }  # fmt: skip


GGUF = GgufForm(
    "gemma4", translate=translate, has_experts=None, has_windows=True, end_tokens=frozenset({"<turn|>"}),
    listed=("attention.head_count_kv", "feed_forward_length"),
    own_names={"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"},
)  # fmt: skip
