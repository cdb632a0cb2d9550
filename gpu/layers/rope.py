"""Compute RoPE tables: the inverse frequencies of every served scaling, and cosines and sines of all positions.

The part of a head that is not rotated has angle zero. Weights are loaded in an order in which element i pairs with i +
dim / 2, whatever a checkpoint's layout. The tables of a deployment never change, so cached keys stay valid. Frequencies
equal Hugging Face's `ROPE_INIT_FUNCTIONS` in float32.
"""

import hashlib
import math
import struct
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.layers.layer_arrays import rope_array
from gpu.model.spec import NO_ROTATION, Architecture, ModelError, RopeScaling


def rope_tables(architecture: Architecture, max_context_tokens: int, device: torch.device,
                rope: RopeScaling | None = None, dim: int | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cos and sin, float32 `[max_context_tokens, dim // 2]` on `device`, times the scaling's attention factor.

    rope, dim: the scaling and head size of some layers; None: the model's own. Pairs that are not rotated have cosine 1
    and sine 0.
    """
    frequencies, attention_factor = inverse_frequencies(architecture, max_context_tokens, rope, dim)
    positions = torch.arange(max_context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # [tokens, rotary_dim // 2]
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    still = rope_array(dim or architecture.dim, max_context_tokens).shape[1] - len(frequencies)
    return F.pad(cos, (0, still), value=1.0).to(device), F.pad(sin, (0, still)).to(device)


def rope_key(architecture: Architecture, max_context_tokens: int) -> str:
    """Return 32 hexadecimal digits that identify all RoPE frequencies of a deployment, to name KV on disk.

    Stored values depend on the frequencies as rotated keys do. `model.rope` changes them, and with `dynamic` and
    `longrope` so does the longest context.
    """
    digest = hashlib.blake2b(digest_size=16)
    for rope, dim in architecture.ropes:
        frequencies, factor = inverse_frequencies(architecture, max_context_tokens, rope, dim)
        digest.update(frequencies.numpy().tobytes() + struct.pack("<d", factor))
    return digest.hexdigest()


def layer_rope_tables(
    architecture: Architecture, max_context_tokens: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return the tables of each layer; layers with the same frequencies share one."""
    ropes = architecture.ropes
    tables = [rope_tables(architecture, max_context_tokens, device, rope, dim) for rope, dim in ropes]
    return [tables[ropes.index(architecture.rope_of(spec))] for spec in architecture.layers]


def inverse_frequencies(architecture: Architecture, max_context_tokens: int,
                        rope: RopeScaling | None = None, dim: int | None = None) -> tuple[Tensor, float]:  # fmt: skip
    """Return frequencies in radians per token, float32 `[rotary_dim // 2]` on the CPU, and the factor of cosines and
    sines.

    `dynamic` and `longrope` depend on the length of a text, so cached keys would turn stale as a text grows. Here the
    deployment's `max_context_tokens` fixes their frequencies, whatever a text's own length is. Raises ModelError for a
    setting that is missing or not a positive number.
    """
    rope, dim = rope or architecture.rope, architecture.rotary_dim or dim or architecture.dim
    model_tokens = architecture.max_context_tokens
    if rope.kind == "default":
        return _plain(rope.theta, dim), 1.0
    if rope.kind == NO_ROTATION.kind:
        return torch.zeros(dim // 2), _setting(rope, "attention_factor", 1.0)
    if rope.kind == "proportional":
        turning = int(_setting(rope, "partial_rotary_factor", 1.0) * dim // 2)
        plain = _plain(rope.theta, dim)
        plain[turning:] = 0.0
        return plain / _setting(rope, "factor", 1.0), 1.0
    factor = _setting(rope, "factor", None if rope.kind not in ("yarn", "longrope") else 0.0)
    if rope.kind == "linear":
        return _plain(rope.theta, dim) / factor, 1.0
    if rope.kind == "dynamic":
        original_tokens = _setting(rope, "original_max_position_embeddings", float(model_tokens))
        stretch = factor * max(max_context_tokens, original_tokens) / original_tokens - (factor - 1)
        return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, dim, factor), 1.0
    original_tokens = _setting(rope, "original_max_position_embeddings", None)
    factor = factor or model_tokens / original_tokens
    if rope.kind == "longrope":
        return _longrope(rope, dim, max_context_tokens > original_tokens), _longrope_attention_factor(rope, factor)
    return _yarn(rope, dim, factor, original_tokens), _yarn_attention_factor(rope, factor)


def _setting(rope: RopeScaling, key: str, absent: float | None) -> float:
    """Return a setting of the scaling, or `absent`.

    Raises ModelError if it is missing without one, or is not positive.
    """
    value: Any = rope.settings.get(key)
    if value is None and absent is not None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"model: rope scaling {rope.kind!r}: {key} is {value!r}; wanted a positive number")
    return float(value)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(rope: RopeScaling, dim: int, factor: float) -> Tensor:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those in between."""
    low, high = _setting(rope, "low_freq_factor", None), _setting(rope, "high_freq_factor", None)
    original_tokens = _setting(rope, "original_max_position_embeddings", None)
    plain = _plain(rope.theta, dim)
    turns = original_tokens * plain / (2 * math.pi)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.where(turns > high, plain, (1 - kept) * plain / factor + kept * plain)


def _yarn(rope: RopeScaling, dim: int, factor: float, original_tokens: float) -> Tensor:
    """Compute YaRN (arXiv 2309.00071), section 3.2: "NTK-by-parts", a linear ramp over the dimensions."""

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


def _longrope(rope: RopeScaling, dim: int, is_long: bool) -> Tensor:
    """Compute LongRoPE (arXiv 2402.13753): one factor for each frequency, depending on the text's length."""
    key = "long_factor" if is_long else "short_factor"
    factors = rope.settings.get(key)
    if not isinstance(factors, list) or len(factors) != dim // 2:
        got = f"{len(factors)} numbers" if isinstance(factors, list) else repr(factors)
        raise ModelError(f"model: rope scaling 'longrope': {key} is {got}; wanted {dim // 2}")
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)  # in this order: a last bit is 3e-4 at 3,000


def _longrope_attention_factor(rope: RopeScaling, factor: float) -> float:
    original_tokens = _setting(rope, "original_max_position_embeddings", None)
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original_tokens))
    return _setting(rope, "attention_factor", computed)


def _yarn_attention_factor(rope: RopeScaling, factor: float) -> float:
    given = _setting(rope, "attention_factor", 0.0)
    if given:
        return given

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = rope.settings.get("mscale"), rope.settings.get("mscale_all_dim")
    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)
