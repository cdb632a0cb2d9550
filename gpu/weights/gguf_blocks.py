"""Read blocks of a GGUF file's tensors as numbers with scales.

Layouts are those of ggml's `block_q4_0` and so on. A number is exactly `q * d * scale - least * offset`, where d,
least, scale and offset are the file's own (`gpu.model.gguf.kinds`), except for powers of two and signs, which lose no
digit. A number of MXFP4 is an FP4 number times a power of two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from gpu.model.gguf.kinds import BLOCK_KINDS, BlockKind
from gpu.operations.linear.packed_matrix import EXPONENT_BIAS
from transfer.model_constants import FP4_NUMBERS

_PART_NUMBERS = 2**24  # at once: unpacked, they take several times their memory


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a GGUF tensor. data: uint8 `[rows, bytes]`, as a file has them."""

    kind: str
    data: Tensor

    @property
    def layout(self) -> BlockKind:
        return BLOCK_KINDS[self.kind]

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows and columns of numbers."""
        return len(self.data), self.data.shape[1] // self.layout.num_bytes * self.layout.block

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def to(self, device: torch.device) -> "Blocks":
        return Blocks(self.kind, self.data.to(device))

    def rows(self, taken: Tensor | slice) -> "Blocks":
        return Blocks(self.kind, self.data[taken])

    @property
    def rows_at_once(self) -> int:
        """Return how many rows can be unpacked at once."""
        return max(1, _PART_NUMBERS // self.shape[1])


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of blocks, with their scales and offsets. q: uint8 `[rows, inner]`; d, least: float16 `[rows, runs]`;
    scales, offsets: int8 `[rows, groups]`.
    """

    q: Tensor
    d: Tensor
    least: Tensor
    scales: Tensor
    offsets: Tensor

    def widen(self) -> Tensor:
        """Return float32 `[rows, inner]`."""
        groups, runs = self.scales.shape[1], self.d.shape[1]
        scale = self.d.float().repeat_interleave(groups // runs, 1) * self.scales
        offset = self.least.float().repeat_interleave(groups // runs, 1) * self.offsets
        cut = self.q.float().view(len(self.q), groups, -1)
        return (cut * scale[..., None] - offset[..., None]).flatten(1)


def read_numbers(blocks: Blocks) -> Numbers:
    """Return the numbers of blocks, of a kind with scales and offsets."""
    layout, rows = blocks.layout, len(blocks.data)
    cut = blocks.data.reshape(-1, layout.num_bytes)
    q, d, least, scales, offsets = _LAYOUTS[blocks.kind](cut)
    return Numbers(*(part.reshape(rows, -1) for part in (q, d, least, scales, offsets)))


def read_fp4(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the codes of MXFP4, uint8 `[rows, inner]`, and exponents, uint8 `[rows, groups]`."""
    rows, cut = len(blocks.data), blocks.data.reshape(-1, blocks.layout.num_bytes)
    return _nibbles(cut[:, 1:]).reshape(rows, -1), cut[:, 0].reshape(rows, -1)


def widen(blocks: Blocks) -> Tensor:
    """Return blocks as float32 `[rows, inner]`. Kinds without a packed form here are widened on the CPU."""
    if blocks.layout.stored is None:
        return _widened_by_package(blocks)
    if blocks.kind != "MXFP4":
        return read_numbers(blocks).widen()
    codes, exponents = read_fp4(blocks)
    levels = torch.tensor(FP4_NUMBERS, device=codes.device)
    levels = 2 * torch.cat([levels, -levels])  # and half of a scale, which 2**128 would not be
    group = blocks.layout.group
    return torch.ldexp(levels[codes.int()], exponents.int().repeat_interleave(group, 1) - EXPONENT_BIAS - 1)


def _widened_by_package(blocks: Blocks) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    numbers = dequantize(blocks.data.cpu().numpy(), GGMLQuantizationType[blocks.kind])
    return torch.from_numpy(numbers).to(blocks.data.device)


def widen_blocks(blocks: Blocks, place: Tensor) -> None:
    """Write blocks into `place`, `[rows, inner]` of any float type, each number rounded once."""
    for begin in range(0, blocks.shape[0], blocks.rows_at_once):
        rows = slice(begin, begin + blocks.rows_at_once)
        place[rows].copy_(widen(blocks.rows(rows).to(place.device)))


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _half(block: Tensor, begin: int) -> Tensor:
    """Return float16 `[blocks, 1]` of two bytes."""
    return block[:, begin : begin + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Return all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _alike(like: Tensor, value: int) -> Tensor:
    return torch.full_like(like, value, dtype=torch.int8)


def _pairs(packed: Tensor) -> Tensor:
    """Return numbers of two bits, `[.., 4, bytes]`: all lowest ones first."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed[..., None, :] >> shifts) & 3


def _fifth_bits(block: Tensor, begin: int) -> Tensor:
    """Return the fifth bits of 32 numbers, in their place above four others."""
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)
    return (((block[:, begin : begin + 4, None] >> shifts) & 1) << 4).flatten(1)


def _q4_0(block: Tensor) -> _Parts:
    d = _half(block, 0)
    return _nibbles(block[:, 2:]), d, d, _alike(d, 1), _alike(d, 8)


def _q4_1(block: Tensor) -> _Parts:
    d = _half(block, 0)
    return _nibbles(block[:, 4:]), d, _half(block, 2), _alike(d, 1), _alike(d, -1)


def _q5_0(block: Tensor) -> _Parts:
    d = _half(block, 0)
    return _nibbles(block[:, 6:]) | _fifth_bits(block, 2), d, d, _alike(d, 1), _alike(d, 16)


def _q5_1(block: Tensor) -> _Parts:
    d = _half(block, 0)
    return _nibbles(block[:, 8:]) | _fifth_bits(block, 4), d, _half(block, 2), _alike(d, 1), _alike(d, -1)


def _q8_0(block: Tensor) -> _Parts:
    """Read signed numbers, here from 128 up."""
    d = _half(block, 0)
    return block[:, 2:] ^ 128, d, -d, _alike(d, 1), _alike(d, -128)


def _q2_k(block: Tensor) -> _Parts:
    q, both = _pairs(block[:, 16:80].reshape(-1, 2, 32)), block[:, :16]
    scales, offsets = (both & 15).view(torch.int8), (both >> 4).view(torch.int8)
    return q.flatten(1), _half(block, 80), _half(block, 82), scales, offsets


def _q3_k(block: Tensor) -> _Parts:
    """Read numbers from 4 up, so the offset of a group is its scale, four times."""
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)[:, None]
    third = ((block[:, None, :32] >> shifts) & 1) << 2  # [blocks, 8, 32]
    q = _pairs(block[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 8, 32) | third
    high = _pairs(block[:, 104:108]).flatten(1) << 4
    scales = ((_nibbles(block[:, 96:104]) | high) - 32).view(torch.int8)
    d = _half(block, 108)
    return q.flatten(1), d, d, scales, scales * 4


def _six_bit_scales(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and offsets of eight groups, six bits each, of twelve bytes."""
    low, middle, high = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], 1)
    offsets = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], 1)
    return scales.view(torch.int8), offsets.view(torch.int8)


def _q4_k(block: Tensor) -> _Parts:
    q = _nibbles(block[:, 16:].reshape(-1, 4, 32))
    return q.flatten(1), _half(block, 0), _half(block, 2), *_six_bit_scales(block)


def _q5_k(block: Tensor) -> _Parts:
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)[:, None]
    fifth = ((block[:, None, 16:48] >> shifts) & 1) << 4  # [blocks, groups, 32]
    q = _nibbles(block[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth
    return q.flatten(1), _half(block, 0), _half(block, 2), *_six_bit_scales(block)


def _q6_k(block: Tensor) -> _Parts:
    """Read numbers from 32 up, so the offset of a group is its scale, 32 times."""
    low = _nibbles(block[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = _pairs(block[:, 128:192].reshape(-1, 2, 32)) << 4
    scales, d = block[:, 192:208].view(torch.int8), _half(block, 208)
    return (low | high).flatten(1), d, d * 32, scales, scales


@cache
def _levels(device: torch.device) -> Tensor:
    """Return the 16 numbers of IQ4's four bits, plus 128, uint8 `[16]`."""
    from gguf.quants import IQ4_NL

    return torch.tensor(IQ4_NL.kvalues, dtype=torch.int8, device=device).view(torch.uint8) ^ 128


def _iq4_nl(block: Tensor) -> _Parts:
    d = _half(block, 0)
    return _levels(block.device)[_nibbles(block[:, 2:]).int()], d, -d, _alike(d, 1), _alike(d, -128)


def _iq4_xs(block: Tensor) -> _Parts:
    """Read numbers from 128 up, so the offset of a group is its scale, 128 times."""
    low, d = block[:, 4:8], _half(block, 0)
    low = torch.stack([low & 15, low >> 4], -1).flatten(1)
    high = _pairs(block[:, 2:4]).transpose(1, 2).flatten(1) << 4
    scales = ((low | high) - 32).view(torch.int8)
    q = _levels(block.device)[_nibbles(block[:, 8:].reshape(-1, 8, 16)).int()]
    return q.flatten(1), d, d * 32, scales, scales * 4


_LAYOUTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
