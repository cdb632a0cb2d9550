"""The published sizes of Nemotron-H models by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(pattern: str, *sizes: Any, **more: Any) -> dict[str, Any]:
    hidden, intermediate, *others = sizes
    own = {"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "tie_word_embeddings": False}
    return own | published_sizes(hidden, intermediate, len(pattern), *others, 10_000.0, **more)


SHAPES = {
    "tiny-nemotron-h": _shape(
        "MEM*-EM*", 256, 512, 4, 2, 1024, 131_072, head_dim=64, mamba_num_heads=8, ssm_state_size=64, n_groups=2,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=192, moe_shared_expert_intermediate_size=256,
        routed_scaling_factor=2.5,
    ),
    "nemotron-3-nano-30b-a3b": _shape(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 1856, 32, 2, 131_072, 262_144, head_dim=128,
        mamba_num_heads=64, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5,
    ),
}  # fmt: skip
