"""Qwen2 in GGUF files."""

from gpu.model.gguf.keys import GgufForm

GGUF = GgufForm("qwen2")
