"""Gemma 3's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "gemma3_text", "sliding_window": 1024, "rope_scaling": {"type": "linear", "factor": 8.0}} | (
        published_sizes(*sizes, **more)
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
