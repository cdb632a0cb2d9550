"""Mistral's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-mistral": _shape(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0, sliding_window=128),
    "mistral-7b": _shape(4096, 14_336, 32, 32, 8, 32_768, 32_768, 1_000_000.0),
    "mistral-7b-v0.1": _shape(4096, 14_336, 32, 32, 8, 32_000, 32_768, 10_000.0, sliding_window=4096),
    "mistral-nemo-12b": _shape(5120, 14_336, 40, 32, 8, 131_072, 131_072, 1_000_000.0, head_dim=128),
    "mistral-small-24b": _shape(5120, 32_768, 40, 32, 8, 131_072, 32_768, 100_000_000.0, head_dim=128),
    "megabeam-7b-512k": _shape(4096, 14_336, 32, 32, 8, 32_000, 524_288, 75_000_000.0),
    "ministral-8b": _shape(4096, 12_288, 36, 32, 8, 131_072, 32_768, 100_000_000.0, head_dim=128),
}  # fmt: skip
