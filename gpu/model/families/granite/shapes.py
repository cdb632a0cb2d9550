"""Granite's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

_MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "granite", "rms_norm_eps": 1e-5} | _MULTIPLIERS | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-granite": _shape(
        256, 512, 4, 4, 2, 1024, 131_072, 10_000_000.0, attention_multiplier=0.0625, embedding_multiplier=0.5
    ),
    "granite-3.3-8b": _shape(
        4096, 12_800, 40, 32, 8, 49_159, 131_072, 10_000_000.0, attention_multiplier=0.0078125,
        logits_scaling=16.0, tie_word_embeddings=True,
    ),
}  # fmt: skip
