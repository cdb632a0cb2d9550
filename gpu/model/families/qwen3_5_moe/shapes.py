"""Qwen3.5's sizes with experts by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5_moe_text"} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-qwen3.5-moe": _shape(
        256, 128, 4, 4, 2, 1024, 262_144, 10_000_000.0, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, shared_expert_intermediate_size=128,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3.5-35b-a3b": _shape(2048, 512, 40, 16, 2, 248_320, 262_144, 10_000_000.0),
}  # fmt: skip
