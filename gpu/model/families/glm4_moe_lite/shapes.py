"""GLM-4.7-Flash's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "glm4_moe_lite"} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-glm4-moe-lite": _shape(
        256, 384, 4, 8, 8, 1024, 131_072, 1_000_000.0, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=48,
        qk_rope_head_dim=16, v_head_dim=64, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "glm-4.7-flash": _shape(2048, 10_240, 47, 20, 20, 154_880, 202_752, 1_000_000.0),
}  # fmt: skip
