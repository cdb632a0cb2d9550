"""Qwen2.5's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen2"} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-qwen2": _shape(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0),
    "qwen2.5-0.5b": _shape(896, 4864, 24, 14, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-1.5b": _shape(1536, 8960, 28, 12, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-3b": _shape(2048, 11_008, 36, 16, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-7b": _shape(3584, 18_944, 28, 28, 4, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-14b": _shape(5120, 13_824, 48, 40, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-32b": _shape(5120, 27_648, 64, 40, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-72b": _shape(8192, 29_568, 80, 64, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-7b-1m": _shape(3584, 18_944, 28, 28, 4, 152_064, 1_010_000, 10_000_000.0),
}  # fmt: skip
