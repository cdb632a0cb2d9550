"""Read the bits that exclude blocks of a context's tokens from an answer, for one row and KV head.

Functions for numba code. bits: address of int32 `[words]`, see `transfer.exchange.ExchangeSlot.excluded`; 0: nothing is
excluded. Blocks beyond the last word are not excluded.
"""

import numpy as np

from transfer.simd.inner import inner
from transfer.simd.memory import clear_bytes, count_bits, load_int32, lowest_bit
from transfer.tier_shape import BLOCK_TOKENS, WORD_BITS

_ONE = np.uint64(1)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_WORD = np.uint64(0xFFFFFFFF)


@inner
def bits_at(excluded, words, row):
    """Return the address of row `row` of the bits `[rows, words]` at address `excluded`; 0 if that is 0."""
    return excluded + 4 * words * row if excluded != 0 else 0


@inner
def _is_excluded(bits, words, block):
    word = block // WORD_BITS
    return word < words and (load_int32(bits + 4 * word) >> (block % WORD_BITS)) & 1


@inner
def _blocks_of(words, begin, end):
    """Return the range of blocks that have bits and contain some of tokens `[begin, end)`."""
    return begin // BLOCK_TOKENS, min((end + BLOCK_TOKENS - 1) // BLOCK_TOKENS, words * WORD_BITS)


@inner
def _mask(bits, word, first, last):
    """Return those bits of one word that stand for blocks `[first, last)`. The word has some of these blocks."""
    mask, begin = np.uint64(load_int32(bits + 4 * word)) & _WORD, word * WORD_BITS
    if first > begin:
        mask &= _ALL << np.uint64(first - begin)
    if last < begin + WORD_BITS:
        mask &= _ALL >> np.uint64(64 - (last - begin))
    return mask


@inner
def count_excluded(bits, words, begin, end):
    """Return how many of tokens `[begin, end)` are excluded."""
    if bits == 0 or begin == end:
        return 0
    first, last = _blocks_of(words, begin, end)
    blocks = 0
    for word in range(first // WORD_BITS, (last + WORD_BITS - 1) // WORD_BITS):
        blocks += count_bits(_mask(bits, word, first, last))
    before = begin % BLOCK_TOKENS if _is_excluded(bits, words, first) else 0
    after = -end % BLOCK_TOKENS if _is_excluded(bits, words, (end - 1) // BLOCK_TOKENS) else 0
    return BLOCK_TOKENS * blocks - before - after


@inner
def excludes_alike(bits, other, words, begin, end):
    """Return whether two rows exclude the same blocks of tokens `[begin, end)`."""
    if bits == 0 or begin == end:
        return True
    first, last = _blocks_of(words, begin, end)
    for word in range(first // WORD_BITS, (last + WORD_BITS - 1) // WORD_BITS):
        if _mask(bits, word, first, last) != _mask(other, word, first, last):
            return False
    return True


@inner
def next_covered(bits, words, at, end):
    """Return the first range of `[at, end)` without excluded tokens: (begin, end); or (end, end) if there is none."""
    if bits == 0:
        return at, end
    while at < end and _is_excluded(bits, words, at // BLOCK_TOKENS):
        at = (at // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    to = at
    while to < end and not _is_excluded(bits, words, to // BLOCK_TOKENS):
        to = (to // BLOCK_TOKENS + 1) * BLOCK_TOKENS
    return min(at, end), min(to, end)


@inner
def clear_excluded(bits, words, begin, end, counters):
    """Set the counters of excluded tokens in `[begin, end)` to 0, and those of the rest of their blocks.

    counters: address of a uint8 for each token, from `begin` on. BLOCK_TOKENS counters before it and behind `end` may
    be written too.
    """
    first, last = _blocks_of(words, begin, end)
    for word in range(first // WORD_BITS, (last + WORD_BITS - 1) // WORD_BITS):
        mask = _mask(bits, word, first, last)
        while mask != 0:
            block = word * WORD_BITS + lowest_bit(mask)
            clear_bytes(counters + block * BLOCK_TOKENS - begin, BLOCK_TOKENS)
            mask &= mask - _ONE
