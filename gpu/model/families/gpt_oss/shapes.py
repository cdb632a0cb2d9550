"""gpt-oss's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "gpt_oss", "head_dim": 64, "rope_scaling": YARN} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-gpt-oss": _shape(
        256, 128, 4, 8, 2, 1024, 131_072, 150_000.0, num_local_experts=8, num_experts_per_tok=4, sliding_window=64
    ),
    "gpt-oss-20b": _shape(
        2880, 2880, 24, 64, 8, 201_088, 131_072, 150_000.0, num_local_experts=32, quantization_config=MXFP4
    ),
    "gpt-oss-120b": _shape(
        2880, 2880, 36, 64, 8, 201_088, 131_072, 150_000.0, num_local_experts=128, quantization_config=MXFP4
    ),
}  # fmt: skip
