"""Mixtral's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "mixtral", "sliding_window": None} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-mixtral": _shape(256, 256, 4, 4, 2, 1024, 262_144, 1_000_000.0, num_local_experts=4),
    "mixtral-8x7b": _shape(4096, 14_336, 32, 32, 8, 32_000, 32_768, 1_000_000.0),
}  # fmt: skip
