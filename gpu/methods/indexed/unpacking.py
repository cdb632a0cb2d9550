"""Turn packed codes into numbers for products, four at once on a card.

A code behind the high byte of a power of two is the number power + code: 1024 + code in float16 (0x64), and 128 + code
in bfloat16 (0x43). So a shift, a mask and two byte permutations turn four bytes into four numbers.
"""

import triton
import triton.language as tl

from gpu.operations.arguments import INTERPRETED

FLOAT16, BFLOAT16 = 0x64, 0x43  # high bytes
FOURFOLD = tl.constexpr(not INTERPRETED)


def unpack_assembly(bits: int, high: int) -> tuple[str, ...]:
    """Return for each plane the PTX that makes four numbers of four bytes with codes of so many bits."""
    mask, numbers = f"0x{((1 << bits) - 1) * 0x01010101:08X}", f"0x{high * 0x01010101:08X}"
    return tuple(
        f"{{ .reg .b32 codes; shr.b32 codes, $2, {plane * bits}; and.b32 codes, codes, {mask}; "
        f"prmt.b32 $0, codes, {numbers}, 0x4140; prmt.b32 $1, codes, {numbers}, 0x4342; }}"
        for plane in range(8 // bits)
    )


@triton.jit
def plane_of(packed, PLANE: tl.constexpr, BITS: tl.constexpr, ASSEMBLY: tl.constexpr, IS_HALF: tl.constexpr):
    """Return one plane's codes: on a card with the power of two added, in float16 if IS_HALF, else in bfloat16;
    interpreted, as they are in float32.
    """
    if FOURFOLD and IS_HALF:
        codes = tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,=r,r", [packed], dtype=tl.float16, is_pure=True, pack=4)
    elif FOURFOLD:
        codes = tl.inline_asm_elementwise(ASSEMBLY[PLANE], "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        codes = ((packed >> (PLANE * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
    return codes
