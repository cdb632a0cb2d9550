"""Encode keys and values in few bits: rotated by a fixed orthogonal matrix, rounded with one scale per token and KV
head.

The rotation spreads the content of single dimensions over all of them, so that one scale fits. Codes are at the middles
of their steps: a code c of b bits stands for the number n = c + 1/2 - 2^(b-1), times the scale.

A key's scale is such that its largest number fits the codes. The numbers x of a value have the step that loses least
for a normal distribution, and the scale is (x . x) / (x . n). So the rounded value has the whole of the value's length
along the value itself, and a sum over many tokens is not too short. The scale with the least error for a single value
would be (x . n) / (n . n), which makes a sum of values in 2 bits 12 % too short.

If most of a block's values is their mean, the mean is subtracted before rounding. Otherwise equal values, as of one
token that is repeated, would all have the same error, which no sum averages out. In other blocks a centre does harm: an
attention sink's value is close to zero, but not after the centre is subtracted.
"""

import torch
from torch import Tensor

ROTATION_SEED = 0
CENTRED_SHARE = 0.5  # a block has a centre if its mean holds more than this share of its values' squares
VALUE_STEPS = {2: 0.9957, 4: 0.3352}
"""The step that loses least of a normal distribution, in standard deviations, by bits: Max, "Quantizing for minimum
distortion", IRE Transactions on Information Theory 6 (1960), table II."""

VALUE_LOSS = {2: 0.1188, 4: 0.01154}
"""The square of a rounded value's error, of the rounded value's own square; from the same table."""
NUMBER_SQUARE = {bits: (1 - VALUE_LOSS[bits]) / step**2 for bits, step in VALUE_STEPS.items()}
"""The mean square of a value's numbers, for a normal distribution."""


def make_rotation(dim: int, device: torch.device) -> Tensor:
    """Return a random orthogonal matrix, float32 `[dim, dim]`, the same in every process."""
    generator = torch.Generator().manual_seed(ROTATION_SEED)
    matrix = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(matrix)[0].float().contiguous().to(device)


def encode_keys_reference(keys: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode centred and rotated keys, float32 `[..., dim]`.

    Returns packed codes (see `ring.Index`), uint8 `[..., dim * bits / 8]`, and scales, float16 `[...]`.
    """
    scales = (keys.abs().amax(-1) / (2.0 ** (bits - 1) - 0.5)).half()
    return _pack(_round(keys, scales.float(), bits), bits), scales


def find_centre_reference(values: Tensor) -> Tensor:
    """Return what is subtracted from a block's values `[..., tokens, dim]`, bfloat16 `[..., dim]`: their mean, or
    zeros.
    """
    mean = values.mean(-2)
    of_mean = values.shape[-2] * mean.square().sum(-1)
    is_centred = of_mean > CENTRED_SHARE * values.square().sum((-2, -1))
    return torch.where(is_centred[..., None], mean, 0.0).bfloat16()


def encode_values_reference(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode rotated values; returns packed codes and scales like `encode_keys_reference`."""
    codes = _round(values, VALUE_STEPS[bits] * values.square().mean(-1).sqrt(), bits)
    along = (values * _numbers(codes, bits)).sum(-1)
    scales = values.square().sum(-1) / along.clamp_min(torch.finfo(torch.float32).tiny)
    return _pack(codes, bits), scales.half()


def decode_reference(packed: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return decoded keys or values, float32 `[..., dim]`; the signs of scales have no meaning here."""
    return _numbers(_unpack(packed, bits), bits) * scales.float().abs()[..., None]


def _round(rows: Tensor, steps: Tensor, bits: int) -> Tensor:
    """Return the codes, uint8, of rows `[..., dim]` for steps `[...]`."""
    half = 2.0 ** (bits - 1)
    step = steps.clamp_min(torch.finfo(torch.float16).tiny)[..., None]
    return (torch.floor(rows / step) + half).clamp(0, 2 * half - 1).to(torch.uint8)


def _numbers(codes: Tensor, bits: int) -> Tensor:
    return codes.float() + 0.5 - 2.0 ** (bits - 1)


def plane_bytes(dim: int, bits: int) -> tuple[int, int]:
    """Return the number of planes that a token's codes are packed in, and the bytes of each; of 3 bits, the
    lower two.
    """
    packed = 2 if bits == 3 else bits
    return 8 // packed, dim * packed // 8


def _unpack(packed: Tensor, bits: int) -> Tensor:
    if bits != 3:
        return torch.cat([(packed >> (plane * bits)) & (2**bits - 1) for plane in range(8 // bits)], -1)
    width = packed.shape[-1] * 2 // 3
    thirds = packed[..., width:].repeat_interleave(2, -1)
    place = 4 * (torch.arange(width, device=packed.device) % 2)
    high = torch.cat([(thirds >> (plane + place)) & 1 for plane in range(4)], -1)
    return _unpack(packed[..., :width], 2) | high << 2


def _pack_thirds(bits: Tensor) -> Tensor:
    """Pack the highest bits of 3-bit codes `[..., dim]` into bytes `[..., dim / 8]`.

    Byte b has in its low half the bits of the four dimensions in byte 2 b of the lower bits, and in its high half those
    of byte 2 b + 1.
    """
    planes = bits.unflatten(-1, (4, -1, 2))
    places = torch.arange(4, device=bits.device)[:, None, None] + torch.tensor([0, 4], device=bits.device)
    return (planes << places).sum((-3, -1)).to(torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 3:
        return torch.cat([_pack(codes & 3, 2), _pack_thirds(codes >> 2)], -1)
    width = codes.shape[-1] * bits // 8
    packed = torch.zeros(*codes.shape[:-1], width, dtype=torch.uint8, device=codes.device)
    for plane in range(8 // bits):
        packed |= codes[..., plane * width : (plane + 1) * width] << (plane * bits)
    return packed
