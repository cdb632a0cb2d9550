"""Numbers of 4 and 8 bits in 32-bit words, laid out so that a kernel meets a word's numbers in the order of its tokens.

A row is cut into units. A unit's words hold its columns in planes: word w of W has columns w, W + w, 2 W + w, ... in
its bits from the lowest up, so that one shift takes a run of neighbours out of a run of words. It refuses to know what
the numbers mean. Plain torch, on any device.
"""

import math

import torch
from torch import Tensor

WORD_BITS = 32
LARGEST_UNIT = 128  # columns


def unit_of(inner: int, group: int, bits: int) -> int:
    """Columns of a unit: the largest power of two that divides a row and a group. Raises ValueError where no whole word
    of them does.
    """
    unit = math.gcd(math.gcd(inner, group), LARGEST_UNIT)
    if unit % (WORD_BITS // bits):
        raise ValueError(f"rows of {inner} in groups of {group}: wanted multiples of {WORD_BITS // bits} columns")
    return unit


def pack_words(numbers: Tensor, bits: int, unit: int) -> Tensor:
    """uint8 `[rows, inner]` below `2**bits` -> int32 `[rows, inner * bits / 32]`."""
    rows, inner = numbers.shape
    planes = WORD_BITS // bits
    cut = numbers.view(rows, inner // unit, planes, unit // planes)
    words = torch.zeros(rows, inner // unit, unit // planes, dtype=torch.int32, device=numbers.device)
    for plane in range(planes):
        words |= cut[:, :, plane].to(torch.int32) << (bits * plane)
    return words.flatten(1)


def unpack_words(words: Tensor, bits: int, unit: int) -> Tensor:
    """The reverse of `pack_words`."""
    rows, planes = words.shape[0], WORD_BITS // bits
    cut = words.view(rows, -1, unit // planes)
    taken = [((cut >> (bits * plane)) & (2**bits - 1)).to(torch.uint8) for plane in range(planes)]
    return torch.stack(taken, 2).flatten(1)
