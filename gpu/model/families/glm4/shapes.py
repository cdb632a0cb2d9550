"""GLM-4's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "glm4", "rms_norm_eps": 1e-5} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-glm4": _shape(256, 512, 4, 16, 1, 1024, 262_144, 10_000.0, head_dim=64),
    "glm-4-9b": _shape(4096, 13_696, 40, 32, 2, 151_552, 32_768, 10_000.0, attention_bias=True),
    "glm-4-32b": _shape(6144, 23_040, 61, 48, 2, 151_552, 32_768, 10_000.0, attention_bias=False),
}  # fmt: skip
