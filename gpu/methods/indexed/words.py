"""Convert packed codes of 2 or 4 bits to numbers for products, by words of 16 bits, two words at once on a card.

A code in the mantissa of a bfloat16, with zeros around it and the exponent of 1, is the number 1 + code * 2^lowest /
2^7, where its lowest bit is bit `lowest`. So one shift for several planes, and one instruction for each plane, convert
two codes of two words, and no byte moves. The ones and the powers of two are removed from the products. A **plane** is
the codes at one place of all words.

On a card the order of the numbers decides what passes through shared memory. If eight consecutive words are the fastest
axis of a product's outer dimension, a thread needs all numbers of its words. Then words pass through shared memory, and
not numbers, which are four or eight times as many.
"""

import triton
import triton.language as tl

from gpu.operations.arguments import INTERPRETED

ON_CARD = tl.constexpr(not INTERPRETED)
MANTISSA = 7  # bits of a bfloat16's mantissa
_ONE = 0x3F80  # the bits of the number 1


def word_assembly(bits: int) -> tuple[str, ...]:
    """Return for each plane the PTX that converts its codes of two words to two numbers."""
    at_once, twice = MANTISSA // bits, 0x00010001
    planes = []
    for plane in range(16 // bits):
        by, at = plane // at_once * at_once * bits, plane % at_once * bits
        mask = (((1 << bits) - 1) << at) * twice
        planes.append(
            f"{{ .reg .b32 codes; shr.b32 codes, $1, {by}; "
            f"lop3.b32 $0, codes, 0x{mask:08X}, 0x{_ONE * twice:08X}, 0xEA; }}"
        )
    return tuple(planes)


@triton.jit
def _plane_of(words, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return one plane's numbers; under the interpreter, its codes as float32."""
    if not ON_CARD:
        return ((words.to(tl.int32) >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    else:  # noqa: RET505 (one branch is left when it compiles)
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def numbers_of(
    words, WIDTH: tl.constexpr, LOW: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Return the numbers of words `[TILE, WIDTH]` as `[TILE, numbers]`, in the order of `number_places`.

    That order has LOW words side by side, then their next plane.
    """
    words = tl.reshape(words, [TILE, WIDTH // LOW, LOW])
    even, odd = _plane_of(words, 0, BITS, ASSEMBLY), _plane_of(words, 1, BITS, ASSEMBLY)
    third, fourth = _plane_of(words, 2, BITS, ASSEMBLY), _plane_of(words, 3, BITS, ASSEMBLY)
    if BITS == 4:
        planes = tl.permute(tl.join(tl.join(even, third), tl.join(odd, fourth)), (0, 3, 1, 4, 2))
    else:
        even = tl.join(even, _plane_of(words, 4, BITS, ASSEMBLY))
        odd = tl.join(odd, _plane_of(words, 5, BITS, ASSEMBLY))
        third = tl.join(third, _plane_of(words, 6, BITS, ASSEMBLY))
        fourth = tl.join(fourth, _plane_of(words, 7, BITS, ASSEMBLY))
        planes = tl.permute(tl.join(tl.join(even, third), tl.join(odd, fourth)), (0, 3, 4, 1, 5, 2))
    return tl.reshape(planes, [TILE, 16 // BITS * WIDTH])


@triton.jit
def number_places(W: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr):
    """Return each number's dimension, whether it exists, and 2^lowest. W: words of a token."""
    PLANES: tl.constexpr = 16 // BITS
    number = tl.arange(0, PLANES * WIDTH)
    plane = number // (2 * WIDTH) * 2 + number // LOW % 2
    word = number // (2 * LOW) % (WIDTH // LOW) * LOW + number % LOW
    dim = plane % (PLANES // 2) * (2 * W) + 2 * word + plane // (PLANES // 2)
    lowest = number * 0
    if ON_CARD:
        lowest = plane % (7 // BITS) * BITS  # MANTISSA
    return dim, word < W, (1 << lowest).to(tl.float32)
