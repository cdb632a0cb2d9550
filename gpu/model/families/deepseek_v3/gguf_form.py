"""DeepSeek-V3 in GGUF files."""

from gpu.model.latent_gguf import latent_form

GGUF = latent_form()
