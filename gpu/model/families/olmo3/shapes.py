"""Olmo 3's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
    "attention_factor": 1.2079441541679836, "beta_slow": 1.0,
}  # fmt: skip


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "olmo3", "rms_norm_eps": 1e-6} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-olmo3": _shape(256, 512, 4, 4, 2, 1024, 65_536, 500_000.0, sliding_window=64, rope_scaling=YARN),
    "olmo3-7b": _shape(4096, 11_008, 32, 32, 32, 100_278, 65_536, 500_000.0, rope_scaling=YARN),
    "olmo3-32b": _shape(5120, 27_648, 64, 40, 8, 100_278, 65_536, 500_000.0, rope_scaling=YARN),
}
