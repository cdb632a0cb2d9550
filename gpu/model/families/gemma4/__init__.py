"""Gemma 4, its text: layers with a window beside layers that see everything, which have KV heads of their own.

Queries, keys and values are normed a head, logits of attention are not scaled, and keys of layers that see everything
are rotated in part. Where a checkpoint has it: values are the keys' projection there, the last layers have the keys and
values of earlier ones, each layer gets a small embedding of its own, and a mixture of experts stands beside each MLP.
Of a checkpoint that sees and hears, too, the decoder alone is read.
"""

import logging
from collections.abc import Mapping
from typing import Any

from gpu.model.answers.gemma import GEMMA, GEMMA_THOUGHT
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import make_rope
from gpu.model.families.gemma4.gguf_form import GGUF
from gpu.model.families.gemma4.shapes import SHAPES
from gpu.model.family import LAYER_TENSORS, QK_NORMS, Family, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.spec import Architecture, Experts, KvHeads, LayerInputs, LayerSpec, ModelError, RopeScaling

log = logging.getLogger(__name__)

_WINDOW, _WHOLE = "sliding_attention", "full_attention"
_PATTERN = 6  # one layer of so many sees everything, where `layer_types` is absent
_ROPES = {
    _WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
    _WHOLE: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_MULTIMODAL = ("vision_config", "audio_config")
_NORMS = {
    "post_attention_layernorm.weight": "attention_post_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "mlp_post_norm",
    "layer_scalar": "layer_scale",
}
_INPUTS = {
    "per_layer_input_gate.weight": "input_gate",
    "per_layer_projection.weight": "input_projection",
    "post_per_layer_input_norm.weight": "input_norm",
}
_EXPERTS = {
    "router.proj.weight": "router",
    "router.scale": "router_norm",
    "router.per_expert_scale": "expert_gains",
    "pre_feedforward_layernorm_2.weight": "experts_norm",
    "post_feedforward_layernorm_1.weight": "mlp_own_post_norm",
    "post_feedforward_layernorm_2.weight": "experts_post_norm",
}
_STACKED = {"experts.gate_up_proj": "experts_gate_up", "experts.down_proj": "experts_down"}

_APART = {"experts.*.gate_up_proj.weight": "gate_up", "experts.*.down_proj.weight": "down"}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("attention_bias", False)
    keys.only("use_bidirectional_attention", None, "vision")  # between the tokens of pictures, which are not served
    num_layers, max_positions = (keys.positive(key, int) for key in ("num_hidden_layers", "max_position_embeddings"))
    is_window = _windows(keys, num_layers)
    whole, local = _heads(keys, is_window)
    sources = _sources(keys, is_window)
    window = min(keys.positive("sliding_window", int), max_positions)
    ropes = _ropes(keys, max_positions)
    widths = _widths(keys, sources)
    experts, same = _experts(keys), keys.flag("attention_k_eq_v")
    specs = [
        LayerSpec(
            qk_norm=True, post_norms=True, activation="gelu_tanh", experts=experts, value_norm=True, is_scaled=True,
            window_tokens=window if own else None, rope=ropes[_WINDOW] if own else None,
            heads=local if own and local != whole else None, intermediate=width,
            keys_are_values=same and not own, kv_of=source,
        )
        for own, source, width in zip(is_window, sources, widths, strict=True)
    ]  # fmt: skip
    return parse_sizes(
        keys, name, specs, rope=ropes[_WHOLE], max_context_tokens=max_positions, num_kv_heads=whole.count,
        dim=whole.dim, query_gain=whole.dim**0.5, embedding_scale=keys.positive("hidden_size", int) ** 0.5,
        logit_cap=keys.optional("final_logit_softcapping", float), layer_inputs=_layer_inputs(keys),
    )  # fmt: skip


def _windows(keys: ConfigKeys, num_layers: int) -> list[bool]:
    """Return which layers have a window: the last one has none, whatever the file says, as in transformers."""
    types = keys.get("layer_types")
    if types is None:
        types = [_WHOLE if (layer + 1) % _PATTERN == 0 else _WINDOW for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(one not in (_WINDOW, _WHOLE) for one in types):
        wanted = f"{num_layers} of {_WINDOW!r}, {_WHOLE!r}"
        raise ModelError(f"model: {keys.source}: layer_types is {shown(types)}; wanted {wanted}")
    return [one == _WINDOW for one in types[:-1]] + [False]


def _heads(keys: ConfigKeys, is_window: list[bool]) -> tuple[KvHeads, KvHeads]:
    """Return the KV heads of layers that see everything, and of those with a window. Configurations state them by keys
    of their own, or layer by layer as transformers writes them.
    """
    local = KvHeads(keys.positive("num_key_value_heads", int), keys.positive("head_dim", int))
    own_count, dim = keys.optional("num_global_key_value_heads", int), keys.positive("global_head_dim", int)
    whole = KvHeads(own_count if own_count and keys.flag("attention_k_eq_v") else local.count, dim)
    given = keys.get("per_layer_config")
    if given is not None:
        whole = _layer_heads(keys, given, [str(layer) for layer, own in enumerate(is_window) if not own], local)
    heads = keys.positive("num_attention_heads", int)
    for one in (whole, local):
        if heads % one.count:
            raise ModelError(f"model: {keys.source}: {heads} query heads over {one.count} KV heads; wanted a multiple")
        if one.dim < 2 or one.dim % 2:
            raise ModelError(f"model: {keys.source}: head_dim is {one.dim}; wanted an even number")
    return whole, local


def _layer_heads(keys: ConfigKeys, given: Any, layers: list[str], local: KvHeads) -> KvHeads:
    """Return the heads that `per_layer_config` gives to all layers that see everything, and to no others."""
    known = ("head_dim", "num_key_value_heads")
    found = list(given.values()) if isinstance(given, Mapping) else []
    is_served = isinstance(given, Mapping) and {*map(str, given)} == {*layers} and all(
        isinstance(one, Mapping) and one == found[0] and not {*one} - {*known}
        and all(type(size) is int and size > 0 for size in one.values())
        for one in found
    )  # fmt: skip
    if not is_served:
        raise ModelError(
            f"model: {keys.source}: per_layer_config is {shown(given)}; served: the same {' and '.join(known)} in all "
            f"layers of {_WHOLE}, and nothing else"
        )
    return KvHeads(found[0].get(known[1], local.count), found[0].get(known[0], local.dim))


def _sources(keys: ConfigKeys, is_window: list[bool]) -> list[int | None]:
    """Return for each layer the one whose keys and values it has: the last of its kind that makes its own."""
    num_layers, num_shared = len(is_window), keys.optional("num_kv_shared_layers", int) or 0
    if num_shared >= num_layers:
        raise ModelError(
            f"model: {keys.source}: num_kv_shared_layers is {num_shared}; wanted less than {num_layers}, all layers"
        )
    first = num_layers - num_shared
    last = {own: layer for layer, own in enumerate(is_window[:first])}
    if {*is_window[first:]} - {*last}:
        raise ModelError(
            f"model: {keys.source}: num_kv_shared_layers is {num_shared}; wanted a layer of each kind before these"
        )
    return [None if layer < first else last[own] for layer, own in enumerate(is_window)]


def _ropes(keys: ConfigKeys, max_positions: int) -> dict[str, RopeScaling]:
    if keys.get("rope_scaling") is not None:
        raise ModelError(
            f"model: {keys.source}: rope_scaling is {shown(keys.get('rope_scaling'))}; served: rope_parameters, one "
            "entry a kind of layer"
        )
    given = keys.get("rope_parameters") or _ROPES
    if not isinstance(given, Mapping) or any(kind not in _ROPES for kind in given):
        raise ModelError(f"model: {keys.source}: rope_parameters is {shown(given)}; wanted one entry a kind of layer")
    found = {}
    for kind in _ROPES:
        own = given.get(kind) or {}
        share = own.get("partial_rotary_factor", 1.0) if isinstance(own, Mapping) else 1.0
        if share != 1.0 and own.get("rope_type") != "proportional":
            raise ModelError(
                f"model: {keys.source}: rope_parameters has partial_rotary_factor {share!r} for {kind}; served: 1.0, "
                "or of rope_type 'proportional'"
            )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ModelError(f"model: {keys.source}: partial_rotary_factor is {share!r}; wanted a share of a head")
        found[kind] = make_rope(own, None, max_positions, keys.source)
    return found


def _widths(keys: ConfigKeys, sources: list[int | None]) -> list[int | None]:
    """Return the columns of each layer's MLP, None: the model's."""
    is_wide, one = keys.flag("use_double_wide_mlp"), keys.positive("intermediate_size", int)
    return [2 * one if is_wide and source is not None else None for source in sources]


def _experts(keys: ConfigKeys) -> Experts | None:
    sizes = "num_experts", "top_k_experts", "moe_intermediate_size"
    if not keys.flag("enable_moe_block"):
        for key in sizes:
            keys.get(key)
        return None
    count, per_token, intermediate = (keys.positive(key, int) for key in sizes)
    if per_token > count:
        raise ModelError(f"model: {keys.source}: top_k_experts is {per_token}; wanted at most {count}, num_experts")
    return Experts(count, per_token, intermediate, is_normalised=True, beside_mlp=True)


def _layer_inputs(keys: ConfigKeys) -> LayerInputs | None:
    width, vocab = keys.optional("hidden_size_per_layer_input", int), keys.positive("vocab_size", int)
    rows = keys.optional("vocab_size_per_layer_input", int)
    if width is None:
        return None
    if rows is None or rows < vocab:
        raise ModelError(
            f"model: {keys.source}: vocab_size_per_layer_input is {rows}; wanted {vocab} or more, a row for each token"
        )
    return LayerInputs(width, rows)


def unwrap(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a model that sees and hears, and say so."""
    text = config.get("text_config")
    if config.get("model_type") not in ("gemma4", "gemma4_unified") or not isinstance(text, dict):
        return config
    others = [key for key in _MULTIMODAL if config.get(key)]
    if others:
        log.info("model event=text_alone reason='%s: pictures, video and sound are not served'", ", ".join(others))
    beside = {key: config[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in config}
    return beside | text


def tensors(shape: Architecture) -> dict[str, str]:
    has_experts = any(spec.experts is not None for spec in shape.layer_pattern)
    inputs = {} if shape.layer_inputs is None else _INPUTS
    experts = _EXPERTS | (_APART if shape.experts_apart else _STACKED) if has_experts else {}
    return LAYER_TENSORS | _NORMS | QK_NORMS | inputs | experts


FAMILY = Family(
    model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
    parse=parse,
    tensors=tensors,
    defaults={
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 2304,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 30,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
    },
    unwrap=unwrap,
    prefixes=(("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", "")),
    skipped=(
        "model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.",
        "model.vision_embedder.", "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.",
    ),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(GEMMA,),
    reasoning=(GEMMA_THOUGHT,),
)  # fmt: skip
