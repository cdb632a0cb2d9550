"""Emit products of packed rows as LLVM IR: words are widened to float32 in registers, and scaled there.

Functions for use inside numba code; addresses, strides and counts are int64. A row has the layout of GPU kernels: units
of 64 bytes, taken as 32 numbers of 16 bits, each of which has one column of every run of 32: of run p at the bits from
`p * bits` on. So a shift and a mask give neighbouring columns in their order.

A column is `q * gain + offset`, or `q * gain` for FP8 (e4m3) and FP4 (e2m1). Gains and offsets are stored beside the
row in float32, so many per unit. FP4 is looked up among its 16 numbers, or among 8 and a sign where vectors are narrow;
a register holds these numbers times the gain. A result depends on its own row and vector only, as in
`transfer.simd.vectors`. Bytes moved: each row once per block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.model_constants import FP4_NUMBERS
from transfer.simd.emission import (
    F32,
    I16,
    I32,
    I64,
    NEAR,
    VECTOR,
    accumulate,
    addresses,
    broadcast,
    fused,
    int64,
    lane_sums,
    prefetch,
    shuffle,
    store_part,
    widened,
    zero,
)
from transfer.simd.features import LANES, SIMD
from transfer.simd.vectors import LINE_BYTES, emit_dots, item_bytes

RUN = 32  # adjacent columns of a place
LEAST_GROUP = 16  # fewest columns that share a gain: those of the widest vector
FLOAT_GAIN = 256.0  # an FP8 number put into the bits of a float16 is smaller by this factor
BITS = {"int4": 4, "int8": 8, "fp8": 8, "fp4": 4}
_TAGS = {"int4": np.uint8, "int8": np.uint16, "fp8": np.float32, "fp4": np.int8}
_NUMBERS = {types.uint8: "int4", types.uint16: "int8", types.float32: "fp8", types.int8: "fp4"}
_HALVES, _WORDS = ir.VectorType(I16, LANES), ir.VectorType(I32, LANES)


def number_of(kind: Any) -> str:
    """Return the number format of packed rows, from their numba type."""
    return _NUMBERS[kind.dtype]


def places_of(number: str) -> int:
    """Return the number of runs of a unit."""
    return 16 // BITS[number]


def unit_columns(number: str) -> int:
    return RUN * places_of(number)


def packed_kind(number: str, gains_per_unit: int) -> tuple[Any, ...]:
    """Return the value whose numba type stands for rows of "int4", "int8", "fp8" or "fp4", as a float32 or a uint16
    does for plain rows.
    """
    return (_TAGS[number](0),) * gains_per_unit


def product_block(rows: int, vectors: int) -> Any:
    """Return a numba function: `out[v, r] = sum(row[r] * x[v, :])` for so many rows, plain or packed, and vectors.

    Both numbers are powers of two. Rows are adjacent; gains and offsets of packed rows are `gain_stride` float32 apart.
    The inner length is whole lines of 64 bytes for plain rows, and whole runs for packed rows.
    """

    @intrinsic
    def products(
        typing_context, kind, weights, gains, offsets, gain_stride, x, x_stride, inner, out, out_stride, ahead
    ):
        def emit(context, builder, signature, arguments):
            _, *others = arguments
            emit_products(builder, kind, rows, vectors, others)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 10), emit

    return products


def emit_products(builder: ir.IRBuilder, kind: Any, rows: int, vectors: int, arguments: Sequence[Any]) -> None:
    """Emit the code of a function of `product_block`."""
    if isinstance(kind, types.UniTuple):
        _Block(builder, number_of(kind), kind.count, rows, vectors).emit(*arguments)
        return
    weights, _, _, _, x, x_stride, inner, out, out_stride, ahead = arguments
    emit_dots(builder, item_bytes(kind), rows, vectors, weights, inner, x, x_stride, inner, out, out_stride, ahead)


@intrinsic
def widen_row(typing_context, kind, out_kind, words, gains, offsets, inner, out, ahead):
    """Return a numba function that writes one packed row's numbers to `out`, in float32 or, where `out_kind` is a
    uint16, rounded to bf16. Other arguments are those of `product_block`.
    """
    size = item_bytes(out_kind)

    def emit(context, builder, signature, arguments):
        _, _, words, gains, offsets, inner, out, ahead = arguments
        row = _WidenedRow(builder, number_of(kind), kind.count, out, size)
        row.emit_rows(words, gains, offsets, int64(0), inner, ahead)
        return context.get_dummy_value()

    return types.void(kind, out_kind, *[types.int64] * 6), emit


class _Rows:
    """The emitter of a loop over packed rows; subclasses define what is done with the numbers."""

    def __init__(self, builder: ir.IRBuilder, number: str, gains_per_unit: int, rows: int) -> None:
        self.builder, self.number, self.gains_per_unit, self.rows = builder, number, gains_per_unit, rows
        self.places, self.columns = places_of(number), unit_columns(number)

    def take(self, numbers: list[Any], unit: Any, column: int) -> None:
        """Process a vector of each row's numbers, float32, from `column` of a unit on."""
        raise NotImplementedError

    def emit_rows(self, weights: Any, gains: Any, offsets: Any, gain_stride: Any, inner: Any, ahead: Any) -> None:
        builder, columns = self.builder, int64(self.columns)
        whole, left = builder.udiv(inner, columns), builder.urem(inner, columns)
        units = builder.udiv(builder.add(inner, int64(self.columns - 1)), columns)
        self.row_at = list(addresses(builder, weights, units, LINE_BYTES, self.rows))
        self.gain_at = list(addresses(builder, gains, gain_stride, 4, self.rows))
        self.offset_at = list(addresses(builder, offsets, gain_stride, 4, self.rows))
        with cgutils.for_range(builder, whole, intp=I64) as unit:
            for address in self.row_at:
                at = builder.add(address, builder.mul(unit.index, int64(LINE_BYTES)))
                prefetch(builder, builder.add(at, ahead), NEAR)
            self._emit_places(unit.index, range(self.places))
        for place in range(self.places - 1):  # of a unit that is not whole
            is_there = builder.icmp_unsigned(">", left, int64(place * RUN))
            with builder.if_then(is_there):
                self._emit_places(whole, range(place, place + 1))

    def _emit_places(self, unit: Any, places: range) -> None:
        """Emit one unit in straight code: values that follow from gains are computed once."""
        builder, made = self.builder, {}
        row_byte = builder.mul(unit, int64(LINE_BYTES))
        first_gain = builder.mul(unit, int64(4 * self.gains_per_unit))
        for place in places:
            for begin in range(0, RUN, LANES):
                column = place * RUN + begin
                gain = column * self.gains_per_unit // self.columns
                ours = []
                for row in range(self.rows):
                    if (row, gain) not in made:
                        made[row, gain] = self._scale(row, builder.add(first_gain, int64(4 * gain)))
                    at = builder.inttoptr(builder.add(builder.add(self.row_at[row], row_byte), int64(2 * begin)),
                                          _HALVES.as_pointer())  # fmt: skip
                    ours.append(made[row, gain](builder.load(at, align=2), place))
                self.take(ours, unit, column)

    def _scale(self, row: int, byte: Any) -> Callable[[Any, int], Any]:
        """Return a function that scales the numbers at a place of a row's words, by the gain and offset there."""
        builder = self.builder
        gain = broadcast(builder, builder.add(self.gain_at[row], byte))
        if self.number == "fp8":
            return lambda halves, place: builder.fmul(_floats(builder, halves, place), gain)
        if self.number == "fp4":
            levels = (*FP4_NUMBERS, *(-level for level in FP4_NUMBERS))[:LANES]
            table = builder.fmul(ir.Constant(VECTOR, list(levels)), gain)
            return lambda halves, place: _looked_up(builder, table, _shifted(builder, halves, 4 * place))
        offset = broadcast(builder, builder.add(self.offset_at[row], byte))
        if self.number == "int4" and SIMD == "avx512":
            levels = ir.Constant(VECTOR, [float(level) for level in range(16)])
            table = fused(builder, levels, gain, offset)
            return lambda halves, place: _chosen(builder, table, _shifted(builder, halves, 4 * place))
        bits = BITS[self.number]
        mask = ir.Constant(_WORDS, [2**bits - 1] * LANES)

        def scaled(halves: Any, place: int) -> Any:
            numbers = builder.and_(_shifted(builder, halves, bits * place), mask)
            return fused(builder, builder.sitofp(numbers, VECTOR), gain, offset)

        return scaled


class _Block(_Rows):
    """The emitter of products of rows and vectors."""

    def __init__(self, builder: ir.IRBuilder, number: str, gains_per_unit: int, rows: int, vectors: int) -> None:
        super().__init__(builder, number, gains_per_unit, rows)
        self.vectors = vectors
        self.sums = [cgutils.alloca_once_value(builder, zero()) for _ in range(rows * vectors)]

    def emit(self, weights: Any, gains: Any, offsets: Any, gain_stride: Any, x: Any, x_stride: Any, inner: Any,
             out: Any, out_stride: Any, ahead: Any) -> None:  # fmt: skip
        builder = self.builder
        self.x_at = list(addresses(builder, x, x_stride, 4, self.vectors))
        self.emit_rows(weights, gains, offsets, gain_stride, inner, ahead)
        totals = lane_sums(builder, [builder.load(total) for total in self.sums])
        for vector, address in enumerate(addresses(builder, out, out_stride, 4, self.vectors)):
            store_part(builder, totals, vector * self.rows, self.rows, address)

    def take(self, numbers: list[Any], unit: Any, column: int) -> None:
        builder = self.builder
        x_byte = builder.mul(unit, int64(4 * self.columns))
        for vector, address in enumerate(self.x_at):
            theirs = widened(builder, builder.add(address, x_byte), column, 4)
            for row in range(self.rows):
                accumulate(builder, self.sums[vector * self.rows + row], numbers[row], theirs)


class _WidenedRow(_Rows):
    """The emitter of one row's numbers, in `size` bytes each."""

    def __init__(self, builder: ir.IRBuilder, number: str, gains_per_unit: int, out: Any, size: int) -> None:
        super().__init__(builder, number, gains_per_unit, 1)
        self.out, self.size = out, size

    def take(self, numbers: list[Any], unit: Any, column: int) -> None:
        builder, (values,) = self.builder, numbers
        at = builder.add(self.out, builder.mul(unit, int64(self.size * self.columns)))
        at = builder.add(at, int64(self.size * column))
        stored = values if self.size == 4 else _rounded(builder, values)
        builder.store(stored, builder.inttoptr(at, stored.type.as_pointer()), align=self.size)


def _rounded(builder: ir.IRBuilder, values: Any) -> Any:
    """Return the nearest bf16 of finite float32, ties to even, as their bits."""
    bits = builder.bitcast(values, _WORDS)
    odd = builder.and_(builder.lshr(bits, ir.Constant(_WORDS, [16] * LANES)), ir.Constant(_WORDS, [1] * LANES))
    moved = builder.add(bits, builder.add(odd, ir.Constant(_WORDS, [0x7FFF] * LANES)))
    return builder.trunc(builder.lshr(moved, ir.Constant(_WORDS, [16] * LANES)), _HALVES)


def _shifted(builder: ir.IRBuilder, halves: Any, bits: int) -> Any:
    words = builder.zext(halves, _WORDS)
    return builder.lshr(words, ir.Constant(_WORDS, [bits] * LANES)) if bits else words


def _floats(builder: ir.IRBuilder, halves: Any, place: int) -> Any:
    """Return FP8 bytes, of which the lower one is at place 0, as float16 scaled by 1 / FLOAT_GAIN. The sign stays, and
    exponent and mantissa move one bit lower, so that subnormal numbers are right, too.
    """
    one = ir.Constant(_HALVES, [1] * LANES)
    top = builder.shl(halves, ir.Constant(_HALVES, [8] * LANES)) if place == 0 else halves
    bits = builder.and_(builder.ashr(top, one), ir.Constant(_HALVES, [0xBF80] * LANES))
    return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VECTOR)


def _looked_up(builder: ir.IRBuilder, table: Any, codes: Any) -> Any:
    """Choose from 16 float32 by the lowest 4 bits of each lane; in narrow vectors from 8, with the fourth as sign."""
    if SIMD == "avx512":
        return _chosen(builder, table, codes)
    function_type = ir.FunctionType(VECTOR, [VECTOR, _WORDS])
    choose = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx2.permps")
    sign = builder.and_(builder.shl(codes, ir.Constant(_WORDS, [28] * LANES)), ir.Constant(_WORDS, [1 << 31] * LANES))
    size = builder.bitcast(builder.call(choose, [table, codes]), _WORDS)
    return builder.bitcast(builder.xor(size, sign), VECTOR)


def _chosen(builder: ir.IRBuilder, table: Any, numbers: Any) -> Any:
    """Choose from 16 float32 by the lowest 4 bits of each lane."""
    function_type = ir.FunctionType(VECTOR, [VECTOR, _WORDS])
    choose = cgutils.get_or_insert_function(builder.module, function_type, "llvm.x86.avx512.permvar.sf.512")
    return builder.call(choose, [table, numbers])


@intrinsic
def is_packed(typing_context, kind):
    """Return whether rows of a kind are packed: a constant of the compiled code."""

    def emit(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(1), int(isinstance(kind, types.UniTuple)))

    return types.boolean(kind), emit


@intrinsic
def float_of_half(typing_context, bits):
    """Return a float16, given by its bits, as float32."""

    def emit(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), F32)

    return types.float32(types.uint16), emit


@intrinsic
def float_of_bfloat16(typing_context, bits):
    """Return a bfloat16, given by its bits, as float32."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(builder.shl(builder.zext(arguments[0], I32), ir.Constant(I32, 16)), F32)

    return types.float32(types.uint16), emit


def scaled_runs(count: int) -> Any:
    """Return a numba function for `count` groups that are a run each. It stores the lower byte of each pair of signed
    bytes times the lower float16 of its word, and the upper byte times the upper float16, negated.
    """
    words, halves, floats = (ir.VectorType(kind, count) for kind in (I32, I16, F32))

    @intrinsic
    def scaled(typing_context, runs, pairs, lower_out, upper_out):
        def emit(context, builder, signature, arguments):
            runs, pairs, *outs = arguments
            bits = builder.load(builder.inttoptr(runs, words.as_pointer()), align=4)
            both = builder.load(builder.inttoptr(pairs, halves.as_pointer()), align=2)
            eight, sixteen = ir.Constant(halves, [8] * count), ir.Constant(words, [16] * count)
            numbers = builder.ashr(builder.shl(both, eight), eight), builder.ashr(both, eight)
            for part, (number, moved) in enumerate(zip(numbers, (bits, builder.lshr(bits, sixteen)), strict=True)):
                half = builder.bitcast(builder.trunc(moved, halves), ir.VectorType(ir.HalfType(), count))
                made = builder.fmul(builder.fpext(half, floats), builder.sitofp(builder.sext(number, words), floats))
                made = builder.fneg(made) if part == 1 else made
                builder.store(made, builder.inttoptr(outs[part], floats.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), emit

    return scaled


@intrinsic
def scale_sixteen(typing_context, first_run, second_run, pairs, lower_out, upper_out):
    """Do what `scaled_pairs` does for 16 groups, of which the upper eight belong to the second run. Both runs are
    addresses of words of two float16.
    """
    words, halves, floats = (ir.VectorType(kind, 16) for kind in (I32, I16, F32))
    two = ir.VectorType(I16, 2)

    def emit(context, builder, signature, arguments):
        first_run, second_run, pairs, lower_out, upper_out = arguments
        first, second = (
            builder.load(builder.inttoptr(run, two.as_pointer()), align=4) for run in (first_run, second_run)
        )
        bits = builder.bitcast(shuffle(builder, first, second, range(4)), ir.VectorType(ir.HalfType(), 4))
        both = builder.fpext(bits, ir.VectorType(F32, 4))
        numbers = builder.sext(builder.load(builder.inttoptr(pairs, halves.as_pointer()), align=2), words)
        top, eight = ir.Constant(words, [24] * 16), ir.Constant(words, [8] * 16)
        parts = builder.ashr(builder.shl(numbers, top), top), builder.ashr(numbers, eight)
        for part, (number, out) in enumerate(zip(parts, (lower_out, upper_out), strict=True)):
            factors = shuffle(builder, both, both, [part] * 8 + [part + 2] * 8)
            made = builder.fmul(builder.sitofp(number, floats), builder.fneg(factors) if part else factors)
            builder.store(made, builder.inttoptr(out, floats.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


def scaled_pairs(count: int) -> Any:
    """Return a numba function for `count` pairs of signed bytes. It stores the lower bytes times one float32, and the
    upper bytes times another.
    """
    words, floats = ir.VectorType(I32, count), ir.VectorType(F32, count)

    @intrinsic
    def scaled(typing_context, pairs, lower, upper, lower_out, upper_out):
        def emit(context, builder, signature, arguments):
            pairs, lower, upper, *outs = arguments
            halves = builder.load(builder.inttoptr(pairs, ir.VectorType(I16, count).as_pointer()), align=2)
            both, eight = builder.sext(halves, words), ir.Constant(words, [8] * count)
            top = ir.Constant(words, [24] * count)
            numbers = builder.ashr(builder.shl(both, top), top), builder.ashr(both, eight)
            for number, factor, out in zip(numbers, (lower, upper), outs, strict=True):
                alone = builder.insert_element(ir.Constant(floats, ir.Undefined), factor, ir.Constant(I32, 0))
                factors = shuffle(builder, alone, alone, [0] * count)
                made = builder.fmul(builder.sitofp(number, floats), factors)
                builder.store(made, builder.inttoptr(out, floats.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.float32, types.float32, types.int64, types.int64), emit

    return scaled
