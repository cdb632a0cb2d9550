"""Blocks of a GGUF file's tensors, as their bytes lie, and the numbers that they are.

Layouts are those of ggml's `block_q4_0` to `block_q6_K`. A number is `q * d * scale - least * offset`, exactly: d,
least, scale and offset are the file's own (`gpu.model.gguf.kinds`), but for powers of two and signs, which change no
digit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.model.gguf.kinds import BLOCK_KINDS, BlockKind

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
        """Return how many rows are few enough to be unpacked."""
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
    layout, rows = blocks.layout, len(blocks.data)
    cut = blocks.data.reshape(-1, layout.num_bytes)
    q, d, least, scales, offsets = _LAYOUTS[blocks.kind](cut)
    return Numbers(*(part.reshape(rows, -1) for part in (q, d, least, scales, offsets)))


def widen_blocks(blocks: Blocks, place: Tensor) -> None:
    """Write blocks into `place`, `[rows, inner]` of any float type, each number rounded once."""
    for begin in range(0, blocks.shape[0], blocks.rows_at_once):
        rows = slice(begin, begin + blocks.rows_at_once)
        place[rows].copy_(read_numbers(blocks.rows(rows).to(place.device)).widen())


_Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _half(block: Tensor, begin: int) -> Tensor:
    """Return float16 `[blocks, 1]` of two bytes."""
    return block[:, begin : begin + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Return all low ones, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _alike(like: Tensor, value: int) -> Tensor:
    return torch.full_like(like, value, dtype=torch.int8)


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
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=block.device)[:, None]
    high = ((block[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    scales, d = block[:, 192:208].view(torch.int8), _half(block, 208)
    return (low | high).flatten(1), d, d * 32, scales, scales


_LAYOUTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
