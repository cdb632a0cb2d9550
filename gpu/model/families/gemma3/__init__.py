"""Gemma 3, its text: five layers with a window, whose rotation has a base of its own, to one that sees everything.

Norms stand before and behind attention and MLP, and of each query and key head; their weights are stored less one. Of a
checkpoint that sees pictures, too, the decoder alone is read.
"""

from functools import partial
from typing import Any

from gpu.model.answers.gemma import GEMMA
from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import make_rope
from gpu.model.family import LAYER_TENSORS, QK_NORMS, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError, RopeScaling

_LOCAL_THETA = 10_000.0


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("attn_logit_softcapping", None)
    keys.only("final_logit_softcapping", None)
    keys.only("attention_bias", False)
    keys.only("use_bidirectional_attention", False)
    num_layers, max_positions = (keys.positive(key, int) for key in ("num_hidden_layers", "max_position_embeddings"))
    other = keys.optional("_sliding_window_pattern", int)  # as transformers writes it
    pattern = other or keys.positive("sliding_window_pattern", int)
    keys.get("sliding_window_pattern")
    is_window_layer = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    windows = find_windows(keys, keys.optional("sliding_window", int), is_window_layer, max_positions)
    whole, local = _ropes(keys, max_positions)
    types = keys.get("layer_types")
    is_local = [one == "sliding_attention" for one in types] if types is not None else is_window_layer
    specs = [
        LayerSpec(qk_norm=True, post_norms=True, activation="gelu_tanh", window_tokens=window,
                  rope=local if own else None)
        for window, own in zip(windows, is_local, strict=True)
    ]  # fmt: skip
    dim, hidden = keys.positive("head_dim", int), keys.positive("hidden_size", int)
    scalar = keys.positive("query_pre_attn_scalar", float)
    return parse_sizes(
        keys, name, specs, rope=whole, max_context_tokens=max_positions, norm_weight_offset=1.0,
        query_gain=(dim / scalar) ** 0.5, embedding_scale=hidden**0.5,
    )  # fmt: skip


def _ropes(keys: ConfigKeys, max_positions: int) -> tuple[RopeScaling, RopeScaling]:
    """Return the scaling of the layers that see everything, and of those with a window."""
    theta, local_theta = keys.get("rope_theta"), keys.get("rope_local_base_freq")
    new, old = keys.get("rope_parameters"), keys.get("rope_scaling")
    if isinstance(new, dict) and old is None:
        unknown = [key for key in new if key not in ("full_attention", "sliding_attention")]
        if unknown:
            raise ModelError(
                f"model: {keys.source}: rope_parameters has {unknown[0]}; wanted one entry a kind of layer"
            )
        whole, local = new.get("full_attention") or {}, new.get("sliding_attention") or {}
    else:
        whole, local = old or {}, {}
    return (
        make_rope(whole, theta, max_positions, keys.source),
        make_rope(local, local_theta, max_positions, keys.source),
    )


def unwrap(config: dict[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a model that sees pictures, with the end tokens that stand beside it."""
    text = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text, dict):
        return config
    beside = {key: config[key] for key in ("bos_token_id", "eos_token_id", "tie_word_embeddings") if key in config}
    return beside | text


def tensors(shape: Architecture) -> dict[str, str]:
    norms = {
        "post_attention_layernorm.weight": "attention_post_norm",
        "pre_feedforward_layernorm.weight": "mlp_norm",
        "post_feedforward_layernorm.weight": "mlp_post_norm",
    }
    return LAYER_TENSORS | norms | QK_NORMS


_27B_LAYERS = 62  # by which llama.cpp tells the one whose queries are scaled by hidden / heads


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    is_large = config.get("num_hidden_layers") == _27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_large else config["head_dim"]
    return {"rope_local_base_freq": keys.number("rope.freq_base_swa", 10_000.0), "query_pre_attn_scalar": scalar}


GGUF = GgufForm("gemma3", translate=translate_gguf, has_windows=True, merges_by_id=True)

_shape = partial(
    published_sizes, model_type="gemma3_text", sliding_window=1024, rope_scaling={"type": "linear", "factor": 8.0}
)
SHAPES = {
    "tiny-gemma3": _shape(256, 512, 6, 4, 2, 1024, 262_144, 1_000_000.0, sliding_window=128),
    "gemma-3-1b": _shape(
        1152, 6912, 26, 4, 1, 262_144, 32_768, 1_000_000.0, sliding_window=512, rope_scaling=None
    ),
    "gemma-3-4b": _shape(2560, 10_240, 34, 8, 4, 262_208, 131_072, 1_000_000.0),
    "gemma-3-12b": _shape(3840, 15_360, 48, 16, 8, 262_208, 131_072, 1_000_000.0),
    "gemma-3-27b": _shape(
        5376, 21_504, 62, 32, 16, 262_208, 131_072, 1_000_000.0, head_dim=128, query_pre_attn_scalar=168
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("gemma3_text", "gemma3"),
    parse=parse,
    tensors=tensors,
    defaults={
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": _LOCAL_THETA,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
    unwrap=unwrap,
    prefixes=(("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.", "")),
    skipped=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    gguf=GGUF,
    shapes=SHAPES,
    calls=(GEMMA,),
)
