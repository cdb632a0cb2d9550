"""Qwen3 in GGUF files."""

from gpu.model.gguf.keys import GgufForm

GGUF = GgufForm("qwen3")
