"""Turn packed codes into numbers for products by words of 16 bits, two words at once on a card.

A code in the mantissa of a float16 or bfloat16, zeros around it and the exponent of 1 in front, is 1 + code * 2^lowest
/ 2^mantissa, where its lowest bit is bit `lowest`. So one shift for several planes, and one instruction for each, make
two numbers of two words, and no byte moves. Ones and powers of two are taken off the products. A **plane** is the codes
at one place of all words.

On a card the order of the numbers decides what goes through shared memory. Where words are the fastest axis of the
inner dimension of a product, or eight words at a time that of the outer one, a thread needs all numbers of its words:
then words pass shared memory, and not numbers, which are four or eight times as many.
"""

import triton
import triton.language as tl

from gpu.operations.arguments import INTERPRETED

ON_CARD = tl.constexpr(not INTERPRETED)
HALF, BFLOAT = (10, 0x3C00), (7, 0x3F80)
"""Bits of a mantissa, and the number 1, of float16 and bfloat16."""


def word_assembly(bits: int, mantissa: int, one: int) -> tuple[str, ...]:
    """Return each plane's PTX, which makes two numbers of two words. Of 3 bits, a word has one code by then."""
    if bits == 3:
        return (f"or.b32 $0, $1, 0x{one * 0x00010001:08X};",) * 8
    at_once, twice = mantissa // bits, 0x00010001
    planes = []
    for plane in range(16 // bits):
        by, at = plane // at_once * at_once * bits, plane % at_once * bits
        mask = (((1 << bits) - 1) << at) * twice
        planes.append(
            f"{{ .reg .b32 codes; shr.b32 codes, $1, {by}; "
            f"lop3.b32 $0, codes, 0x{mask:08X}, 0x{one * twice:08X}, 0xEA; }}"
        )
    return tuple(planes)


@triton.jit
def _plane_of(words, thirds, PLANE: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return one plane's numbers; interpreted, its codes."""
    if BITS == 3:
        words = ((words >> (2 * PLANE)) & 3) | (((thirds >> PLANE) & 1).to(tl.int16) << 2)
    if not ON_CARD:
        codes = words if BITS == 3 else (words.to(tl.int32) >> (PLANE * BITS)) & ((1 << BITS) - 1)
        return codes.to(tl.float16 if MANTISSA == 10 else tl.float32)
    elif MANTISSA == 10:  # noqa: RET505 (one of them is left when it compiles)
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def numbers_of(
    words, thirds, WIDTH: tl.constexpr, LOW: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
    MANTISSA: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Return the numbers of words `[TILE, WIDTH]`, `[TILE, numbers]`, in the order of `number_places`: LOW words
    side by side, then their next plane.

    thirds: the highest bits of codes of 3 bits, a byte for each word; else not looked at.
    """
    words = tl.reshape(words, [TILE, WIDTH // LOW, LOW])
    if BITS == 3:
        thirds = tl.reshape(thirds, [TILE, WIDTH // LOW, LOW])
    even = _plane_of(words, thirds, 0, BITS, MANTISSA, ASSEMBLY)
    odd = _plane_of(words, thirds, 1, BITS, MANTISSA, ASSEMBLY)
    if BITS == 8:
        planes = tl.permute(tl.join(even, odd), (0, 1, 3, 2))
    else:
        third = _plane_of(words, thirds, 2, BITS, MANTISSA, ASSEMBLY)
        fourth = _plane_of(words, thirds, 3, BITS, MANTISSA, ASSEMBLY)
        if BITS == 4:
            planes = tl.permute(tl.join(tl.join(even, third), tl.join(odd, fourth)), (0, 3, 1, 4, 2))
        else:
            even = tl.join(even, _plane_of(words, thirds, 4, BITS, MANTISSA, ASSEMBLY))
            odd = tl.join(odd, _plane_of(words, thirds, 5, BITS, MANTISSA, ASSEMBLY))
            third = tl.join(third, _plane_of(words, thirds, 6, BITS, MANTISSA, ASSEMBLY))
            fourth = tl.join(fourth, _plane_of(words, thirds, 7, BITS, MANTISSA, ASSEMBLY))
            planes = tl.permute(tl.join(tl.join(even, third), tl.join(odd, fourth)), (0, 3, 4, 1, 5, 2))
    return tl.reshape(planes, [TILE, 16 // (2 if BITS == 3 else BITS) * WIDTH])


@triton.jit
def number_places(W: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr):
    """Return for each number its dimension, whether there is one, and 2^lowest. W: words of a token."""
    PLANES: tl.constexpr = 16 // (2 if BITS == 3 else BITS)
    number = tl.arange(0, PLANES * WIDTH)
    plane = number // (2 * WIDTH) * 2 + number // LOW % 2
    word = number // (2 * LOW) % (WIDTH // LOW) * LOW + number % LOW
    dim = plane % (PLANES // 2) * (2 * W) + 2 * word + plane // (PLANES // 2)
    lowest = number * 0
    if ON_CARD and BITS != 3:
        lowest = plane % (MANTISSA // BITS) * BITS
    return dim, word < W, (1 << lowest).to(tl.float32)


@triton.jit
def prefetch(pointer, BYTES: tl.constexpr, LINES: tl.constexpr):
    """Have so many bytes from a pointer on brought to the second cache. LINES: a power of two, of 128 bytes each, that
    hold as many.
    """
    if ON_CARD:
        line = tl.minimum(tl.arange(0, LINES), BYTES // 128 - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer.to(tl.int64) + 128 * line],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
