"""Turn packed codes into numbers for products, four at once on a card.

A code at the top of a number's mantissa, behind the high byte 0x3C of float16, is 1 + code / steps.
So a shift, a mask and two byte permutations turn four bytes into four numbers. The ones are taken off the products,
next to which they are small enough that sums of many lose nothing.
"""

import triton
import triton.language as tl

from gpu.operations.arguments import INTERPRETED

FOURFOLD = tl.constexpr(not INTERPRETED)


HALF_STEPS = {2: 16, 3: 1024, 4: 64, 8: 1024}
"""What codes of so many bits are over: 2 to the power of the bits of a mantissa from a code's lowest on."""


def half_assembly(bits: int) -> tuple[str, ...]:
    """Return for each plane the PTX that makes 1 + code / HALF_STEPS, float16, of four bytes with codes. Of 3 bits, a
    byte has one code by then.
    """
    bits = 8 if bits == 3 else bits
    return _assembly(bits, 8 - bits, 0x3C)


def _assembly(bits: int, lowest: int, high: int) -> tuple[str, ...]:
    """Return each plane's PTX, which moves a code to bit `lowest` of its byte and puts `high` in front."""
    ones = 0x01010101
    mask = f"0x{(((1 << bits) - 1) << lowest) * ones:08X}"
    planes = []
    for plane in range(8 // bits):
        by = plane * bits - lowest
        shift = f"shr.b32 codes, $2, {by};" if by >= 0 else f"shl.b32 codes, $2, {-by};"
        planes.append(
            f"{{ .reg .b32 codes; {shift} and.b32 codes, codes, {mask}; "
            f"prmt.b32 $0, codes, 0x{high * ones:08X}, 0x4140; prmt.b32 $1, codes, 0x{high * ones:08X}, 0x4342; }}"
        )
    return tuple(planes)


@triton.jit
def half_plane_of(packed, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return one plane's codes as 1 + code / HALF_STEPS, float16; interpreted, as they are."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
    else:  # noqa: RET505 (one of the two is left when it compiles)
        return ((packed >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float16)


@triton.jit
def half_thirds_of(packed, thirds, byte, PLANE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return as `half_plane_of` one plane's codes of 3 bits. thirds: for each byte the one with the highest bits."""
    code = ((packed >> (2 * PLANE)) & 3) | (((thirds >> (PLANE + 4 * (byte % 2)).to(tl.uint8)) & 1) << 2)
    return half_plane_of(code, 0, 8, ASSEMBLY)


@triton.jit
def exp2_of(number):
    """Return 2^number, float32; on a card, results below 2^-126 are 0."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.exp2(number)


@triton.jit
def log2_of(number):
    """Return the binary logarithm, float32; on a card in one instruction, off by 2^-22 of it at most."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.log2(number)
