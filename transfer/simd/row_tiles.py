"""Multiply rows of 4 or 8 bits in integers: a vector's lanes are rows, and numbers of tokens are rounded to 16 bits.

TILE rows of a packed matrix (`transfer.simd.packed_rows`) are stored together: word w of all of them, then word w + 1.
A word has two neighbouring columns of each of its runs, so a shift and a mask give pairs of 16 bits. These are
multiplied by a token's pair and added up exactly in int32: one instruction with VNNI, two with AVX2. Scales, zero
points and runs of the TILE rows are stored in the same way, so gains are vectors, too. FP4 (e2m1) is looked up: twice
its number plus FP4_MIDDLE is an unsigned integer.

A token is rounded by units of columns: `x = code * scale` with codes of at most TOP, so each number is off by at most
half a scale, 2**-16 of the largest number in its unit. All else has the accuracy of float32. A column's number is
`q * gain + offset`, hence a product is `sum(scale * sum(gain * sum(q * code))) + sum(offset * sum(scale * code))`. A
result depends on its own row and token only, to the last bit.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.model_constants import FP4_NUMBERS, TILE
from transfer.simd.emission import (
    I8,
    I16,
    I32,
    I64,
    NEAR,
    VECTOR,
    accumulate,
    broadcast,
    fused,
    int64,
    prefetch,
    shuffle,
    zero,
)
from transfer.simd.features import LANES, SIMD
from transfer.simd.inner import inner
from transfer.simd.memory import copy_bytes, load_int32, load_uint16, store_float32, store_int16, store_int32
from transfer.simd.packed_gains import (
    EQUAL_PAIRS,
    EXPONENT,
    FLOAT32,
    GAINS,
    GROUPS,
    MATRIX_COLUMNS,
    MIDDLE,
    NO_OFFSET,
    NUM_RUNS,
    ROW_BYTES,
    ROWS,
    RUNS,
    SCALE_TYPE,
    SCALES,
    ZEROS,
    fetch_behind,
    fill_scales,
)
from transfer.simd.packed_rows import BITS, RUN, number_of, packed_kind, places_of, scaled_runs, unit_columns
from transfer.simd.region import pointer_to
from transfer.simd.values import FLOATS, greater, lane_max, lane_sum, load_lanes, multiply_add, spread
from transfer.simd.vectors import LINE_BYTES, address_of

NUMBERS = ("int4", "int8", "fp4")  # formats that have tiles
GROUP_COLUMNS = (32, 16)  # columns that share a gain here; for larger groups it is repeated
TOP = 32767.0  # the largest code
FP4_MIDDLE = 12
_FP4_CODES = [FP4_MIDDLE + round(2 * sign * number) for sign in (1, -1) for number in FP4_NUMBERS]
_LEAST = np.float32(2.0**-100)  # a unit whose numbers are all smaller counts as 0
_SUMS_AT_ONCE = LANES  # integer vectors of sums that stay in registers
_TO_INTEGER = np.float32(1.5 * 2**23)  # added, it leaves an integer in a float32's low bits
_UNIT_WORDS = LINE_BYTES // 4  # words of a unit
_scale_tile = scaled_runs(TILE)
_HALVES, _WORDS = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, LANES)
_BYTES, _HIGH_BIT = ir.VectorType(I8, 4 * LANES), 0x8000
LOOK_UP = {"avx512": "llvm.x86.avx512.pshuf.b.512", "avx2": "llvm.x86.avx2.pshuf.b"}[SIMD]
MULTIPLY_PAIRS = {"avx512": "llvm.x86.avx512.pmaddw.d.512", "avx2": "llvm.x86.avx2.pmadd.wd"}[SIMD]


def tile_products(tokens: int) -> Any:
    """Return a numba function: `out[t, r] = sum(row[r] * x[t, :])` for a tile and `tokens` tokens, a power of two.

    tile: its words. gains, offsets: float32 `[groups, TILE]`. x: tokens that `round_token` has rounded, x_stride
    float32 apart. inner: columns, in whole runs. out_stride: in float32. Bytes moved: the words once.
    """

    @intrinsic
    def products(typing_context, kind, tile, gains, offsets, x, x_stride, inner, out, out_stride, ahead):
        def emit(context, builder, signature, arguments):
            _, *others = arguments
            _Tile(builder, number_of(kind), kind.count, tokens).emit(*others)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 9), emit

    return products


class _Tile:
    """The emitter of products of a tile and some tokens."""

    def __init__(self, builder: ir.IRBuilder, number: str, gains_per_unit: int, tokens: int) -> None:
        self.builder, self.gains_per_unit, self.tokens = builder, gains_per_unit, tokens
        self.is_looked_up = number == "fp4"
        self.bits, self.places, self.columns = BITS[number], places_of(number), unit_columns(number)
        self.group = self.columns // gains_per_unit
        sums = tokens * RUN // self.group  # of a place
        self.at_once = max(1, min(self.places, _SUMS_AT_ONCE // sums))

    def emit(self, tile: Any, gains: Any, offsets: Any, x: Any, x_stride: Any, inner: Any, out: Any, out_stride: Any,
             ahead: Any) -> None:  # fmt: skip
        builder, columns = self.builder, int64(self.columns)
        whole, left = builder.udiv(inner, columns), builder.urem(inner, columns)
        units = builder.udiv(builder.add(inner, int64(self.columns - 1)), columns)
        self.x_at = [builder.add(x, builder.mul(x_stride, int64(4 * token))) for token in range(self.tokens)]
        self.scales_at = builder.mul(inner, int64(2))  # behind the codes, and sums behind the scales
        self.sums_at = builder.add(self.scales_at, builder.mul(units, int64(4)))
        for half in range(TILE // LANES):  # of the rows
            self.tile_at, self.gain_at, self.offset_at = (
                builder.add(address, int64(4 * LANES * half)) for address in (tile, gains, offsets)
            )
            self.totals = [cgutils.alloca_once_value(builder, zero()) for _ in range(self.tokens)]
            with cgutils.for_range(builder, whole, intp=I64) as unit:
                line = builder.add(self.tile_at, builder.mul(unit.index, int64(TILE * LINE_BYTES)))
                for byte in range(0, TILE * LINE_BYTES, LINE_BYTES) if half == 0 else ():
                    prefetch(builder, builder.add(builder.add(line, ahead), int64(byte)), NEAR)
                self._emit_unit(unit.index)
            with builder.if_then(builder.icmp_unsigned(">", left, int64(0))):
                self._emit_places(whole, builder.udiv(left, int64(RUN)))
            for token, total in enumerate(self.totals):
                at = builder.add(out, builder.mul(out_stride, int64(4 * token)))
                at = builder.add(at, int64(4 * LANES * half))
                builder.store(builder.load(total), builder.inttoptr(at, VECTOR.as_pointer()), align=4)

    def _emit_unit(self, unit: Any) -> None:
        """Emit a whole unit in straight code, with as many places together as registers have room for their sums."""
        parts: list[Any] = [zero()] * self.tokens
        for first in range(0, self.places, self.at_once):
            places = range(first, first + self.at_once)
            sums: dict[tuple[int, int], Any] = {}  # by gain and token
            for word in range(_UNIT_WORDS):
                held = self._load(self.tile_at, unit, TILE * LINE_BYTES, TILE * 4 * word, _HALVES)
                for place in places:
                    column = RUN * place + 2 * word
                    pairs = self._pairs(held, self.bits * place, place < self.places - 1)
                    for token in range(self.tokens):
                        codes = self._codes(unit, int64(0), token, column)
                        key = column // self.group, token
                        sums[key] = self._added(sums.get(key), pairs, codes)
            for gain, token in sorted(sums):
                parts[token] = self._scaled(unit, int64(gain), token, sums[gain, token], parts[token])
        for token, part in enumerate(parts):
            self._add_part(unit, token, part)

    def _emit_places(self, unit: Any, places: Any) -> None:
        """Emit a loop over the places of a unit that is not whole. places: how many it has."""
        builder, groups = self.builder, RUN // self.group
        parts = [cgutils.alloca_once(builder, VECTOR) for _ in range(self.tokens)]
        for part in parts:
            builder.store(zero(), part)
        with cgutils.for_range(builder, places, intp=I64) as place:
            bits = builder.trunc(builder.mul(place.index, int64(self.bits)), I16)
            alone = builder.insert_element(ir.Constant(_HALVES, ir.Undefined), bits, ir.Constant(I32, 0))
            bits = shuffle(builder, alone, alone, [0] * 2 * LANES)
            for group in range(groups):
                sums: list[Any] = [None] * self.tokens
                for word in range(group * _UNIT_WORDS // groups, (group + 1) * _UNIT_WORDS // groups):
                    held = self._load(self.tile_at, unit, TILE * LINE_BYTES, TILE * 4 * word, _HALVES)
                    pairs = self._pairs(held, bits, True)
                    for token in range(self.tokens):
                        codes = self._codes(unit, builder.mul(place.index, int64(2 * RUN)), token, 2 * word)
                        sums[token] = self._added(sums[token], pairs, codes)
                gain = builder.add(builder.mul(place.index, int64(groups)), int64(group))
                for token, part in enumerate(parts):
                    builder.store(self._scaled(unit, gain, token, sums[token], builder.load(part)), part)
        for token, part in enumerate(parts):
            self._add_part(unit, token, builder.load(part))

    def _load(self, address: Any, unit: Any, unit_bytes: int, byte: int, kind: Any) -> Any:
        builder = self.builder
        at = builder.add(builder.add(address, builder.mul(unit, int64(unit_bytes))), int64(byte))
        return builder.load(builder.inttoptr(at, kind.as_pointer()), align=2)

    def _pairs(self, held: Any, bits: Any, is_masked: bool) -> Any:
        """Return the numbers of a place, which begin at bit `bits`, each in 16 bits."""
        builder = self.builder
        if not isinstance(bits, int):
            held = builder.lshr(held, bits)
        elif bits:
            held = builder.lshr(held, ir.Constant(_HALVES, [bits] * 2 * LANES))
        if is_masked:
            held = builder.and_(held, ir.Constant(_HALVES, [2**self.bits - 1] * 2 * LANES))
        return self._looked_up(held) if self.is_looked_up else held

    def _looked_up(self, codes: Any) -> Any:
        """Return the integers that _FP4_CODES has for FP4's codes. A byte whose highest bit is set becomes 0."""
        builder = self.builder
        kind = ir.FunctionType(_BYTES, [_BYTES] * 2)
        look_up = cgutils.get_or_insert_function(builder.module, kind, LOOK_UP)
        table = ir.Constant(_BYTES, _FP4_CODES * (LANES // 4))
        places = builder.or_(codes, ir.Constant(_HALVES, [_HIGH_BIT] * 2 * LANES))
        return builder.bitcast(builder.call(look_up, [table, builder.bitcast(places, _BYTES)]), _HALVES)

    def _codes(self, unit: Any, byte: Any, token: int, column: int) -> Any:
        """Return a token's codes of two columns of a unit, in all lanes."""
        builder = self.builder
        pair = self._load(builder.add(self.x_at[token], byte), unit, 2 * self.columns, 2 * column, I32)
        alone = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), pair, ir.Constant(I32, 0))
        return builder.bitcast(shuffle(builder, alone, alone, [0] * LANES), _HALVES)

    def _added(self, total: Any | None, pairs: Any, codes: Any) -> Any:
        """Return an exact sum: 32 products below 2**8 * 2**15 each."""
        builder = self.builder
        kind = ir.FunctionType(_WORDS, [_HALVES] * 2)
        multiply = cgutils.get_or_insert_function(builder.module, kind, MULTIPLY_PAIRS)
        made = builder.call(multiply, [pairs, codes])
        return made if total is None else builder.add(total, made)

    def _scaled(self, unit: Any, gain: Any, token: int, total: Any, part: Any) -> Any:
        """Add one gain's products to a unit's part and return it. The offset's products are added to the total."""
        builder = self.builder
        count = builder.add(builder.mul(unit, int64(self.gains_per_unit)), gain)
        gains, offsets = (self._load(address, count, 4 * TILE, 0, VECTOR) for address in (self.gain_at, self.offset_at))
        code_sum = builder.add(builder.add(self.x_at[token], self.sums_at), builder.mul(count, int64(4)))
        accumulate(builder, self.totals[token], offsets, broadcast(builder, code_sum))
        return fused(builder, builder.sitofp(total, VECTOR), gains, part)

    def _add_part(self, unit: Any, token: int, part: Any) -> None:
        builder = self.builder
        at = builder.add(builder.add(self.x_at[token], self.scales_at), builder.mul(unit, int64(4)))
        accumulate(builder, self.totals[token], part, broadcast(builder, at))


def compile_products() -> None:
    """Compile products of tiles of all kinds without running them (`transfer.simd.trial`)."""
    multiply = tile_products(8)

    def compile_kind(kind: Any) -> None:
        def products(tile, gains, offsets, x, inner, out):
            multiply(kind, tile, gains, offsets, x, 1024, inner, out, TILE, 4096)

        numba.njit("void(int64, int64, int64, int64, int64, int64)")(products)

    for number in NUMBERS:
        for group in GROUP_COLUMNS:
            compile_kind(packed_kind(number, unit_columns(number) // group))


@intrinsic
def _store_codes(typing_context, address, shifted):
    """Store the integers in the low bits of LANES float32, as 16 bits each."""

    def emit(context, builder, signature, arguments):
        address, shifted = arguments
        halves = builder.trunc(builder.bitcast(shifted, _WORDS), ir.VectorType(I16, LANES))
        builder.store(halves, builder.inttoptr(address, halves.type.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, FLOATS), emit


@inner
def token_floats(inner, unit, group):
    """Return how many float32 a rounded token takes."""
    return inner // 2 + -(-inner // unit) + inner // group


@inner
def round_token(x, inner, unit, group, out):
    """Round a token, float32 `[inner]` at x, to `out`: int16 codes `[inner]`, float32 scales `[units]`, and for each
    group of columns the sum of its codes times their scale. In a unit with a number that is not finite, no sum is.
    """
    scales, nought = out + 2 * inner, spread(np.float32(0.0))
    sums = scales + 4 * -(-inner // unit)
    for begin in range(0, inner, unit):
        end, top, off = min(inner, begin + unit), nought, nought
        for column in range(begin, end, LANES):
            values = load_lanes(x + 4 * column)
            top = greater(values, greater(nought - values, top))
            off = multiply_add(values, nought, off)
        most, odd = lane_max(top), lane_sum(off)
        scale = most * np.float32(1.0 / TOP)
        inverse = np.float32(TOP) / most if most > _LEAST else np.float32(0.0)
        scale = (scale if most > _LEAST else np.float32(0.0)) + odd
        store_float32(scales + 4 * (begin // unit), scale)
        for first in range(begin, end, group):
            total = nought
            for column in range(first, min(first + group, end), LANES):
                shifted = multiply_add(load_lanes(x + 4 * column), spread(inverse), spread(_TO_INTEGER))
                _store_codes(out + 2 * column, shifted)
                total = total + (shifted - spread(_TO_INTEGER))
            store_float32(sums + 4 * (first // group), scale * lane_sum(total))


@inner
def fill_tile_gains(m, row, gains, offsets):
    """Write gains and offsets of the tile that begins at `row`, float32 `[GAINS, TILE]`. m: the matrix's columns."""
    if m[RUNS] != 0:
        each, runs, pairs = m[GROUPS] // m[NUM_RUNS], m[RUNS] + 4 * row * m[NUM_RUNS], m[SCALES] + 2 * row * m[GROUPS]
        pair_bytes = 2 * TILE  # of a group
        if m[SCALE_TYPE] == EQUAL_PAIRS:
            pairs, pair_bytes = m[SCALES], 0
        fetch_behind(runs, 4 * TILE * m[NUM_RUNS])
        fetch_behind(pairs, pair_bytes * m[GROUPS])
        for group in range(m[GROUPS]):
            to, run = 4 * TILE * group, TILE * (group // each)
            _scale_tile(runs + 4 * run, pairs + pair_bytes * group, gains + to, offsets + to)
    else:
        fill_scales(m, row, TILE, gains, offsets)
        if m[MIDDLE] == NO_OFFSET:
            halve_gains(TILE * m[GROUPS], gains, offsets)
    times = m[GAINS] // m[GROUPS]
    if times > 1:
        for index in range(m[GAINS] - 1, 0, -1):
            for address in (gains, offsets):
                copy_bytes(address + 4 * TILE * index, address + 4 * TILE * (index // times), 4 * TILE)


@inner
def halve_gains(count, gains, offsets):
    """Turn gains for FP4's numbers into gains and offsets for the integers that replace them."""
    gains = numba.carray(pointer_to(gains), (count,), np.float32)
    offsets = numba.carray(pointer_to(offsets), (count,), np.float32)
    for index in range(count):
        half = np.float32(0.5) * gains[index]
        gains[index], offsets[index] = half, np.float32(-FP4_MIDDLE) * half


@inner
def copy_row(m, row, columns):
    """Copy a row's words, scales, zero points and runs out of its tile to the memory behind `columns`, int64
    `[MATRIX_COLUMNS]`. `columns` become those of a matrix with that row alone.
    """
    at = address_of(columns) + 8 * MATRIX_COLUMNS
    for column in range(MATRIX_COLUMNS):
        columns[column] = m[column]
    size = 2
    if m[RUNS] == 0 and m[SCALE_TYPE] in (FLOAT32, EXPONENT):
        size = 4 if m[SCALE_TYPE] == FLOAT32 else 1
    at = _copy_part(columns, ROWS, row, m[ROW_BYTES] // 4, 4, at)
    at = _copy_part(columns, RUNS, row, m[NUM_RUNS], 4, at)
    at = _copy_part(columns, SCALES, row, m[GROUPS], size, at)
    _copy_part(columns, ZEROS, row, m[GROUPS], 1, at)


@inner
def _copy_part(columns, column, row, count, size, to):
    """Copy one part of a row and set its address in `columns`. Return the address behind the copy."""
    if columns[column] == 0:
        return to
    source = columns[column] + size * (row // TILE * TILE * count + row % TILE)
    columns[column] = to
    for index in range(count):
        at, behind = source + size * TILE * index, to + size * index
        if size == 4:
            store_int32(behind, load_int32(at))
        elif size == 2:
            store_int16(behind, load_uint16(at))
        else:
            copy_bytes(behind, at, 1)
    return to + size * count
