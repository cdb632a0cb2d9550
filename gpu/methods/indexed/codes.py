"""Keys in few bits: centred, rotated by a fixed orthogonal matrix, and rounded with one scale a token and KV head.

The rotation spreads what single dimensions hold over all of them, so that one scale fits. Codes are at the middles of
their steps: a code c of b bits stands for (c + 1/2 - 2^(b-1)) times the scale.
"""

import torch
from torch import Tensor

ROTATION_SEED = 0


def make_rotation(dim: int, device: torch.device) -> Tensor:
    """Return a random orthogonal matrix, float32 `[dim, dim]`, the same in every process."""
    generator = torch.Generator().manual_seed(ROTATION_SEED)
    matrix = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(matrix)[0].float().contiguous().to(device)


def encode_keys_reference(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return packed codes, uint8 `[..., dim * bits / 8]`, and scales, float16 `[...]`, of centred and rotated keys,
    float32 `[..., dim]`.
    """
    half = 2.0 ** (bits - 1)
    scales = (keys.abs().amax(-1) / (half - 0.5)).half()
    step = scales.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]
    codes = (torch.floor(keys / step) + half).clamp(0, 2 * half - 1).to(torch.uint8)
    width = keys.shape[-1] * bits // 8
    packed = torch.zeros(*keys.shape[:-1], width, dtype=torch.uint8, device=keys.device)
    for plane in range(8 // bits):
        packed |= codes[..., plane * width : (plane + 1) * width] << (plane * bits)
    return packed, scales


def decode_keys(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return rounded keys, float32 `[..., dim]`, centred and rotated."""
    planes = [(packed >> (plane * bits)) & (2**bits - 1) for plane in range(8 // bits)]
    return (torch.cat(planes, -1).float() + 0.5 - 2.0 ** (bits - 1)) * scales.float()[..., None]
