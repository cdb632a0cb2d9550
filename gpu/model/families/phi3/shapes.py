"""Phi's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "phi3"} | published_sizes(*sizes, **more)


def _longrope(pairs: int) -> dict[str, Any]:
    """Return factors of no model: random weights have no use for the real ones."""
    long = [1.0 + 47.0 * pair / (pairs - 1) for pair in range(pairs)]
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": long}


SHAPES = {
    "tiny-phi3": _shape(
        384, 512, 4, 4, 2, 1024, 262_144, 10_000.0, partial_rotary_factor=0.75, rope_scaling=_longrope(36)
    ),
    "phi-3-mini": _shape(3072, 8192, 32, 32, 32, 32_064, 131_072, 10_000.0, rope_scaling=_longrope(48)),
    "phi-3-mini-4k": _shape(3072, 8192, 32, 32, 32, 32_064, 4096, 10_000.0, sliding_window=2047),
    "phi-3-medium": _shape(5120, 17_920, 40, 40, 10, 32_064, 131_072, 10_000.0, rope_scaling=_longrope(64)),
    "phi-4": _shape(5120, 17_920, 40, 40, 10, 100_352, 16_384, 250_000.0),
    "phi-4-mini": _shape(
        3072, 8192, 32, 24, 8, 200_064, 131_072, 10_000.0, partial_rotary_factor=0.75, rope_scaling=_longrope(48),
        tie_word_embeddings=True,
    ),
}  # fmt: skip
