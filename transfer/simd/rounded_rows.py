"""Multiply packed rows in integers, row by row instead of in tiles, with rounded tokens.

Tokens are those of `transfer.simd.row_tiles`. A vector has columns of one row in its lanes. A place of a line has the
pairs of a run of 32, which are multiplied by those of the token, added up exactly in int32, and then scaled. So experts
that a card may fetch are multiplied in their stored layout; for many tokens tiles are faster, since their gains are
vectors. FP4 is looked up: its bits choose 2 * 256 times its number. A result depends on its own row and token only, to
the last bit. Bytes moved: each row once per block.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from transfer.model_constants import FP4_NUMBERS
from transfer.simd.emission import (
    I8,
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
    zero,
)
from transfer.simd.features import LANES
from transfer.simd.packed_rows import (
    BITS,
    LEAST_GROUP,
    RUN,
    emit_products,
    number_of,
    packed_kind,
    places_of,
    unit_columns,
)
from transfer.simd.row_tiles import LOOK_UP, MULTIPLY_PAIRS, NUMBERS
from transfer.simd.vectors import LINE_BYTES

_FP4_BYTES = [round(2 * sign * number) % 256 for sign in (1, -1) for number in FP4_NUMBERS]
_FP4_SCALE = 2.0**-9  # undoes the integers for FP4: twice its number, in the upper byte of 16 bits
_FP4_AT, _FP4_MASK, _NOTHING = 8, 0x0F00, 0x0080  # bits that choose, and those that make the lower byte 0
_HALVES, _WORDS, _BYTES = (ir.VectorType(kind, count * LANES) for kind, count in ((I16, 2), (I32, 1), (I8, 4)))
_PARTS = LINE_BYTES // (4 * LANES)  # vectors of a line


def rounded_kind(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the value that stands for rows of a `packed_kind` that are multiplied in integers."""
    return (kind,)


def _is_rounded(kind: Any) -> bool:
    return isinstance(kind, types.UniTuple) and isinstance(kind.dtype, types.UniTuple)


@intrinsic
def is_rounded(typing_context, kind):
    """Return whether rows of a kind are multiplied with rounded tokens: a constant of the compiled code."""

    def emit(context, builder, signature, arguments):
        return ir.Constant(ir.IntType(1), int(_is_rounded(kind)))

    return types.boolean(kind), emit


def _columns(is_unit: bool) -> Any:
    @intrinsic
    def columns(typing_context, kind):
        def emit(context, builder, signature, arguments):
            if not _is_rounded(kind):
                return int64(1)
            unit = unit_columns(number_of(kind.dtype))
            return int64(unit if is_unit else unit // kind.dtype.count)

        return types.int64(kind), emit

    return columns


unit_of, group_of = _columns(True), _columns(False)
"""Numba functions: how many columns share a token's scale, and a row's gain, for rows of a rounded kind."""


def any_products(rows: int, vectors: int) -> Any:
    """Return a numba function like `packed_rows.product_block`, which for rounded kinds takes tokens that `round_token`
    has rounded.
    """

    @intrinsic
    def products(
        typing_context, kind, weights, gains, offsets, gain_stride, x, x_stride, inner, out, out_stride, ahead
    ):
        def emit(context, builder, signature, arguments):
            _, *others = arguments
            if _is_rounded(kind):
                _Block(builder, number_of(kind.dtype), kind.dtype.count, rows, vectors).emit(*others)
            else:
                emit_products(builder, kind, rows, vectors, others)
            return context.get_dummy_value()

        return types.void(kind, *[types.int64] * 10), emit

    return products


class _Block:
    """The emitter of products of rows and rounded tokens."""

    def __init__(self, builder: ir.IRBuilder, number: str, gains_per_unit: int, rows: int, vectors: int) -> None:
        self.builder, self.number, self.gains_per_unit, self.rows = builder, number, gains_per_unit, rows
        self.bits, self.places, self.columns = BITS[number], places_of(number), unit_columns(number)
        self.group, self.vectors = self.columns // gains_per_unit, vectors
        self.sums = [cgutils.alloca_once_value(builder, zero()) for _ in range(rows * vectors)]

    def emit(self, weights: Any, gains: Any, offsets: Any, gain_stride: Any, x: Any, x_stride: Any, inner: Any,
             out: Any, out_stride: Any, ahead: Any) -> None:  # fmt: skip
        builder, columns = self.builder, int64(self.columns)
        whole, left = builder.udiv(inner, columns), builder.urem(inner, columns)
        units = builder.udiv(builder.add(inner, int64(self.columns - 1)), columns)
        self.row_at = list(addresses(builder, weights, units, LINE_BYTES, self.rows))
        self.gain_at = list(addresses(builder, gains, gain_stride, 4, self.rows))
        self.x_at = list(addresses(builder, x, x_stride, 4, self.vectors))
        self.scales_at = [builder.add(at, builder.mul(inner, int64(2))) for at in self.x_at]
        with cgutils.for_range(builder, whole, intp=I64) as unit:
            for address in self.row_at:
                at = builder.add(address, builder.mul(unit.index, int64(LINE_BYTES)))
                prefetch(builder, builder.add(at, ahead), NEAR)
            self._emit_places(unit.index, range(self.places))
        for place in range(self.places - 1):  # of a unit that is not whole
            with builder.if_then(builder.icmp_unsigned(">", left, int64(place * RUN))):
                self._emit_places(whole, range(place, place + 1))
        if self.number != "fp4":
            sums = [builder.add(at, builder.mul(units, int64(4))) for at in self.scales_at]
            self._emit_offsets(
                offsets, gain_stride, sums, builder.udiv(builder.add(inner, int64(self.group - 1)), int64(self.group))
            )
        totals = lane_sums(builder, [builder.load(total) for total in self.sums])
        for vector, address in enumerate(addresses(builder, out, out_stride, 4, self.vectors)):
            store_part(builder, totals, vector * self.rows, self.rows, address)

    def _emit_places(self, unit: Any, places: range) -> None:
        """Emit some places of a unit in straight code."""
        builder = self.builder
        scales = [broadcast(builder, builder.add(at, builder.mul(unit, int64(4)))) for at in self.scales_at]
        if self.number == "fp4":
            scales = [builder.fmul(scale, ir.Constant(VECTOR, [_FP4_SCALE] * LANES)) for scale in scales]
        for row in range(self.rows):
            line = [self._load(self.row_at[row], unit, LINE_BYTES, 4 * LANES * part) for part in range(_PARTS)]
            made = [zero()] * self.vectors
            sums: list[list[Any]] = [[None] * len(line)] * self.vectors
            for place in places:
                pairs = [self._pairs(held, place) for held in line]
                for vector in range(self.vectors):
                    sums[vector] = [
                        self._added(total, pair, self._load(self.x_at[vector], unit, 2 * self.columns,
                                                            2 * RUN * place + 4 * LANES * part))
                        for part, (total, pair) in enumerate(zip(sums[vector], pairs, strict=True))
                    ]  # fmt: skip
                if self.group > RUN and place != places[-1]:
                    continue  # more places share the gain
                gains = self._gains(row, unit, place)
                for vector in range(self.vectors):
                    totals = sums[vector] if len(gains) == len(line) else [builder.add(*sums[vector])]
                    for total, gain in zip(totals, gains, strict=True):
                        made[vector] = fused(builder, builder.sitofp(total, VECTOR), gain, made[vector])
                sums = [[None] * len(line)] * self.vectors
            for vector in range(self.vectors):
                accumulate(builder, self.sums[vector * self.rows + row], made[vector], scales[vector])

    def _load(self, address: Any, unit: Any, unit_bytes: int, byte: int) -> Any:
        builder = self.builder
        at = builder.add(builder.add(address, builder.mul(unit, int64(unit_bytes))), int64(byte))
        return builder.load(builder.inttoptr(at, _HALVES.as_pointer()), align=2)

    def _pairs(self, held: Any, place: int) -> Any:
        """Return the numbers of a place, each in 16 bits."""
        builder, bits = self.builder, self.bits * place

        def every(number: int) -> Any:
            return ir.Constant(_HALVES, [number] * 2 * LANES)

        if self.number != "fp4":
            held = builder.lshr(held, every(bits)) if bits else held
            return builder.and_(held, every(2**self.bits - 1)) if place < self.places - 1 else held
        if bits != _FP4_AT:
            move, by = (builder.shl, _FP4_AT - bits) if bits < _FP4_AT else (builder.lshr, bits - _FP4_AT)
            held = move(held, every(by))
        chosen = builder.or_(builder.and_(held, every(_FP4_MASK)), every(_NOTHING))
        look_up = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_BYTES, [_BYTES] * 2), LOOK_UP)
        table = ir.Constant(_BYTES, _FP4_BYTES * (LANES // 4))
        return builder.bitcast(builder.call(look_up, [table, builder.bitcast(chosen, _BYTES)]), _HALVES)

    def _gains(self, row: int, unit: Any, place: int) -> list[Any]:
        """Return a place's gains in all lanes: one vector, or one for each part of a line."""
        builder, groups = self.builder, max(1, RUN // self.group)
        first = builder.add(self.gain_at[row], builder.mul(unit, int64(4 * self.gains_per_unit)))
        number = RUN * place // self.group
        at = [builder.add(first, int64(4 * (number + other))) for other in range(groups)]
        found = [broadcast(builder, one) for one in at]
        if groups == 1 or groups == _PARTS:
            return found
        half = LANES // groups
        lower, upper = found
        return [shuffle(builder, lower, upper, [*range(half), *range(LANES + half, 2 * LANES)])]

    def _added(self, total: Any | None, pairs: Any, codes: Any) -> Any:
        """Return an exact sum: at most four products of two pairs, below 2**12 * 2**15 each."""
        builder = self.builder
        kind = ir.FunctionType(_WORDS, [_HALVES] * 2)
        multiply = cgutils.get_or_insert_function(builder.module, kind, MULTIPLY_PAIRS)
        made = builder.call(multiply, [pairs, codes])
        return made if total is None else builder.add(total, made)

    def _emit_offsets(self, offsets: Any, gain_stride: Any, sums: list[Any], count: Any) -> None:
        """Add offsets times sums of tokens, LANES groups at a time. Groups beyond the last are read and left out."""
        builder, lanes = self.builder, int64(LANES)
        offset_at = list(addresses(builder, offsets, gain_stride, 4, self.rows))
        blocks = builder.udiv(builder.add(count, int64(LANES - 1)), lanes)
        with cgutils.for_range(builder, blocks, intp=I64) as block:
            begin = builder.mul(block.index, lanes)
            left = builder.trunc(builder.sub(count, begin), I32)
            alone = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), left, ir.Constant(I32, 0))
            is_there = builder.icmp_signed("<", ir.Constant(_WORDS, list(range(LANES))),
                                           shuffle(builder, alone, alone, [0] * LANES))  # fmt: skip

            def load(address: Any) -> Any:
                at = builder.inttoptr(builder.add(address, builder.mul(begin, int64(4))), VECTOR.as_pointer())
                return builder.select(is_there, builder.load(at, align=4), zero())

            theirs = [load(at) for at in sums]
            for row in range(self.rows):
                ours = load(offset_at[row])
                for vector, other in enumerate(theirs):
                    accumulate(builder, self.sums[vector * self.rows + row], ours, other)


def compile_rounded() -> None:
    """Compile products of rounded kinds without running them (`transfer.simd.trial`)."""
    multiply = any_products(4, 4)

    def compile_kind(kind: Any) -> None:
        def products(rows, gains, offsets, x, inner, out):
            multiply(kind, rows, gains, offsets, 64, x, 1024, inner, out, 4, 4096)

        numba.njit("void(int64, int64, int64, int64, int64, int64)")(products)

    for number in NUMBERS:
        for group in (unit_columns(number), RUN, LEAST_GROUP):
            compile_kind(rounded_kind(packed_kind(number, unit_columns(number) // group)))
