"""Qwen3's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3", "head_dim": 128} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-qwen3": _shape(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-1.7b": _shape(2048, 6144, 28, 16, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-8b": _shape(4096, 12_288, 36, 32, 8, 151_936, 40_960, 1_000_000.0),
    "qwen3-14b": _shape(5120, 17_408, 40, 40, 8, 151_936, 40_960, 1_000_000.0),
    "qwen3-32b": _shape(5120, 25_600, 64, 64, 8, 151_936, 40_960, 1_000_000.0),
}  # fmt: skip
