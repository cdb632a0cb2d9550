"""The published sizes of Granite 4.0 hybrids by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, attending: tuple[int, ...], **more: Any) -> dict[str, Any]:
    layers = sizes[2]
    own = {
        "model_type": "granitemoehybrid",
        "rms_norm_eps": 1e-5,
        "position_embedding_type": "nope",
        "layer_types": ["attention" if layer in attending else "mamba" for layer in range(layers)],
        "mamba_d_state": 128,
        "embedding_multiplier": 12.0,
        "tie_word_embeddings": True,
    }
    return own | published_sizes(*sizes, **more)


SHAPES = {
    "tiny-granite-hybrid": _shape(
        256, 512, 4, 4, 2, 1024, 131_072, 10_000.0, attending=(1, 3), num_local_experts=0, mamba_n_heads=8,
        mamba_d_state=64, shared_intermediate_size=512, attention_multiplier=0.0625, residual_multiplier=0.22,
        embedding_multiplier=0.5, logits_scaling=8.0, tie_word_embeddings=False,
    ),
    "granite-4.0-h-micro": _shape(
        2048, 8192, 40, 32, 8, 100_352, 131_072, 10_000.0, attending=(5, 15, 25, 35), num_local_experts=0,
        mamba_n_heads=64, shared_intermediate_size=8192, attention_multiplier=0.015625, residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "granite-4.0-h-tiny": _shape(
        1536, 512, 40, 12, 4, 100_352, 131_072, 10_000.0, attending=(5, 15, 25, 35), num_local_experts=64,
        num_experts_per_tok=6, mamba_n_heads=48, shared_intermediate_size=1024, attention_multiplier=0.0078125,
        residual_multiplier=0.22, logits_scaling=6.0,
    ),
    "granite-4.0-h-small": _shape(
        4096, 768, 40, 32, 8, 100_352, 131_072, 10_000.0, attending=(5, 15, 25, 35), num_local_experts=72,
        num_experts_per_tok=10, mamba_n_heads=128, shared_intermediate_size=1536, attention_multiplier=0.0078125,
        residual_multiplier=0.22, logits_scaling=16.0,
    ),
}  # fmt: skip
