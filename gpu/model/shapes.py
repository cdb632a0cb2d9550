"""Shapes by name, of every family's common sizes, for random weights: the keys that their published files have.

It refuses to know what keys mean: each shape is parsed by its family, as a folder's would be. No torch.
"""

from typing import Any

from gpu.model.family import parse_config
from gpu.model.spec import Architecture, ModelError


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int,
           theta: float, **more: Any) -> dict[str, Any]:  # fmt: skip
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": theta,
    } | more


def _llama(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rms_norm_eps": 1e-5} | _sizes(*sizes, **more)


def _mistral(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None} | _sizes(*sizes, **more)


def _qwen2(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen2"} | _sizes(*sizes, **more)


def _qwen3(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3", "head_dim": 128} | _sizes(*sizes, **more)


def _qwen3_moe(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "head_dim": 128, "norm_topk_prob": True} | _sizes(*sizes, **more)


def _mixtral(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "mixtral", "sliding_window": None} | _sizes(*sizes, **more)


def _phi3(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "phi3"} | _sizes(*sizes, **more)


def _glm4(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "glm4", "rms_norm_eps": 1e-5} | _sizes(*sizes, **more)


def _gemma3(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "gemma3_text", "sliding_window": 1024, "rope_scaling": {"type": "linear", "factor": 8.0}} | (
        _sizes(*sizes, **more)
    )


def _longrope(pairs: int) -> dict[str, Any]:
    """Factors of no model: random weights have no use for the real ones."""
    long = [1.0 + 47.0 * pair / (pairs - 1) for pair in range(pairs)]
    return {"type": "longrope", "short_factor": [1.0] * pairs, "long_factor": long}


_CONFIGS = {
    "tiny": _llama(256, 512, 4, 4, 2, 1024, 262_144, 500_000.0),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, 49_152, 8192, 100_000.0, tie_word_embeddings=True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128_256, 131_072, 500_000.0),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128_256, 131_072, 500_000.0, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 14_336, 32, 32, 8, 128_256, 131_072, 500_000.0),
    "llama-3.3-70b": _llama(8192, 28_672, 80, 64, 8, 128_256, 131_072, 500_000.0),
    "prolong-8b-512k": _llama(4096, 14_336, 32, 32, 8, 128_256, 524_288, 128_000_000.0),
    "llama-2-7b": _llama(4096, 11_008, 32, 32, 32, 32_000, 4096, 10_000.0),
    "llama-2-13b": _llama(5120, 13_824, 40, 40, 40, 32_000, 16_384, 10_000.0),
    "longchat-7b-32k": _llama(4096, 11_008, 32, 32, 32, 32_000, 4096, 10_000.0, rope_condense_ratio=8),
    "codellama-7b": _llama(4096, 11_008, 32, 32, 32, 32_016, 16_384, 1_000_000.0),
    "codellama-13b": _llama(5120, 13_824, 40, 40, 40, 32_016, 16_384, 1_000_000.0),
    "codellama-34b": _llama(8192, 22_016, 48, 64, 8, 32_016, 16_384, 1_000_000.0),
    "tiny-mistral": _mistral(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0, sliding_window=128),
    "mistral-7b": _mistral(4096, 14_336, 32, 32, 8, 32_768, 32_768, 1_000_000.0),
    "mistral-7b-v0.1": _mistral(4096, 14_336, 32, 32, 8, 32_000, 32_768, 10_000.0, sliding_window=4096),
    "mistral-nemo-12b": _mistral(5120, 14_336, 40, 32, 8, 131_072, 131_072, 1_000_000.0, head_dim=128),
    "mistral-small-24b": _mistral(5120, 32_768, 40, 32, 8, 131_072, 32_768, 100_000_000.0, head_dim=128),
    "megabeam-7b-512k": _mistral(4096, 14_336, 32, 32, 8, 32_000, 524_288, 75_000_000.0),
    "ministral-8b": _mistral(4096, 12_288, 36, 32, 8, 131_072, 32_768, 100_000_000.0, head_dim=128),
    "tiny-qwen2": _qwen2(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-3b": _qwen2(2048, 11_008, 36, 16, 2, 151_936, 32_768, 1_000_000.0, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(3584, 18_944, 28, 28, 4, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-14b": _qwen2(5120, 13_824, 48, 40, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-32b": _qwen2(5120, 27_648, 64, 40, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-72b": _qwen2(8192, 29_568, 80, 64, 8, 152_064, 32_768, 1_000_000.0),
    "qwen2.5-7b-1m": _qwen2(3584, 18_944, 28, 28, 4, 152_064, 1_010_000, 10_000_000.0),
    "tiny-qwen3": _qwen3(256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, 151_936, 40_960, 1_000_000.0, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32, 8, 151_936, 40_960, 1_000_000.0),
    "qwen3-14b": _qwen3(5120, 17_408, 40, 40, 8, 151_936, 40_960, 1_000_000.0),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64, 8, 151_936, 40_960, 1_000_000.0),
    "tiny-qwen3-moe": _qwen3_moe(
        256, 512, 4, 4, 2, 1024, 262_144, 1_000_000.0, head_dim=64, num_experts=16, num_experts_per_tok=4,
        moe_intermediate_size=128, mlp_only_layers=[1],
    ),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 48, 32, 4, 151_936, 40_960, 1_000_000.0),
    "tiny-mixtral": _mixtral(256, 256, 4, 4, 2, 1024, 262_144, 1_000_000.0, num_local_experts=4),
    "mixtral-8x7b": _mixtral(4096, 14_336, 32, 32, 8, 32_000, 32_768, 1_000_000.0),
    "tiny-phi3": _phi3(
        384, 512, 4, 4, 2, 1024, 262_144, 10_000.0, partial_rotary_factor=0.75, rope_scaling=_longrope(36)
    ),
    "phi-3-mini": _phi3(3072, 8192, 32, 32, 32, 32_064, 131_072, 10_000.0, rope_scaling=_longrope(48)),
    "phi-3-mini-4k": _phi3(3072, 8192, 32, 32, 32, 32_064, 4096, 10_000.0, sliding_window=2047),
    "phi-3-medium": _phi3(5120, 17_920, 40, 40, 10, 32_064, 131_072, 10_000.0, rope_scaling=_longrope(64)),
    "phi-4": _phi3(5120, 17_920, 40, 40, 10, 100_352, 16_384, 250_000.0),
    "phi-4-mini": _phi3(
        3072, 8192, 32, 24, 8, 200_064, 131_072, 10_000.0, partial_rotary_factor=0.75, rope_scaling=_longrope(48),
        tie_word_embeddings=True,
    ),
    "tiny-glm4": _glm4(256, 512, 4, 16, 1, 1024, 262_144, 10_000.0, head_dim=64),
    "glm-4-9b": _glm4(4096, 13_696, 40, 32, 2, 151_552, 32_768, 10_000.0, attention_bias=True),
    "glm-4-32b": _glm4(6144, 23_040, 61, 48, 2, 151_552, 32_768, 10_000.0, attention_bias=False),
    "tiny-gemma3": _gemma3(256, 512, 6, 4, 2, 1024, 262_144, 1_000_000.0, sliding_window=128),
    "gemma-3-1b": _gemma3(
        1152, 6912, 26, 4, 1, 262_144, 32_768, 1_000_000.0, sliding_window=512, rope_scaling=None
    ),
    "gemma-3-4b": _gemma3(2560, 10_240, 34, 8, 4, 262_208, 131_072, 1_000_000.0),
    "gemma-3-12b": _gemma3(3840, 15_360, 48, 16, 8, 262_208, 131_072, 1_000_000.0),
    "gemma-3-27b": _gemma3(
        5376, 21_504, 62, 32, 16, 262_208, 131_072, 1_000_000.0, head_dim=128, query_pre_attn_scalar=168
    ),
}  # fmt: skip


NAMED_SHAPES = {name: parse_config(config, name, name, ()) for name, config in _CONFIGS.items()}


def named_config(name: str) -> dict[str, Any]:
    """The `config.json` of such a shape."""
    return dict(_CONFIGS[named_shape(name).name])


def named_shape(name: str) -> Architecture:
    """A shape for random weights. Raises ModelError with the list for an unknown name."""
    if name not in NAMED_SHAPES:
        raise ModelError(f"model.random_weights: unknown shape {name!r}; known: {', '.join(NAMED_SHAPES)}")
    return NAMED_SHAPES[name]
