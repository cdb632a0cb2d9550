"""Ministral 3's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

YARN = {
    "type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "ministral3", "head_dim": 128, "rope_parameters": YARN} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-ministral3": _shape(
        256, 512, 4, 4, 2, 1024, 4096, 1_000_000.0, head_dim=64,
        rope_parameters=YARN | {"factor": 8.0, "original_max_position_embeddings": 16},
    ),
    "ministral-3-8b": _shape(4096, 14_336, 34, 32, 8, 131_072, 262_144, 1_000_000.0),
    "ministral-3-14b": _shape(
        5120, 16_384, 40, 32, 8, 131_072, 262_144, 1_000_000_000.0, rope_parameters=YARN | {"rope_theta": 1e9}
    ),
}  # fmt: skip
