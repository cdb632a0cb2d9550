"""SmolLM3 in GGUF files, which do not say that one layer in four does not rotate."""

from gpu.model.gguf.keys import GgufForm

GGUF = GgufForm("smollm3", has_neighbour_pairs=True)
