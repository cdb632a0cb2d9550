"""Mistral Small 4's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

YARN = {
    "type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "mistral4", "rope_parameters": YARN} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-mistral4": _shape(
        256, 384, 4, 8, 8, 1024, 4096, 10_000.0, kv_lora_rank=64, q_lora_rank=96, qk_nope_head_dim=48,
        qk_rope_head_dim=16, v_head_dim=64, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64,
        rope_parameters=YARN | {"factor": 8.0, "original_max_position_embeddings": 16},
    ),
    "mistral-small-4-119b": _shape(4096, 12_288, 36, 32, 32, 131_072, 1_048_576, 10_000.0),
}  # fmt: skip
