"""Qwen3.5's sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text"} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-qwen3.5": _shape(
        256, 512, 4, 4, 2, 1024, 262_144, 10_000_000.0, head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "qwen3.5-9b": _shape(4096, 12_288, 32, 16, 4, 248_320, 262_144, 10_000_000.0),
    "qwen3.5-27b": _shape(5120, 17_408, 64, 24, 4, 248_320, 262_144, 10_000_000.0, linear_num_value_heads=48),
}  # fmt: skip
