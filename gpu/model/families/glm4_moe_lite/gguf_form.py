"""GLM-4.7-Flash in GGUF files, which have DeepSeek's architecture."""

from gpu.model.latent_gguf import SIGMOID, gating, is_glm, latent_form

_NEXT_SPEAKER = frozenset({"<|user|>", "<|observation|>"})  # which ends a turn

GGUF = latent_form(claims=lambda keys: is_glm(keys) and gating(keys) == SIGMOID, end_tokens=_NEXT_SPEAKER)
