"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, rotation of a part of each head, `longrope`.

`longrope` has frequencies for texts up to the original positions and others beyond: a deployment has one set, see
`gpu.layers.rope`.
"""

from gpu.model.config_keys import ConfigKeys
from gpu.model.config_rope import make_rope
from gpu.model.families.phi3.shapes import SHAPES
from gpu.model.family import LAYER_TENSORS, Family, find_windows, parse_sizes
from gpu.model.gguf.keys import GgufForm
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
