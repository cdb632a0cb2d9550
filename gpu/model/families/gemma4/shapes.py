"""Gemma 4's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

_WINDOW, _WHOLE = "sliding_attention", "full_attention"


def _shape(hidden: int, intermediate: int, layers: int, *sizes: int, every: int, **more: Any) -> dict[str, Any]:
    """Return a configuration; every: one layer of so many sees everything."""
    found = published_sizes(hidden, intermediate, layers, *sizes, theta=0.0, model_type="gemma4_text")
    del found["rope_theta"]  # each kind of layer has its own
    types = [_WHOLE if (layer + 1) % every == 0 else _WINDOW for layer in range(layers)]
    return found | {
        "layer_types": types, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0,
    } | more  # fmt: skip


_SMALL = {"hidden_size_per_layer_input": 256, "sliding_window": 512}
_LARGE = {"attention_k_eq_v": True, "sliding_window": 1024}
SHAPES = {
    "tiny-gemma4": _shape(
        256, 512, 6, 4, 2, 1024, 131_072, every=3, head_dim=64, global_head_dim=128, num_global_key_value_heads=1,
        attention_k_eq_v=True, sliding_window=64, enable_moe_block=True, num_experts=8, top_k_experts=2,
        moe_intermediate_size=64,
    ),
    "tiny-gemma4-shared": _shape(
        256, 512, 6, 4, 2, 1024, 131_072, every=2, head_dim=64, global_head_dim=64, num_kv_shared_layers=2,
        use_double_wide_mlp=True, hidden_size_per_layer_input=32, vocab_size_per_layer_input=1024, sliding_window=64,
    ),
    "gemma-4-e2b": _shape(
        1536, 6144, 35, 8, 1, 262_144, 131_072, every=5, num_kv_shared_layers=20, use_double_wide_mlp=True, **_SMALL
    ),
    "gemma-4-e4b": _shape(2560, 10_240, 42, 8, 2, 262_144, 131_072, every=6, num_kv_shared_layers=18, **_SMALL),
    "gemma-4-26b-a4b": _shape(
        2816, 2112, 30, 16, 8, 262_144, 262_144, every=6, num_global_key_value_heads=2, enable_moe_block=True,
        num_experts=128, top_k_experts=8, moe_intermediate_size=704, **_LARGE
    ),
    "gemma-4-31b": _shape(
        5376, 21_504, 60, 32, 16, 262_144, 262_144, every=6, num_global_key_value_heads=4, **_LARGE
    ),
}  # fmt: skip
