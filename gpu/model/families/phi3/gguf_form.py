"""Phi-3 in GGUF files."""

from gpu.model.gguf.keys import GgufForm

GGUF = GgufForm("phi3", has_windows=True)
