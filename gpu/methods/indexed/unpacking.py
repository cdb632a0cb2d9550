"""Turn packed codes into numbers for products, four at once on a card.

A code in the low byte of a number is that number's mantissa: behind the high byte 0x43, in bfloat16, it is 128 + code;
behind 0x3C, in float16 and moved to the top of its byte, 1 + code / 2^(bits + 2). So a shift, a mask and two byte
permutations turn four bytes into four numbers. What is added is taken off the products. Next to the codes it is small
in float16, where sums are of many codes; in bfloat16 it is multiplied by the same rounded weights as they are.
"""

import triton
import triton.language as tl

from gpu.operations.arguments import INTERPRETED

FOURFOLD = tl.constexpr(not INTERPRETED)


def half_assembly(bits: int) -> tuple[str, ...]:
    """Return for each plane the PTX that makes 1 + code / 2^(bits + 2), float16, of four bytes with codes."""
    return tuple(_assembly(f"shl.b32 codes, $2, {8 - bits - plane * bits}", bits, 8 - bits, 0x3C)
                 for plane in range(8 // bits))  # fmt: skip


def bfloat_assembly(bits: int) -> tuple[str, ...]:
    """Return for each plane the PTX that makes 128 + code, bfloat16, of four bytes with codes."""
    return tuple(_assembly(f"shr.b32 codes, $2, {plane * bits}", bits, 0, 0x43) for plane in range(8 // bits))


def _assembly(shift: str, bits: int, low: int, high: int) -> str:
    mask, numbers = f"0x{(((1 << bits) - 1) << low) * 0x01010101:08X}", f"0x{high * 0x01010101:08X}"
    return (
        f"{{ .reg .b32 codes; {shift}; and.b32 codes, codes, {mask}; "
        f"prmt.b32 $0, codes, {numbers}, 0x4140; prmt.b32 $1, codes, {numbers}, 0x4342; }}"
    )


@triton.jit
def half_plane_of(packed, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return one plane's codes c as 1 + c / 2^(BITS + 2), float16; interpreted, as they are."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
    else:  # noqa: RET505 (one of the two is left when it compiles)
        return ((packed >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float16)


@triton.jit
def bfloat_plane_of(packed, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return one plane's codes c as 128 + c, bfloat16; interpreted, as they are, float32."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:  # noqa: RET505
        return ((packed >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def exp2_of(number):
    """Return 2^number, float32; on a card, results below 2^-126 are 0."""
    if FOURFOLD:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [number], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.exp2(number)
