"""SmolLM3's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "smollm3"} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-smollm3": _shape(256, 512, 4, 4, 2, 1024, 65_536, 5_000_000.0, tie_word_embeddings=False),
    "smollm3-3b": _shape(2048, 11_008, 36, 16, 4, 128_256, 65_536, 5_000_000.0),
}
