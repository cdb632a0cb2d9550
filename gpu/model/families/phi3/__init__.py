"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, rotation of a part of each head, `longrope`.

`longrope` has frequencies for texts up to the original positions and others beyond: a deployment has one set, see
`gpu.layers.rope`.
"""

from functools import partial
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import make_rope
from gpu.model.family import LAYER_TENSORS, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec

_ORIGINAL = "original_max_position_embeddings"


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("lm_head_bias", False)
    keys.only("full_attn_mod", 1)
    keys.only("interpolate_factor", 1)
    num_layers = keys.positive("num_hidden_layers", int)
    max_positions = keys.positive("max_position_embeddings", int)
    windows = find_windows(keys, keys.optional("sliding_window", int), [True] * num_layers, max_positions)
    given = dict(keys.get("rope_scaling") or keys.get("rope_parameters") or {})
    keys.get("rope_parameters")
    kind = given.get("rope_type") or given.get("type")
    if kind in ("su", "yarn"):  # what it was called before it had a name
        given["rope_type"] = kind = "longrope"
    if kind == "longrope":
        given.setdefault(_ORIGINAL, keys.get(_ORIGINAL))
    keys.get(_ORIGINAL)
    return parse_sizes(
        keys, name, [LayerSpec(window_tokens=window) for window in windows],
        rope=make_rope(given, keys.get("rope_theta"), max_positions, keys.source), max_context_tokens=max_positions,
        rotates_part=True,
    )  # fmt: skip


def tensors(shape: Architecture) -> dict[str, str]:
    fused = {"self_attn.qkv_proj.weight": "qkv", "mlp.gate_up_proj.weight": "gate_up"}
    alone = ("query", "key", "value", "gate", "up")
    return {name: what for name, what in LAYER_TENSORS.items() if what not in alone} | fused


_shape = partial(published_sizes, model_type="phi3")


def _longrope(pairs: int) -> dict[str, Any]:
    """Return factors of no model: random weights have no use for the real ones."""
    long = [1.0 + 47.0 * pair / (pairs - 1) for pair in range(pairs)]
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": long}


SHAPES = {
    "tiny-phi3": _shape(
        384, 512, 4, 4, 2, 1024, 262_144, 10_000.0, partial_rotary_factor=0.75, rope_scaling=_longrope(36)
    ),
    "phi-3-mini": _shape(3072, 8192, 32, 32, 32, 32_064, 131_072, 10_000.0, rope_scaling=_longrope(48)),
    "phi-3-mini-4k": _shape(3072, 8192, 32, 32, 32, 32_064, 4096, 10_000.0, sliding_window=2047),
    "phi-3-medium": _shape(5120, 17_920, 40, 40, 10, 32_064, 131_072, 10_000.0, rope_scaling=_longrope(64)),
    "phi-4": _shape(5120, 17_920, 40, 40, 10, 100_352, 16_384, 250_000.0),
    "phi-4-mini": _shape(
        3072, 8192, 32, 24, 8, 200_064, 131_072, 10_000.0, partial_rotary_factor=0.75, rope_scaling=_longrope(48),
        tie_word_embeddings=True,
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("phi3",),
    parse=parse,
    tensors=tensors,
    defaults={
        "max_position_embeddings": 4096,
        _ORIGINAL: 4096,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    },
    harmless=frozenset({"embd_pdrop", "resid_pdrop"}),
    gguf=GgufForm("phi3", has_windows=True),
    shapes=SHAPES,
)
