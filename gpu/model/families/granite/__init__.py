"""Granite: a Llama with multipliers of embeddings, residuals, attention and logits.

All residuals have one multiplier r, and norms do not see how long a hidden state is, but for their epsilon. So hidden
states here are those of the checkpoint over r: embeddings are divided by r, epsilons by its square, and residuals stay.
What multiplies attention's logits is a factor of rotated queries and keys, as YaRN has one.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.family import LAYER_TENSORS, MLP_BIASES, OUTPUT_BIAS, QKV_BIASES, Family, parse_sizes
from gpu.model.gguf.keys import GgufForm, GgufKeys
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import NO_ROTATION, Architecture, LayerSpec, ModelError, RopeScaling


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    has_bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
    spec = LayerSpec(qkv_bias=has_bias, output_bias=has_bias, mlp_bias=mlp_bias)
    return parse_sizes(keys, name, (spec,), **parse_multipliers(keys))


def parse_multipliers(keys: ConfigKeys, is_rotated: bool = True) -> dict[str, Any]:
    """Return the fields of an Architecture that follow from multipliers and positions. is_rotated: whether queries and
    keys are. Raises ModelError for a scaling of positions.
    """
    of_residuals, of_embeddings, of_attention, of_logits = (
        keys.positive(key, float)
        for key in ("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling")
    )
    rope, max_positions = parse_rope(keys)
    if rope.kind != "default":
        raise ModelError(f"model: {keys.source}: rope scaling {rope.kind!r}; served in a granite: default")
    hidden, heads = keys.positive("hidden_size", int), keys.positive("num_attention_heads", int)
    dim = keys.optional("head_dim", int) or hidden // heads
    settings = {"attention_factor": (of_attention * dim**0.5) ** 0.5}  # of queries and of keys: its square is of logits
    if is_rotated:
        settings |= {"factor": 1.0, "original_max_position_embeddings": max_positions}
    return {
        "rope": RopeScaling("yarn", rope.theta, settings) if is_rotated else replace(NO_ROTATION, settings=settings),
        "max_context_tokens": max_positions,
        "rms_norm_eps": keys.positive("rms_norm_eps", float) / of_residuals**2,
        "embedding_scale": of_embeddings / of_residuals,
        "logit_gain": 1 / of_logits,
    }


def tensors(shape: Architecture) -> dict[str, str]:
    spec = shape.layer_pattern[0]
    biases = (QKV_BIASES | OUTPUT_BIAS if spec.qkv_bias else {}) | (MLP_BIASES if spec.mlp_bias else {})
    return LAYER_TENSORS | biases


def translate_gguf(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Read the multipliers; as in llama.cpp one that is 0 or absent is none, of attention that of its head."""
    return {
        "attention_multiplier": keys.number("attention.scale") or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale") or 1.0,
        "residual_multiplier": keys.number("residual_scale") or 1.0,
        "logits_scaling": keys.number("logit_scale") or 1.0,
    }


GGUF = GgufForm("granite", translate=translate_gguf, has_neighbour_pairs=True)

_MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}

_shape = partial(published_sizes, model_type="granite", rms_norm_eps=1e-5, **_MULTIPLIERS)
SHAPES = {
    "tiny-granite": _shape(
        256, 512, 4, 4, 2, 1024, 131_072, 10_000_000.0, attention_multiplier=0.0625, embedding_multiplier=0.5
    ),
    "granite-3.3-8b": _shape(
        4096, 12_800, 40, 32, 8, 49_159, 131_072, 10_000_000.0, attention_multiplier=0.0078125,
        logits_scaling=16.0, tie_word_embeddings=True,
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("granite",),
    parse=parse,
    tensors=tensors,
    defaults={
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "logits_scaling": 1.0,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "residual_multiplier": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": 32_000,
    },
    gguf=GGUF,
    shapes=SHAPES,
)
