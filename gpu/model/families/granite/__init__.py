"""Granite: a Llama with multipliers of embeddings, residuals, attention and logits.

All residuals have one multiplier r, and norms do not see how long a hidden state is, but for their epsilon. So hidden
states here are those of the checkpoint over r: embeddings are divided by r, epsilons by its square, and residuals stay.
What multiplies attention's logits is a factor of rotated queries and keys, as YaRN has one.
"""

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import parse_rope
from gpu.model.families.granite.gguf_form import GGUF
from gpu.model.families.granite.shapes import SHAPES
from gpu.model.family import LAYER_TENSORS, MLP_BIASES, OUTPUT_BIAS, QKV_BIASES, Family, parse_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError, RopeScaling


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    has_bias, mlp_bias = keys.flag("attention_bias"), keys.flag("mlp_bias")
    spec = LayerSpec(qkv_bias=has_bias, output_bias=has_bias, mlp_bias=mlp_bias)
    of_residuals, of_embeddings, of_attention, of_logits = (
        keys.positive(key, float)
        for key in ("residual_multiplier", "embedding_multiplier", "attention_multiplier", "logits_scaling")
    )
    rope, max_positions = parse_rope(keys)
    if rope.kind != "default":
        raise ModelError(f"model: {keys.source}: rope scaling {rope.kind!r}; served in a granite: default")
    hidden, heads = keys.positive("hidden_size", int), keys.positive("num_attention_heads", int)
    dim = keys.optional("head_dim", int) or hidden // heads
    settings = {
        "factor": 1.0, "attention_factor": attention_factor(of_attention, dim),
        "original_max_position_embeddings": max_positions,
    }  # fmt: skip
    return parse_sizes(
        keys, name, (spec,), rope=RopeScaling("yarn", rope.theta, settings), max_context_tokens=max_positions,
        rms_norm_eps=keys.positive("rms_norm_eps", float) / of_residuals**2,
        embedding_scale=of_embeddings / of_residuals, logit_gain=1 / of_logits,
    )  # fmt: skip


def attention_factor(multiplier: float, dim: int) -> float:
    """Return the factor of rotated queries, and of keys, that makes `multiplier` of logits times `dim ** -0.5`."""
    return float((multiplier * dim**0.5) ** 0.5)


def tensors(shape: Architecture) -> dict[str, str]:
    spec = shape.layer_pattern[0]
    biases = (QKV_BIASES | OUTPUT_BIAS if spec.qkv_bias else {}) | (MLP_BIASES if spec.mlp_bias else {})
    return LAYER_TENSORS | biases


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
