"""Muse Glimmer's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "muse_glimmer_text"} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-muse-glimmer": _shape(
        256, 512, 5, 4, 2, 1024, 131_072, 10_000.0, head_dim=64, sliding_window=64, tie_word_embeddings=False
    ),
    "muse-glimmer-30b": _shape(6656, 19_968, 52, 32, 2, 202_048, 131_072, 10_000.0),
}
