"""Qwen3-MoE's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-qwen3-moe": _shape(
        256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, mlp_only_layers=[1],
    ),
    "qwen3-30b-a3b": _shape(2048, 6144, 48, 32, 4, 151_936, 40_960, 1_000_000.0),
}  # fmt: skip
