"""Muse Glimmer, its text: windows in three layers of four, no rotation in the others, gates behind attention.

Embeddings are normed (as they are loaded) and so are queries and keys, all without weights. Norms behind attention and
MLP have an epsilon of their own. Of a checkpoint that sees pictures the decoder alone is read.
"""

import logging
from functools import partial
from typing import Any

import numpy as np

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.families.muse_glimmer.answers import ATEM, TO_SELF
from gpu.model.family import LAYER_TENSORS, Family, find_windows, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.gguf.keys import GgufForm, GgufKeys, read_window_layers
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import NO_ROTATION, Architecture, LayerSpec, ModelError

log = logging.getLogger(__name__)

_PATTERN = 4  # one layer of so many sees everything and rotates nothing, counted from the last one


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_activation", "silu")
    keys.only("attention_bias", False)
    if keys.flag("tie_word_embeddings"):
        raise ModelError(
            f"model: {keys.source}: tie_word_embeddings is True; served: False, since embeddings are normed"
        )
    num_layers = keys.positive("num_hidden_layers", int)
    is_whole = [(num_layers - 1 - layer) % _PATTERN == 0 for layer in range(num_layers)]
    rope, max_positions = parse_rope(keys)
    windows = find_windows(keys, keys.optional("sliding_window", int), [not one for one in is_whole], max_positions)
    specs = [
        LayerSpec(qk_norm=True, plain_qk_norm=True, post_norms=True, output_gate=True, has_gate_apart=True,
                  window_tokens=window, rope=None if turns else NO_ROTATION)
        for window, turns in zip(windows, _rotates(keys, [not one for one in is_whole], rope.theta), strict=True)
    ]  # fmt: skip
    cap = keys.positive("final_logit_softcapping", float)
    return parse_sizes(
        keys, name, specs, rope=rope, max_context_tokens=max_positions, norm_weight_offset=1.0, final_norm_offset=0.0,
        query_gain=float(keys.positive("qk_scale_factor", float)), logit_cap=float(cap),
        logit_gain=float(keys.positive("output_multiplier", float)), has_normed_embedding=True,
        post_norm_eps=float(keys.positive("post_norm_eps", float)),
    )  # fmt: skip


def _rotates(keys: ConfigKeys, absent: list[bool], theta: float) -> list[bool]:
    """Return which layers rotate: those whose base is not 0, which is the model's."""
    given = keys.get("layer_rope_theta")
    if given is None:
        return absent
    if not isinstance(given, list) or len(given) != len(absent) or any(one not in (0, theta) for one in given):
        raise ModelError(
            f"model: {keys.source}: layer_rope_theta is {shown(given)}; wanted {theta:g} or 0 for each of "
            f"{len(absent)} layers"
        )
    return [one != 0 for one in given]


def unwrap(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a model that sees pictures, and say so."""
    text = config.get("text_config")
    if config.get("model_type") != "muse_glimmer" or not isinstance(text, dict):
        return config
    log.info("model event=text_alone reason='vision_config: pictures and video are not served'")
    beside = {key: config[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in config}
    return beside | text


def tensors(shape: Architecture) -> dict[str, str]:
    return LAYER_TENSORS | {
        "self_attn.gate_proj.weight": "output_gate",
        "post_attention_layernorm.weight": "attention_post_norm",
        "pre_feedforward_layernorm.weight": "mlp_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
    }


_QUERY_NORM, _KEY_NORM = ".attn_q_norm.weight", ".attn_k_norm.weight"


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read windows, which say what rotates, and the factor of queries, which files have as weights of their norm.

    Files do not say the epsilon of norms behind attention and MLP, which is llama.cpp's, 1e-8.
    """
    windows = read_window_layers(keys, config, _PATTERN)
    theta, dim = keys.number("rope.freq_base_swa", config["rope_theta"]), config["head_dim"]
    return windows | {
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
        "output_multiplier": keys.number("logit_scale", 0.0),
        "qk_scale_factor": _gain(keys, _QUERY_NORM, dim) * _gain(keys, _KEY_NORM, dim),
        "rope_theta": theta,
        "layer_rope_theta": [theta if one == "sliding_attention" else 0 for one in windows["layer_types"]],
        "post_norm_eps": 1e-8,
    }


def _gain(keys: GgufKeys, end: str, dim: int) -> float:
    """Return the number that all weights of all layers' norms of queries, or of keys, are. Raises ModelError."""
    found: set[float] = set()
    for layer in range(keys.num_layers):
        tensor = keys.file.tensors.get(f"blk.{layer}{end}")
        if tensor is None or tensor.shape != (dim,):
            raise ModelError(f"model: {keys.path}: tensor blk.{layer}{end} is missing or no row of {dim} numbers")
        found |= set(tensor.read_numbers())
    if len(found) != 1 or min(found) <= 0:
        raise ModelError(f"model: {keys.path}: tensors {end[1:]} have several numbers; wanted one, the same everywhere")
    return float(str(np.float32(found.pop())))


# The `gguf` package does not know the architecture, whose names are Gemma 3's, and of gates AFMoE's.
GGUF = GgufForm(
    "muse-glimmer", translate=translate_gguf, has_windows=True, has_neighbour_pairs=True, tensor_names="gemma3",
    own_names={"self_attn.gate_proj.weight": "attn_gate.weight"}, read_before=(_QUERY_NORM, _KEY_NORM),
    end_tokens=frozenset({"<|eot|>"}), inner_tokens=frozenset({"<|eom|>"}),
)  # fmt: skip

_shape = partial(published_sizes, model_type="muse_glimmer_text")
SHAPES = {
    "tiny-muse-glimmer": _shape(
        256, 512, 5, 4, 2, 1024, 131_072, 10_000.0, head_dim=64, sliding_window=64, tie_word_embeddings=False
    ),
    "muse-glimmer-30b": _shape(6656, 19_968, 52, 32, 2, 202_048, 131_072, 10_000.0),
}

FAMILY = Family(
    model_types=("muse_glimmer_text", "muse_glimmer"),
    parse=parse,
    tensors=tensors,
    defaults={
        "final_logit_softcapping": 20.0,
        "head_dim": 128,
        "hidden_size": 6656,
        "intermediate_size": 19_968,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 3.87,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": 2048,
        "vocab_size": 202_048,
    },
    unwrap=unwrap,
    prefixes=(("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", "")),
    skipped=("model.vision_", "vision_"),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(ATEM,),
    reasoning=(TO_SELF,),
)
