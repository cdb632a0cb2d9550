"""Convert packed codes of keys to integers for products in int8, four bytes at once on a card.

A shift and a mask give one plane's codes of four bytes. From 8-bit codes 128 is subtracted, so that they fit. The
number that a code stands for differs from this integer by a constant, a multiple of one half, which is added to the
products, exactly.
"""

import triton
import triton.language as tl

from gpu.operations.arguments import INTERPRETED

FOURFOLD = tl.constexpr(not INTERPRETED)


def plane_assembly(bits: int) -> tuple[str, ...]:
    """Return for each plane the PTX that converts four bytes of codes to integers. Not for 3 bits."""
    if bits == 8:
        return ("xor.b32 $0, $1, 0x80808080;",)
    mask = f"0x{((1 << bits) - 1) * 0x01010101:08X}"
    return tuple(
        f"{{ .reg .b32 codes; shr.b32 codes, $1, {plane * bits}; and.b32 $0, codes, {mask}; }}"
        for plane in range(8 // bits)
    )


@triton.jit
def twice_of_zero(BITS: tl.constexpr):
    """Return twice the number that the integer 0 stands for."""
    return 1 if BITS == 8 else 1 - (1 << BITS)


@triton.jit
def plane_of(packed, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return one plane's codes as integers, int8."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4)
    elif BITS == 8:  # noqa: RET505 (one branch is left when it compiles)
        return (packed ^ 128).to(tl.int8, bitcast=True)
    else:
        return ((packed >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.int8)


@triton.jit
def thirds_of(packed, thirds, byte, PLANE: tl.constexpr):
    """Return one plane's 3-bit codes, like `plane_of`. thirds: for each byte, the one with its highest bits."""
    code = ((packed >> (2 * PLANE)) & 3) | (((thirds >> (PLANE + 4 * (byte % 2)).to(tl.uint8)) & 1) << 2)
    return code.to(tl.int8)


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
    """Return the binary logarithm, float32; on a card in one instruction, with a relative error of at most 2^-22."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.log2(number)
