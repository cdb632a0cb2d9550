"""DeepSeek-V2 in GGUF files: those of its architecture whose experts a softmax chooses."""

from gpu.model.latent_gguf import SOFTMAX, gating, latent_form

GGUF = latent_form(claims=lambda keys: gating(keys) == SOFTMAX)
