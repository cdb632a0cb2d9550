"""Widen the words of a packed matrix inside kernels: to single numbers in float32, and to pairs of them in bf16.

An integer becomes a float without a conversion. Put at the top of the mantissa of 1.0 it is `1 + q / 2**bits`, and `(q
- zero) * scale` is that less `1 + zero / 2**bits`, times `scale * 2**bits`. Four bits below the bits of 128.0 in bf16
are `128 + q`, so one mask and one sum turn a word into two exact numbers; eight bits are two times four. An FP8 byte,
moved to the sign, exponent and mantissa of a float with 8 exponent bits, is its number times 2**-120, also if it is
subnormal; four bits of FP4 are in the same way the number times 2**-126. FP4's scales may be exponents: such a byte,
moved to a float's exponent, is its power of two.
"""

import triton
import triton.language as tl

from gpu.model.matrix_format import unit_columns
from gpu.operations.arguments import INTERPRETED
from gpu.operations.linear.packed_matrix import Packed

KINDS = {"int4": 4, "int8": 8, "fp8": 0, "fp4": 12}  # 4 modulo 8: of 4 bits; multiples of 12: floats

_INTERPRETED = tl.constexpr(INTERPRETED)

# Two numbers of 4 bits: the masked bits below those of 128.0, less 128 + zero.
_FOUR = tl.constexpr(
    "{ .reg .b32 q; lop3.b32 q, $1, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, q, $3, $2; }"
)  # fmt: skip
# Two numbers of 8 bits: lower and upper four bits like that, the upper times 16, added.
_EIGHT = tl.constexpr(
    "{ .reg .b32 l, h; lop3.b32 l, $1, 0x000f000f, 0x43004300, 0xea; shr.u32 h, $1, 4;"
    " lop3.b32 h, h, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 l, l, $4, $2;"
    " fma.rn.bf16x2 h, h, $4, $3; fma.rn.bf16x2 $0, h, $5, l; }"
)  # fmt: skip
# FP8 in the upper byte of each half: moved, times 2**120.
_FLOAT = tl.constexpr(
    "{ .reg .b32 m, z; shr.u32 m, $1, 4; and.b32 m, m, 0x07f007f0; lop3.b32 m, $1, 0x80008000, m, 0xea;"
    " mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, m, $2, z; }"
)  # fmt: skip
# FP4 in the top four bits of each half: moved, times 2**126.
_SMALL_FLOAT = tl.constexpr(
    "{ .reg .b32 m, z; shr.u32 m, $1, 6; and.b32 m, m, 0x01c001c0; lop3.b32 m, $1, 0x80008000, m, 0xea;"
    " mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, m, $2, z; }"
)  # fmt: skip


def layout(packed: Packed) -> dict[str, object]:
    """Return a matrix's constants for kernels. COLUMNS: of a unit. IS_FINE: a unit has several groups."""
    columns, groups = unit_columns(packed.bits), packed.scales.shape[1]
    return {
        "INNER": packed.inner, "COLUMNS": columns, "NUM_WORDS": packed.num_words, "GROUP": packed.group,
        "NUM_GROUPS": groups, "IS_FINE": groups > 1 and packed.group % columns != 0,
        "NUM_RUNS": 0 if packed.runs is None else packed.runs.shape[1], "ROW_BLOCK": packed.row_block,
        "KIND": KINDS[packed.kind], "HAS_ZEROS": packed.zeros is not None,
    }  # fmt: skip


@triton.jit
def _moved(words, SHIFT: tl.constexpr):
    """Move bits left by SHIFT, or right if it is negative."""
    if SHIFT >= 0:
        return words << SHIFT
    return words >> -SHIFT


@triton.jit
def factor(words, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers at a place of words, float32: `1 + q / 2**bits`, or FP8 times 2**-120, or FP4
    times 2**-126.
    """
    if KIND == 4:
        bits = (_moved(words, 19 - 4 * PLACE) & 0x00780000) | 0x3F800000
    elif KIND == 8:
        bits = (_moved(words, 15 - 8 * PLACE) & 0x007F8000) | 0x3F800000
    elif KIND == 12:
        bits = (_moved(words, 28 - 4 * PLACE) >> 6) & -0x7E400000  # sign, and three bits about the mantissa's top
    else:
        bits = (_moved(words, 24 - 8 * PLACE) >> 4) & -0x78100000  # sign, and seven bits below the exponent's top
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _low_half(both):
    """Return the float16 in a word's lower bits as float32."""
    return both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _signed_byte(words, SHIFT: tl.constexpr):
    """Return the signed byte from bit SHIFT on as float32.

    The byte plus 128 is put below the bits of 2**23: a conversion of an integer to a float would take four times as
    long.
    """
    bits = ((words >> SHIFT).to(tl.int32) & 255) ^ 0x4B000080
    return bits.to(tl.float32, bitcast=True) - (2.0**23 + 128.0)


@triton.jit
def run_of(runs, row, column, inside, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_RUNS: tl.constexpr):
    """Return the word of a run: both float16 numbers that its scales and offsets are multiples of."""
    return tl.load(runs + row * NUM_RUNS + column // (GROUP * NUM_GROUPS // NUM_RUNS), mask=inside, other=0)


@triton.jit
def group_of_run(scales, both, row, column, inside, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr):
    """Return offset and scale of a group, float32, both exact: a number is `q * scale - offset`.

    both: the run's word.
    """
    pair = tl.load(scales + row * NUM_GROUPS + column // GROUP, mask=inside, other=0)
    return group_of_pairs(pair, both, 0)


@triton.jit
def group_of_pairs(pairs, both, AT: tl.constexpr):
    """Return offset and scale of the AT-th group whose bytes are in `pairs`; see `group_of_run`."""
    return _low_half(both >> 16) * _signed_byte(pairs, 16 * AT + 8), _low_half(both) * _signed_byte(pairs, 16 * AT)


@triton.jit
def beside(
    scales, runs, row, unit, INNER: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_RUNS: tl.constexpr, ROW_BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Load what is stored beside the words of a unit: scales, and the run if there is one.

    AHEAD: the number of a unit's groups, whose pairs of bytes come in one load; also 1 if a unit, or a row, is part of
    a group; 0: nothing is loaded here. Triton does not copy loads of fewer than 32 bits ahead, nor values that no
    tensor core takes. So they are loaded one turn of the loop before they are needed.
    """
    inside = unit < INNER
    scale, run = unit, unit
    if AHEAD > 0 and NUM_RUNS > 0:
        if AHEAD == 4:
            scales = scales.to(tl.pointer_type(tl.int64), bitcast=True)
        elif AHEAD == 2:
            scales = scales.to(tl.pointer_type(tl.int32), bitcast=True)
        scale = tl.load(scales + row * (NUM_GROUPS // AHEAD) + unit // (GROUP * AHEAD), mask=inside, other=0)
        run = run_of(runs, row, unit, inside, GROUP, NUM_GROUPS, NUM_RUNS)
    elif AHEAD > 0:
        if NUM_GROUPS == 1:
            unit, inside = unit * 0, unit * 0 == 0
        scale = tl.load(scales + (row // ROW_BLOCK) * NUM_GROUPS + unit // GROUP, mask=inside, other=0.0)
    return scale, run


@triton.jit
def scale_of(stored, KIND: tl.constexpr):
    """Return a scale as float32. FP4's may be stored as an exponent, for which 0 stands for 0."""
    if KIND == 12 and stored.dtype.is_int():
        return (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return stored.to(tl.float32)


@triton.jit
def scales_of(
    scales, zeros, row, column, inside, HAS_ZEROS: tl.constexpr, KIND: tl.constexpr, ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_RUNS: tl.constexpr,
):  # fmt: skip
    """Return what is subtracted from factors times a gain, and the gain, float32, broadcast as rows and columns are.

    For FP8 and FP4 they are 0 and the scale. All three have so few bits that the difference is exact. zeros: runs, if
    NUM_RUNS is not 0; then only an offset is subtracted, and factors are reduced by one.
    """
    BASE: tl.constexpr = 16.0 if KIND == 4 else 256.0
    if NUM_RUNS > 0:
        both = run_of(zeros, row, column, inside, GROUP, NUM_GROUPS, NUM_RUNS)
        offset, scale = group_of_run(scales, both, row, column, inside, GROUP, NUM_GROUPS)
        return offset, scale * BASE
    at = (row // ROW_BLOCK) * NUM_GROUPS + column // GROUP
    scale = scale_of(tl.load(scales + at, mask=inside, other=0.0), KIND)
    if KIND % 12 == 0:
        return scale * 0.0, scale
    less = 1.5 * BASE
    if HAS_ZEROS:
        less = BASE + tl.load(zeros + at, mask=inside, other=0).to(tl.float32)
    return less * scale, scale * BASE


@triton.jit
def widened(words, less, gain, PLACE: tl.constexpr, KIND: tl.constexpr, NUM_RUNS: tl.constexpr):
    """Return the scaled float32 numbers at a place of words."""
    if NUM_RUNS > 0:
        return (factor(words, PLACE, KIND) - 1.0) * gain - less  # the product is exact
    if KIND == 0:
        return factor(words, PLACE, KIND) * 2.0**120 * gain
    if KIND == 12:
        return factor(words, PLACE, KIND) * 2.0**126 * gain
    return factor(words, PLACE, KIND) * gain - less


@triton.jit
def zeros_of(
    zeros, row, column, inside, HAS_ZEROS: tl.constexpr, KIND: tl.constexpr, ROW_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return zero points of integers, int32, broadcast as rows and columns are."""
    if HAS_ZEROS:
        return tl.load(zeros + (row // ROW_BLOCK) * NUM_GROUPS + column // GROUP, mask=inside, other=0).to(tl.int32)
    return ((row + column) * 0 + (8 if KIND == 4 else 128)).to(tl.int32)


@triton.jit
def no_byte(words, unit):
    """Return int32 0 as a byte that is never loaded, for assembly that ignores it.

    Triton gives a thread eight neighbouring columns if numbers are made from bytes, and four otherwise; eight are one
    load from shared memory, of words and of tokens. unit: not negative.
    """
    return tl.load(words.to(tl.pointer_type(tl.int8), bitcast=True) + unit, mask=unit < 0, other=0).to(tl.int32)


@triton.jit
def exact_pairs(words, zero, byte, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers of both halves of words at a place, less `zero`, not yet scaled: bf16 `[.., words, 2]`.

    zero: int32, broadcast; ignored for FP8 and FP4. byte: from `no_byte`.
    """
    PLACES: tl.constexpr = 4 if KIND % 8 == 4 else 2
    if _INTERPRETED:  # the interpreter has no assembly
        STEPS: tl.constexpr = 2.0**120 if KIND == 0 else 2.0**126 if KIND == 12 else 2.0**KIND
        less = zero * 0.0 if KIND % 12 == 0 else zero + STEPS
        low = (factor(words, PLACE, KIND) * STEPS - less).to(tl.bfloat16)
        high = (factor(words, PLACE + PLACES, KIND) * STEPS - less).to(tl.bfloat16)
    else:
        one = tl.full(words.shape, 0x3F803F80, tl.int32)
        if KIND == 4:
            less = tl.broadcast_to(_less_of_128(zero), words.shape)
            both = tl.inline_asm_elementwise(
                _FOUR, "=r,r,r,r,r", [words >> (4 * PLACE), less, one, byte], dtype=tl.int32, is_pure=True, pack=1
            )
        elif KIND == 8:
            less = tl.broadcast_to(_less_of_128(zero & 15), words.shape)
            more = tl.broadcast_to(_less_of_128(zero >> 4), words.shape)
            sixteen = tl.full(words.shape, 0x41804180, tl.int32)
            both = tl.inline_asm_elementwise(
                _EIGHT, "=r,r,r,r,r,r,r", [words >> (8 * PLACE), less, more, one, sixteen, byte],
                dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
        elif KIND == 12:
            highest = tl.full(words.shape, 0x7E807E80, tl.int32)
            both = tl.inline_asm_elementwise(
                _SMALL_FLOAT, "=r,r,r,r", [words << (12 - 4 * PLACE), highest, byte], dtype=tl.int32, is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            highest = tl.full(words.shape, 0x7B807B80, tl.int32)
            both = tl.inline_asm_elementwise(
                _FLOAT, "=r,r,r,r", [words << (8 - 8 * PLACE), highest, byte], dtype=tl.int32, is_pure=True, pack=1
            )
        low, high = _halves(both)
    return tl.join(low, high)


@triton.jit
def ones_like(words, byte):
    """Return ones, bf16 `[.., words, 2]`, in registers laid out as the numbers of these words.

    A second operand of tokens that is needed in two layouts would not be copied ahead.
    """
    if _INTERPRETED:
        low = tl.full(words.shape, 1.0, tl.bfloat16)
        return tl.join(low, low)
    ones = tl.inline_asm_elementwise(
        "mov.b32 $0, 0x3F803F80;", "=r,r,r", [words, byte], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip
    low, high = _halves(ones)
    return tl.join(low, high)


@triton.jit
def _halves(both):
    """Return the bf16 numbers in the lower and in the upper bits of words."""
    return both.to(tl.int16).to(tl.bfloat16, bitcast=True), (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _less_of_128(number):
    """Return `-(128 + number)` as bf16, twice in a word, for numbers below 128."""
    return (number * 0x00010001 + 0x43004300) ^ -0x7FFF8000
