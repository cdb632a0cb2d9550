"""Rotary position tables: inverse frequencies of every served scaling, and the cosines and sines of all positions.

It refuses to know tokens and heads. Invariant: the tables of a deployment never change, so a key cached at a position
stays valid for as long as its page lives. Frequencies equal Hugging Face's `ROPE_INIT_FUNCTIONS` in float32.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gpu.model.architecture import Architecture, ModelError, RopeScaling


def rope_tables(architecture: Architecture, max_context_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 `[max_context_tokens, dim // 2]` on `device`, times the scaling's attention factor."""
    frequencies, attention_factor = inverse_frequencies(architecture, max_context_tokens)
    positions = torch.arange(max_context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [tokens, dim // 2]
    return (angles.cos() * attention_factor).to(device), (angles.sin() * attention_factor).to(device)


def inverse_frequencies(architecture: Architecture, max_context_tokens: int) -> tuple[Tensor, float]:
    """Frequencies in radians a token, float32 `[dim // 2]` on the CPU, and the factor of cosines and sines.

    `dynamic` depends on the length of the text, and keys already cached would turn stale as a text grows: its
    frequencies are fixed at the deployment's `max_context_tokens` instead, whatever a text's own length is.
    Raises ModelError for a setting that is missing or is no positive number.
    """
    rope, dim = architecture.rope, architecture.dim
    model_tokens = architecture.max_context_tokens
    if rope.kind == "default":
        return _plain(rope.theta, dim), 1.0
    factor = _setting(rope, "factor", None if rope.kind != "yarn" else 0.0)
    if rope.kind == "linear":
        return _plain(rope.theta, dim) / factor, 1.0
    if rope.kind == "dynamic":
        stretch = factor * max(max_context_tokens, model_tokens) / model_tokens - (factor - 1)
        return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, dim, factor), 1.0
    original_tokens = _setting(rope, "original_max_position_embeddings", None)
    factor = factor or model_tokens / original_tokens
    return _yarn(rope, dim, factor, original_tokens), _yarn_attention_factor(rope, factor)


def _setting(rope: RopeScaling, key: str, absent: float | None) -> float:
    value: Any = rope.settings.get(key)
    if value is None and absent is not None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"model: rope scaling {rope.kind!r}: {key} is {value!r}; wanted a positive number")
    return float(value)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(rope: RopeScaling, dim: int, factor: float) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    low, high = _setting(rope, "low_freq_factor", None), _setting(rope, "high_freq_factor", None)
    original_tokens = _setting(rope, "original_max_position_embeddings", None)
    plain = _plain(rope.theta, dim)
    turns = original_tokens * plain / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.where(turns > high, plain, (1 - kept) * plain / factor + kept * plain)


def _yarn(rope: RopeScaling, dim: int, factor: float, original_tokens: float) -> Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: "NTK-by-parts", a linear ramp over the dimensions."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    begin = dimension_of(_setting(rope, "beta_fast", 32.0))
    end = dimension_of(_setting(rope, "beta_slow", 1.0))
    if rope.settings.get("truncate", True):
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, dim - 1)
    width = end - begin or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - begin) / width).clamp(0, 1)
    plain = _plain(rope.theta, dim)
    return plain / factor * interpolated + plain * (1 - interpolated)


def _yarn_attention_factor(rope: RopeScaling, factor: float) -> float:
    given = _setting(rope, "attention_factor", 0.0)
    if given:
        return given

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = rope.settings.get("mscale"), rope.settings.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
