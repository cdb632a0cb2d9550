"""Pack numbers of 4 and 8 bits into 32-bit words such that both halves of a word hold neighbours. Plain torch.

A row is cut into units of 16 words. Their columns come in runs of 32, one run for each pair of places in a word. Word w
has columns 2 w and 2 w + 1 of run p in its lower and its upper half, at the bits from `p * bits` on. So one mask takes
a pair of 16-bit numbers out of each word, in the order in which tokens have them. A row's last unit is padded with
zeros.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu.model.matrix_format import UNIT_WORDS, WORD_BITS, unit_columns

RUN_COLUMNS = 2 * UNIT_WORDS


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack uint8 numbers `[rows, inner]` below `2**bits` into int32 `[rows, num_words(inner, bits)]`."""
    rows, inner = numbers.shape
    places = WORD_BITS // bits // 2
    padded = F.pad(numbers, (0, -inner % unit_columns(bits)))
    cut = padded.view(rows, padded.shape[1] // unit_columns(bits), places, UNIT_WORDS, 2)
    words = torch.zeros(rows, cut.shape[1], UNIT_WORDS, dtype=torch.int32, device=numbers.device)
    for place in range(places):
        for half in range(2):
            words |= cut[:, :, place, :, half].to(torch.int32) << (bits * place + WORD_BITS // 2 * half)
    return words.flatten(1)


def unpack_words(words: Tensor, bits: int, inner: int) -> Tensor:
    """Unpack rows of `inner` columns: the reverse of `pack_words`."""
    rows, places = words.shape[0], WORD_BITS // bits // 2
    cut = words.view(rows, words.shape[1] // UNIT_WORDS, UNIT_WORDS)
    shifts = [[bits * place + WORD_BITS // 2 * half for half in range(2)] for place in range(places)]
    taken = [torch.stack([((cut >> shift) & (2**bits - 1)).to(torch.uint8) for shift in pair], 3) for pair in shifts]
    return torch.stack(taken, 2).flatten(1)[:, :inner]
