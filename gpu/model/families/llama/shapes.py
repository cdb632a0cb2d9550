"""Llama's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "rms_norm_eps": 1e-5} | published_sizes(*sizes, **more)


SHAPES = {
    "tiny": _shape(256, 512, 4, 4, 2, 1024, 262_144, 500_000.0),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49_152, 8192, 100_000.0, tie_word_embeddings=True),
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128_256, 131_072, 500_000.0),
    "llama-3.2-3b": _shape(3072, 8192, 28, 24, 8, 128_256, 131_072, 500_000.0, tie_word_embeddings=True),
    "llama-3.1-8b": _shape(4096, 14_336, 32, 32, 8, 128_256, 131_072, 500_000.0),
    "llama-3.3-70b": _shape(8192, 28_672, 80, 64, 8, 128_256, 131_072, 500_000.0),
    "prolong-8b-512k": _shape(4096, 14_336, 32, 32, 8, 128_256, 524_288, 128_000_000.0),
    "llama-2-7b": _shape(4096, 11_008, 32, 32, 32, 32_000, 4096, 10_000.0),
    "llama-2-13b": _shape(5120, 13_824, 40, 40, 40, 32_000, 16_384, 10_000.0),
    "longchat-7b-32k": _shape(4096, 11_008, 32, 32, 32, 32_000, 4096, 10_000.0, rope_condense_ratio=8),
    "codellama-7b": _shape(4096, 11_008, 32, 32, 32, 32_016, 16_384, 1_000_000.0),
    "codellama-13b": _shape(5120, 13_824, 40, 40, 40, 32_016, 16_384, 1_000_000.0),
    "codellama-34b": _shape(8192, 22_016, 48, 64, 8, 32_016, 16_384, 1_000_000.0),
}  # fmt: skip
